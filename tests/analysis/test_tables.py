"""Tables of an ablation: what is quoted from the paper, and what is computed."""

import pytest

from entropic_jax.analysis import tables

# Table 1 of arXiv 2603.03310: relative latency, throughput, dτ/dC, quality.
TABLE_1 = {
    "macro": (0.88, 1.15, 1.12, 1.00),  # "Scheduling only"
    "meso": (0.85, 1.20, 1.25, 0.98),  # "Attention only"
}


@pytest.mark.parametrize("name", TABLE_1)
def test_rows_quoted_from_the_paper_are_those_of_its_table(name):
    assert tuple(tables.PAPER[name].values()) == TABLE_1[name]
    assert tuple(tables.PAPER[name]) == ("latency", "throughput", "dτ/dC", "quality")
