"""Pages of docs/results: every table has its date and commit and matches the raw measurements."""

import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.harness.paths import PAGES, ROOT
from benchmarks.harness.provenance import OLDER, changed_since
from benchmarks.harness.publishing import PAGE_OF, section_markers
from benchmarks.publish import sections

STAMP = re.compile(
    r"^\*Measured \d{4}-\d\d-\d\d( and \d{4}-\d\d-\d\d)*, "
    r"((at|recorded in) commits? `[0-9a-f]{7,}`.*|recorded before commits were noted)\.( .*)?\*$"
)


def pages() -> list[Path]:
    return sorted(PAGES.glob("*.md"))


def stamps_of_tables(text: str) -> list[str]:
    """The paragraph before each table."""
    blocks = [block.strip() for block in text.split("\n\n")]
    return [blocks[i - 1] for i, block in enumerate(blocks) if block.startswith("|")]


@cache
def rendered() -> dict[str, str]:
    return sections.sections()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_table_has_a_stamp(page):
    for line in stamps_of_tables(page.read_text("utf-8")):
        assert STAMP.match(line), f"{page.name}: {line!r} stands above a table"


@pytest.mark.parametrize("subject", ["proof", "roofline"])
def test_tables_about_kernels_have_a_stamp(subject):
    text = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    section = text.partition(f"<!-- {subject}: ")[2].partition(f"<!-- end of {subject} -->")[0]
    (line,) = stamps_of_tables(section)
    assert STAMP.match(line), line


def test_a_table_without_a_stamp_is_found():
    table = "| a |\n| ---: |\n| 1 |"
    assert not STAMP.match(stamps_of_tables(f"**Title**\n\n{table}")[0])
    assert STAMP.match("*Measured 2026-01-01, at commit `0123abc`.*")
    assert STAMP.match(
        f"*Measured 2026-01-01 and 2026-01-02, recorded in commits `0123abc` and `4567def`. {OLDER}*"
    )


def section_of(name: str) -> str:
    """What a benchmark has written into its page, which may have sections of others."""
    begin, end = section_markers(name)
    return (PAGES / PAGE_OF[name]).read_text("utf-8").partition(begin)[2].partition(end)[0].strip()


@pytest.mark.parametrize("name", PAGE_OF)
def test_a_page_says_what_was_measured(name):
    text = rendered().get(name, "")  # nothing where nothing has been measured
    assert section_of(name).replace(f" {OLDER}", "") == text.strip().replace(f" {OLDER}", "")


@pytest.mark.parametrize("name", PAGE_OF)
def test_a_table_older_than_its_code_says_so(name):
    if changed_since("HEAD", ["benchmarks"]) is None:
        pytest.skip("there is no repository to compare with")
    pairs = zip(stamps_of_tables(section_of(name)), stamps_of_tables(rendered().get(name, "")), strict=True)
    for written, current in pairs:
        assert OLDER in written or OLDER not in current, f"run python -m benchmarks.publish: {written}"


def test_the_summary_links_every_page_and_begins_with_plots():
    text = (PAGES / "index.md").read_text("utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", text))
    assert linked == {page.name for page in pages()} - {"index.md"}
    plots = re.findall(r"!\[.*\]\((.*\.svg)\)", text)
    assert plots and all((PAGES / plot).exists() for plot in plots)
    assert text.index("![") < text.index("\n- ")


def test_measured_code_exists():
    reports = [report for report, _ in sections.REPORTS.values()] + [
        sections.ABLATION_REPORT,
        sections.DECODE_REPORT,
    ]
    for report in reports:
        assert [path for path in report.MEASURED_CODE if not (ROOT / path).exists()] == []
