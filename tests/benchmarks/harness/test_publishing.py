"""Sections of pages are written between their markers, and the rest of the page does not change."""

from benchmarks.harness.publishing import section_markers, write_section


def test_a_section_replaces_itself_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nProse.\n")
    write_section(page, "decode", "first")
    begin, end = section_markers("decode")
    assert page.read_text() == f"# Title\n\nProse.\n\n{begin}\n\nfirst\n\n{end}\n"
    page.write_text(page.read_text() + "\nMore prose.\n")
    write_section(page, "decode", "second")
    assert page.read_text() == f"# Title\n\nProse.\n\n{begin}\n\nsecond\n\n{end}\n\nMore prose.\n"
