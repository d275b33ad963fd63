"""Tables of the benchmark of second passes."""

from typing import Any

from ...harness.provenance import stamp
from ...harness.tables import Table
from .equal_bytes import LATE
from .measure import BAR

MEASURED_CODE = (
    "entropic_jax/attention",
    "entropic_jax/pallas/paged_attention/reference.py",
    "entropic_jax/phases/forward.py",
    "benchmarks/ablation/second_pass/equal_bytes.py",
    "benchmarks/ablation/second_pass/measure.py",
    "benchmarks/ablation/second_pass/quartiles.py",
    "benchmarks/ablation/second_pass/record.py",
)
FIRST = "cheap pass"
NONE = ["none: the weights", ""]  # where no rule is within the bytes
TARGET = 0.7  # KL over that of fixed ε at equal bytes


def tables(results: dict[str, Any]) -> list[Table]:
    """KL by quartile of every signal, and KL at equal bytes."""
    return [harm(results), equal_bytes(results)]


def harm(results: dict[str, Any]) -> Table:
    """Mean KL of the first pass by quartile of every signal."""
    lines = []
    for context, cell in results["contexts"].items():
        for name, signals in cell["quartiles"].items():
            for signal, row in signals.items():
                means = [f"{mean[0]:.2g}" for mean in row["means"]]
                kept = f"{cell['passes'][name][0]:.3f}"
                lines.append(
                    [context, name, kept, signal, *means, spread(row["ratio"]), f"{row['correlation']:.2f}"]
                )
    head = ["context", "first pass", "kept", "H₁ of", "lowest quartile", "second", "third", "highest"]
    return (
        "KL(dense ‖ first pass) by quartile of H₁",
        [*head, "highest ÷ lowest (95 %)", "rank correlation"],
        lines,
    )


def equal_bytes(results: dict[str, Any]) -> Table:
    """KL of the best rule of every signal over that of fixed ε at the same bytes."""
    lines = []
    for context, cell in results["contexts"].items():
        for name, compared in cell["equal_bytes"].items():
            for row in compared["levels"]:
                lines.append([context, name, *cells_of(row, compared["dense"])])
    head = ["context", "weights", "fixed ε", "bytes ÷ dense", "its KL", "could be read again, %", "passes"]
    ratios = ["KL ÷ fixed ε (95 %)", "shuffled", "by H₁ of the dense pass"]
    single = ["one pass, ε by the step before", "the same, shuffled"]
    return "Second passes at the bytes of fixed ε", [*head, "read again, %", *ratios, *single], lines


def cells_of(row: dict[str, Any], dense: float) -> list[str]:
    """A row of `equal_bytes` without its first columns.

    Args:
        row: what was compared at the bytes of an ε.
        dense: bytes of a dense step.
    """
    place = [row["name"], f"{row['bytes'] / dense:.3f}", f"{row['fixed']:.2g}"]
    place.append(f"{100 * row['most_again']:.1f}" if "most_again" in row else "")
    first, signals = row["signals"].get(FIRST), (FIRST, "cheap pass, shuffled", "dense pass", *LATE)
    chosen = ["; ".join(dict.fromkeys(first["rules"])), f"{100 * first['again']:.1f}"] if first else NONE
    ratios = [spread(row["signals"][x]["ratio"]) if x in row["signals"] else "" for x in signals]
    return [*place, *chosen, *ratios]


def spread(interval: list[float]) -> str:
    """A value with its interval."""
    value, low, high = (f"{x:.3g}" for x in interval)
    return f"{value} ({low}–{high})"


NOTES = """
A step starts from the KV cache of dense attention, so KL is what this very step left unread. Quartiles
are those of all steps; intervals are of a bootstrap over texts. *Step before*: H₁ of the dense pass of
the step before. *Shuffled*: between the steps of a text.

A second pass reads the weights again (once for all rows of a batch that are read again), the summaries
and its pages. First pass, second pass and threshold are those of the smallest KL, within the bytes of
fixed ε, on half of the texts, and are evaluated on the other half; at least 1 % of the steps are read
again. KL of fixed ε at the same bytes is interpolated. *Could be read again*: with the cheapest first
pass and a dense second pass, one row.

*8B*: the same passes where weights cost as much, relative to the dense KV cache of a row, as those of
Llama 3 8B with 16 bits at 8k and 32k tokens.
"""


def notes(results: dict[str, Any]) -> list[str]:
    """Conditions, and what follows."""
    weights = next(iter(results["contexts"].values()))["weights"]
    dense = " and ".join(f"{cell['dense'] / 1e6:.1f} at {n}" for n, cell in results["contexts"].items())
    model, texts, steps = results["model"], results["texts"], results["steps"]
    subject = (
        f"{results['cpu']}. {model[:1].upper()}{model[1:]} in float32, pages of 16; {texts} windows of the "
        f"source of `rich`, {steps} tokens of each, teacher-forced, "
        f"T_cal {results['belief_temperature']:.3g}. "
        f"MB a step: weights {weights / 1e6:.1f}, KV cache {dense}."
    )
    return [subject, *verdict(results), *(" ".join(part.split()) for part in NOTES.split("\n\n"))]


def verdict(results: dict[str, Any]) -> list[str]:
    """The rules that were tried and the reason to stop there, from the figures."""
    ratios = {
        (context, name): signals[FIRST]["ratio"]
        for context, cell in results["contexts"].items()
        for name, signals in cell["quartiles"].items()
    }
    named = "; ".join(
        f"{spread(ratio)} with {name} at {context}" for (context, name), ratio in ratios.items()
    )
    below = [key for key, ratio in ratios.items() if ratio[0] < BAR]
    sentences = [f"Highest quartile over lowest, by H₁ of the first pass itself (bar: {BAR:g}): {named}."]
    if len(below) == len(ratios):
        return [*sentences, "The bar is missed everywhere: a second pass stops at this measurement."]
    for context, cell in results["contexts"].items():
        for name, compared in cell["equal_bytes"].items():
            sentences.append(f"{context} tokens, {name}: {of_cell(compared)}")
    return sentences


def of_cell(compared: dict[str, Any]) -> str:
    """Value of a rule of two passes with these weights and rows."""
    reached = [row for row in compared["levels"] if FIRST in row["signals"]]
    if not reached:
        return "the weights of second passes for 1 % of the steps exceed the bytes of every ε."
    lowest = min(reached, key=lambda row: row["signals"][FIRST]["ratio"][0])
    met = [row["name"] for row in reached if row["signals"][FIRST]["ratio"][2] <= TARGET]
    forbidden = len(compared["levels"]) - len(reached)
    best = spread(lowest["signals"][FIRST]["ratio"])
    text = f"KL is {best} of that of fixed ε at best, at the bytes of {lowest['name']}"
    if forbidden:
        text += f"; the weights alone forbid it at {forbidden} of {len(compared['levels'])} values of ε"
    text += (
        f". The bar of {TARGET:g} is met at {', '.join(met)}."
        if met
        else f". The bar of {TARGET:g} is met nowhere."
    )
    return text


def stamps(results: dict[str, Any]) -> str:
    """Date and commit."""
    return stamp([results], MEASURED_CODE)
