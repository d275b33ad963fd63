"""Tables: text columns are left-aligned, numbers right-aligned, and every title has a stamp."""

import pytest

from benchmarks.harness.tables import is_numeric, markdown


@pytest.mark.parametrize(
    ("cells", "numeric"),
    [
        (["97.3 (85.6–99.1) 2.07×", "failed", "–"], True),
        (["+3.82 (+2.35 … +5.32) *", "-0.06 (-0.82 … +0.72)", ""], True),
        (["≤ 0.6", "≥ 1.7"], True),
        (["< 1e-4", "0.5"], True),
        (["463 (433–573) then failed"], True),
        (["100 · 0.02"], True),
        (["8 × 8 × float32"], False),
        (["0 of 10000"], False),
        (["512 tokens"], False),
        (["off", "1"], False),
        (["", ""], False),
    ],
)
def test_columns_of_numbers(cells, numeric):
    assert is_numeric(cells) is numeric


def test_markdown_aligns_columns_and_stamps_tables():
    tables = [("First", ["engine", "rate"], [["ours", "2"], ["a|b", "failed"]]), ("Empty", ["x"], [])]
    text = markdown(tables, ["A note."], {"First": "Measured then."})
    assert text.splitlines() == [
        "**First**",
        "",
        "*Measured then.*",
        "",
        "| engine | rate |",
        "| :--- | ---: |",
        "| ours | 2 |",
        "| a\\|b | failed |",
        "",
        "- A note.",
    ]
    assert markdown(tables, [], "Measured now.").count("*Measured now.*") == 1
