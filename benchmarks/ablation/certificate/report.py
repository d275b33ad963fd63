"""Tables of the benchmark of the certificate."""

from typing import Any

from ...harness.provenance import stamp
from ...harness.tables import Table
from .measure import PRESET

MEASURED_CODE = (
    "entropic_jax/attention/page_reader.py",
    "entropic_jax/attention/page_selection.py",
    "entropic_jax/pallas/paged_attention/reference.py",
    "benchmarks/ablation/certificate/measure.py",
    "models/embedded/model.safetensors",
)
KNOWN = {  # of the unread pages, by bound
    "as shipped": "largest and smallest key (as shipped)",
    "ball": "mean key and radius",
    "boxes of 4 positions": "largest and smallest key of 4 positions",
    "exact maxima": "largest score (reads all keys)",
}
TARGET = 3


def tables(results: dict[str, Any]) -> list[Table]:
    """Each bound, beside what it bounds."""
    header = [
        "context",
        "known of unread pages",
        "bound of δ",
        "bound ÷ δ",
        "bound ÷ ‖Δ‖",
    ]
    body = []
    for context, cell in results["contexts"].items():
        body.append(
            [context, f"what is bounded: δ; ‖Δ‖ {spread(cell['change'])}", spread(cell["dropped"]), "", ""]
        )
        for name, bound in cell["bounds"].items():
            known = KNOWN.get(name, f"as shipped, and all scores of {name.partition(' ')[0]} of them")
            cells = [spread(bound[field]) for field in ("bound", "ratio", "change ratio")]
            body.append([context, known, *cells])
    return [("The bound of the dropped mass", header, body)]


def spread(quartiles: list[float]) -> str:
    """Median, with the middle half."""
    low, middle, high = (f"{x:.3g}" for x in quartiles)
    return f"{middle} ({low}–{high})"


NOTES = """
Medians, with the middle half. δ: attention mass of the unread pages, exact. ‖Δ‖: change of the head's output.
Target of both ratios: 3.

As shipped, ‖Δ‖ ≤ 2δ max‖v‖. The other rows use ‖v‖ of each unread page and of the output: the largest change
over all masses that the bounds allow.

Scored pages are those of the largest bounds: all their keys are read, and their values are not.
"""


def notes(results: dict[str, Any]) -> list[str]:
    """Conditions."""
    cells = list(results["contexts"].values())
    heads = " and ".join(str(cell["heads"]) for cell in cells)
    subject = (
        f"{results['cpu']}. The embedded model in float32 under `{PRESET}`, pages of 16; {results['texts']} "
        f"windows of the source of `rich`, {results['steps']} tokens of each, teacher-forced: {heads} heads "
        "of a step that left pages unread."
    )
    violations = sum(cell["violations"] for cell in cells)
    compared = (
        f"Every bound was compared with what it bounds: {violations} violations "
        f"beyond rounding (largest excess {max(cell['largest_excess'] for cell in cells):.1g} of max‖v‖)."
    )
    return [subject, compared, *(" ".join(part.split()) for part in NOTES.split("\n\n"))]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit."""
    return stamp([results], MEASURED_CODE)
