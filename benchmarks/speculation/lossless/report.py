"""Table of the check of lossless speculation."""

from typing import Any

from ...harness.provenance import stamp
from ...harness.tables import Table

MEASURED_CODE = (
    "entropic_jax/speculation",
    "entropic_jax/loop.py",
    "entropic_jax/phases",
    "entropic_jax/pallas",
    "entropic_jax/sampling",
    "models/layers.py",
    "serving/engine",
    "models/embedded",
)


def tables(results: dict[str, Any]) -> list[Table]:
    """How many texts are equal, for every setting and number of rows."""
    rows = []
    for cell in results["cells"]:
        drafted, accepted = cell["num_draft_tokens"], cell["num_accepted_tokens"]
        rows.append(
            [
                cell["setting"],
                " / ".join(cell["presets"]),
                str(cell["rows"]),
                f"{cell['equal']} of {cell['texts']}",
                str(cell["tokens"]),
                str(drafted),
                f"{accepted / drafted:.2f}" if drafted else "–",
                str(cell["preemptions"]),
            ]
        )
    header = [
        "sampling",
        "presets",
        "rows",
        "texts equal",
        "tokens",
        "drafted tokens verified",
        "accepted ÷ verified",
        "preemptions",
    ]
    return [("Texts with drafts and without", header, rows)]


def notes(results: dict[str, Any]) -> list[str]:
    """The machine, and what was compared."""
    settings = (
        "*filters*: top-k 50, min-p 0.05, typical-p 0.9 at T 1.2. *penalties*: repetition 1.1, presence 0.4, "
        "frequency 0.3. *stops*: two stop strings, two stop tokens, at least 8 tokens."
    )
    return [
        f"{results['cpu']}, jax {results['jax']}; model {results['model']}, {results['dtype']}.",
        "A text is equal if its tokens and its reason to end are; both arms have the same prompts and seeds.",
        settings,
    ]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit of the table."""
    return stamp([results], MEASURED_CODE)
