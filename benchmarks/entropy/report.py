"""Tables of the benchmark of entropy estimators."""

import statistics
from collections.abc import Callable
from typing import Any

from ..harness.provenance import stamp
from ..harness.tables import Table
from .measure import ESTIMATORS, TIMED, WITHOUT_TOP_K

MEASURED_CODE = ("entropic_jax/entropy.py", "entropic_jax/pallas", "models/embedded/model.safetensors")


def cells(
    rows: list[dict[str, Any]], names: list[str], write: Callable[[dict[str, Any]], str]
) -> list[list[str]]:
    """One row for every vocabulary and k, one column for every estimator.

    Args:
        rows: entries of the results.
        names: the estimators.
        write: the text of an entry.

    Returns:
        The rows as text.
    """
    entry = {(row["vocabulary"], row["k"], row["estimator"]): write(row) for row in rows}
    places = sorted({(row["vocabulary"], row["k"]) for row in rows if row["k"] is not None})

    def find(v, k, name):
        return entry.get((v, None if name in WITHOUT_TOP_K else k, name), "–")

    return [[str(v), str(k), *(find(v, k, name) for name in names)] for v, k in places]


def tables(results: dict[str, Any]) -> list[Table]:
    """Times, and for every family of logits errors and correlations, as text."""
    sizes, names, approximate = ["vocabulary", "k"], list(ESTIMATORS), list(ESTIMATORS)[1:]
    times = cells(results["time"], list(TIMED), lambda row: f"{row['ms']:.3f}")
    tables_made: list[Table] = [("Milliseconds a token, median", [*sizes, *TIMED], times)]
    number = lambda value: "–" if value is None else f"{value:.3f}"

    def error(row):
        return "< 1e-4" if row["mean_error"] < 1e-4 else f"{row['mean_error']:.3g}"

    def correlations(row):
        return f"{number(row['pearson'])} {number(row['spearman'])}"

    for family in dict.fromkeys(row["family"] for row in results["accuracy"]):
        rows = [row for row in results["accuracy"] if row["family"] == family]
        mean = statistics.fmean(row["mean_entropy"] for row in rows)
        title = f"{family}, {rows[0]['rows']} distributions of {mean:.2f} nats on average"
        tables_made.append(
            (f"{title}: mean absolute error, nats", [*sizes, *names], cells(rows, names, error))
        )
        title = f"{family}: correlation with the exact entropy, Pearson and Spearman"
        tables_made.append((title, [*sizes, *approximate], cells(rows, approximate, correlations)))
    return tables_made


def notes(results: dict[str, Any]) -> list[str]:
    """Where it was measured, and what the cells hold."""
    printed = [row for row in results["accuracy"] if row["estimator"] == "tail-corrected"]
    worst = max(printed, key=lambda row: row["above_ln_v"])
    machine = f"{results['cpu']}, {results['threads']} threads, jax {results['jax']}, {results['date']}"
    excess = f"exceeds ln V for up to {worst['above_ln_v']:.0%} of the distributions"
    case = f"{worst['family']}, {worst['vocabulary']} tokens, k = {worst['k']}"
    return [
        f"{machine}, load before the start {results['load_average']:.1f}.",
        "`exact` and `surrogate` do not depend on k.",
        f"The estimator as printed (tail-corrected) {excess} ({case}).",
        f"Texts of the model: {', '.join(results['texts'])}.",
    ]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
