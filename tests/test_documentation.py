"""The documentation: it builds, its module tables match the tree, and the files it names exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = re.compile(r"<!-- modules: (?P<folder>\S+) -->\n\n(?P<rows>(?:\|.*\n)+)")
LONG_CELL = 200  # characters
FOLDERS = ("benchmarks", "docs", "entropic_jax", "examples", "models", "serving", "tests")
NAMED = re.compile(rf"`(?P<path>(?:{'|'.join(FOLDERS)})/[\w./-]*?(?:/|\.\w+))`")


def modules(folder: Path) -> set[str]:
    """The entries that a folder's module table must have: `name.py` and `name/`, except private ones."""
    files = {path.name for path in folder.glob("*.py") if not path.name.startswith("_")}
    return files | {f"{path.name}/" for path in folder.iterdir() if any(path.glob("*.py"))}


def table_differences(page: str, root: Path) -> list[str]:
    """Modules that the tables of a page omit, and entries that name none."""
    differences = []
    for table in TABLE.finditer(page):
        first_column = "\n".join(row.split("|")[1] for row in table["rows"].splitlines()[2:])
        listed, existing = set(re.findall(r"`([^`]+)`", first_column)), modules(root / table["folder"])
        differences += [f"{table['folder']}: {name} is not listed" for name in sorted(existing - listed)]
        differences += [f"{table['folder']}: {name} does not exist" for name in sorted(listed - existing)]
    return differences


def missing_paths(page: str, root: Path) -> list[str]:
    """Files and folders of the tree that a page names and that do not exist."""
    return [name for name in NAMED.findall(page) if not (root / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_module_tables_match_the_tree(page):
    assert table_differences(page.read_text("utf-8"), ROOT) == []


def test_cells_of_module_tables_are_short():
    """A longer description belongs into a table of its own, or into prose."""
    cells = [
        cell.strip()
        for page in PAGES
        for table in TABLE.finditer(page.read_text("utf-8"))
        for row in table["rows"].splitlines()
        for cell in row.split("|")
    ]
    assert len(cells) > 100 and [cell for cell in cells if len(cell) > LONG_CELL] == []


def test_main_packages_have_module_tables():
    """The packages that a reader of the code enters first; smaller ones are a row in the table above them."""
    tables = {table["folder"] for page in PAGES for table in TABLE.finditer(page.read_text("utf-8"))}
    engine_side = {"serving/engine", "serving/http", "serving/options", "serving/commands"}
    engine_side |= {"serving/http/routes", "serving/http/protocol", "serving/llm"}
    core = {"methods", "pallas", "attention", "sampling", "control", "speculation", "phases", "state"}
    core = {f"entropic_jax/{name}" for name in (*core, "parameter_tables", "pallas/paged_attention")}
    assert {"entropic_jax", "models", "serving"} | engine_side | core <= tables


def test_a_table_that_is_out_of_date_is_found(tmp_path):
    for name in ("engine/scheduler.py", "engine/new.py", "engine/http/app.py", "engine/_private.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    rows = "| file | holds |\n| --- | --- |\n| `scheduler.py`, `http/` | two |\n| `old.py` | gone |\n"
    assert table_differences(f"<!-- modules: engine -->\n\n{rows}", tmp_path) == [
        "engine: new.py is not listed",
        "engine: old.py does not exist",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_named_files_exist(page):
    assert missing_paths(page.read_text("utf-8"), ROOT) == []


def test_the_first_page_is_a_screen_and_a_half():
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 75 and max(map(len, lines)) <= 100


def test_the_lists_for_contributors_have_at_most_ten_lines():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    sections = re.findall(r"^## (Add a [^\n]+)\n(.+?)(?=^## |\Z)", text, re.M | re.S)
    assert len(sections) == 5
    for title, section in sections:
        steps = section.partition("\n1. ")[2].strip()
        assert 0 < len(steps.splitlines()) <= 10, title


def test_a_file_that_does_not_exist_is_found(tmp_path):
    (tmp_path / "models").mkdir()
    page = "See `models/`, `models/gone.py`, `serving/engine/` and `import models`."
    assert missing_paths(page, tmp_path) == ["models/gone.py", "serving/engine/"]


def test_the_api_reference_has_every_module_of_the_loop():
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    folders = ("phases", "control", "attention", "sampling", "speculation", "calibration", "mesh")
    files = [path for folder in folders for path in (ROOT / "entropic_jax" / folder).glob("*.py")]
    files += (ROOT / "entropic_jax").glob("*.py")
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if path.stem[0] != "_"
    }
    assert modules - documented == set()


def test_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason="pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # an announcement, not about this site
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    loaded = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 10
    assert [loaded.findall(page.read_text("utf-8")) for page in pages] == [[]] * len(pages)


def test_the_usage_page_lists_every_temperature_law():
    from entropic_jax.parameter_tables.control_gains import TEMPERATURE_LAWS

    row = next(
        line for line in (ROOT / "docs/usage.md").read_text().splitlines() if line.startswith("| `--law`")
    )
    assert set(re.findall(r"`(\w+)`", row)) == set(TEMPERATURE_LAWS)


def test_every_option_is_on_its_page_as_the_command_line_has_it():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import command_options
    finally:
        sys.path.remove(str(ROOT / "docs"))
    assert command_options.PAGE.read_text("utf-8") == command_options.page(), (
        "run python docs/command_options.py"
    )
    assert "`--max-stops" in command_options.page()
