"""Tables of the benchmark of head budgets."""

import statistics
from typing import Any

from ...harness.provenance import stamp
from ...harness.tables import Table

MEASURED_CODE = (
    "entropic_jax/methods/criticality.py",
    "entropic_jax/methods/oracle.py",
    "entropic_jax/methods/entropy_prefill.py",
    "entropic_jax/methods/need_calibration.py",
    "benchmarks/long_context/head_budgets/measure.py",
    "models/embedded/model.safetensors",
)
UNIFORM = "uniform"


def tables(results: dict[str, Any]) -> list[Table]:
    """Attention missed by every rule, and as a part of what equal budgets miss."""
    cells = results["cells"]
    names = list(next(iter(cells.values())))
    body = []
    for name in names:
        row = [name]
        for cell in cells.values():
            share = statistics.fmean(cell[name])
            parts = [x / y for x, y in zip(cell[name], cell[UNIFORM], strict=True)]
            row.append(f"{100 * share:.2f} · {share / statistics.fmean(cell[UNIFORM]):.2f}")
            if name != UNIFORM and len(parts) > 1:
                row[-1] += f" ({min(parts):.2f}–{max(parts):.2f})"
        body.append(row)
    header = ["budget in proportion to", *(f"{budget} tokens a head" for budget in cells)]
    return [("Attention missed, % · as a part of what equal budgets miss (range over texts)", header, body)]


NOTES = """
Offline: the text is read densely, pages of 16 are ranked by expected attention, and every rule gets the same
number of pages in all for a segment of 512, shared over five layers (the lowest is dense) × two KV heads, at
least 5 % of the mean budget for each. In a sparse prefill, what lower layers miss changes the queries too.

E: entropy in nats of a head's expected attention to pages in the segment before. Table: the pages of each
head that would miss least of the mean attention in the source of `jax`, at the same budget.

Shuffled: E of the segments before, exchanged among the heads of a segment, or among the segments of a head;
mean of eight orders. Oracle: the pages of most attention, of all heads together.
"""


def notes(results: dict[str, Any]) -> list[str]:
    """Conditions."""
    subject = (
        f"{results['cpu']}. The embedded model in float32; {results['texts']} windows of {results['length']} "
        "tokens of the source of `rich`."
    )
    return [subject, *(" ".join(part.split()) for part in NOTES.split("\n\n"))]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit."""
    return stamp([results], MEASURED_CODE)
