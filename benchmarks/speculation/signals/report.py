"""Tables of the benchmark of stopping signals."""

import math
from typing import Any

from ...harness.intervals import Interval, ratio_interval
from ...harness.provenance import stamp
from ...harness.tables import Table
from .names import (
    ADAEDL,
    COMPILED,
    DRAFT_ENTROPY,
    EVERY,
    FIXED,
    LAW,
    MATCH,
    ORACLE,
    POSITION,
    PREVIOUS,
    SHUFFLED,
    TOP_PROBABILITY,
    signal_of,
)

MEASURED_CODE = (
    "entropic_jax/speculation",
    "entropic_jax/attention/window_pages.py",
    "models/embedded",
)
SIGNALS = DRAFT_ENTROPY, TOP_PROBABILITY, ADAEDL, MATCH, PREVIOUS, POSITION, SHUFFLED
RULES = DRAFT_ENTROPY, TOP_PROBABILITY, ADAEDL, MATCH, PREVIOUS, SHUFFLED, LAW, ORACLE
SIZES = {
    COMPILED: "1, 2, 4, 8, 16",  # as the engine compiles them
    EVERY: "1 to 16",
}
NONE = "–"


def _cell(cell: dict[str, Any]) -> list[str]:
    """The first columns of every table."""
    return [cell["drafter"], str(cell["context"]), str(cell["temperature"]), str(len(cell["texts"]))]


def _interval(value: Interval | None, digits: int = 2) -> str:
    """A value with its interval: `0.79 (0.75–0.83)`; a dash where there is none."""
    if value is None or math.isnan(value.value):
        return NONE
    if math.isnan(value.low):
        return f"{value.value:.{digits}f}"
    return f"{value.value:.{digits}f} ({value.low:.{digits}f}–{value.high:.{digits}f})"


def quartiles(results: dict[str, Any]) -> Table:
    """Acceptance by quartile of the drafter's signal."""
    rows = []
    for cell in results["cells"]:
        signal = signal_of(cell["drafter"])
        sign = 1 if signal == MATCH else -1  # the signal is −H
        edges = ", ".join(f"{sign * edge:.2f}" for edge in cell["edges"][::-1])
        shares = [_interval(Interval(*share)) for share in cell["quartiles"][::-1]]
        acceptance = _interval(Interval(*cell["acceptance"]))
        rows.append([*_cell(cell), str(cell["tested"]), acceptance, signal, edges, *shares])
    header = ["drafter", "context", "T", "texts", "tokens tested", "accepted (95 %)", "by", "edges"]
    header += [f"{name} quarter" for name in ("likeliest", "second", "third", "last")]
    return "Acceptance by quarters of the signal that the law reads", header, rows


def areas(results: dict[str, Any]) -> Table:
    """The AUC of every signal."""
    rows = []
    for cell in results["cells"]:
        cells = [_interval(Interval(*cell["auc"][name])) if name in cell["auc"] else NONE for name in SIGNALS]
        rows.append([*_cell(cell), *cells])
    return "AUC for acceptance (95 %)", ["drafter", "context", "T", "texts", *SIGNALS], rows


def gain(cell: dict[str, Any], size: str, rule: str, base: str) -> Interval | None:
    """Tokens a second of a rule ÷ those of another one on the same texts; None where a rule is not there.

    Args:
        cell: the results of a drafter, a context and a temperature.
        size: the sizes of passes, `COMPILED` or `EVERY`.
        rule: the name of the rule.
        base: the name of the rule that it is compared with.
    """
    seconds = cell["rules"][size]["seconds"]
    if rule not in seconds or base not in seconds:
        return None
    return ratio_interval(seconds[base], seconds[rule])


def pooled(cells: list[dict[str, Any]], size: str, rule: str, base: str) -> Interval | None:
    """`gain` over several cells, each of which counts alike; temperatures of a prompt are drawn together.

    Args:
        cells: the cells.
        size: the sizes of passes, `COMPILED` or `EVERY`.
        rule: the name of the rule.
        base: the name of the rule that it is compared with.
    """
    above: dict[tuple[int, int], float] = {}
    below: dict[tuple[int, int], float] = {}
    for cell in cells:
        seconds = cell["rules"][size]["seconds"]
        if rule not in seconds or base not in seconds:
            return None
        total = sum(seconds[base])
        for text, of_base, of_rule in zip(cell["texts"], seconds[base], seconds[rule], strict=True):
            key = cell["context"], text
            above[key] = above.get(key, 0.0) + of_base / total
            below[key] = below.get(key, 0.0) + of_rule / total
    return ratio_interval(list(above.values()), list(below.values()))


def rates(results: dict[str, Any], size: str) -> Table:
    """Every signal as a stopping rule, beside the best fixed length."""
    rows = []
    for cell in results["cells"]:
        of_size = cell["rules"][size]
        lengths = "/".join(str(rule[0]) for rule in of_size["chosen"][FIXED])
        plain = cell["tokens"] * len(cell["texts"]) / sum(of_size["seconds"][FIXED])
        gains = [gain(cell, size, rule, FIXED) for rule in RULES]
        cells = [_interval(g, 3) for g in gains]
        against = gain(cell, size, signal_of(cell["drafter"]), SHUFFLED)
        rows.append([*_cell(cell), lengths, f"{plain:.0f}", *cells, _interval(against, 3)])
    header = ["drafter", "context", "T", "texts", "fixed length", "fixed, tokens/s", *RULES]
    return (
        f"Tokens a second ÷ fixed length, passes of {SIZES[size]} tokens",
        [*header, "signal ÷ shuffled"],
        rows,
    )


def summary(results: dict[str, Any]) -> Table:
    """Value of each drafter's signal over all contexts and temperatures."""
    rows = []
    for drafter in dict.fromkeys(cell["drafter"] for cell in results["cells"]):
        cells = [cell for cell in results["cells"] if cell["drafter"] == drafter]
        signal = signal_of(drafter)
        for size in SIZES:
            pairs = (signal, FIXED), (signal, SHUFFLED), (SHUFFLED, FIXED), (LAW, FIXED), (ORACLE, FIXED)
            values = [pooled(cells, size, *pair) for pair in pairs]
            rows.append([drafter, signal, SIZES[size], *(_interval(v, 3) for v in values)])
    header = [
        "drafter",
        "signal",
        "tokens of a pass",
        "signal ÷ fixed",
        "signal ÷ shuffled",
        "shuffled ÷ fixed",
    ]
    return "All contexts and temperatures", [*header, "law ÷ fixed", "oracle ÷ fixed"], rows


def tables(results: dict[str, Any]) -> list[Table]:
    """Acceptance, AUC, and the rates of stopping rules."""
    return [quartiles(results), areas(results), *(rates(results, size) for size in SIZES), summary(results)]


def verdict(results: dict[str, Any], size: str) -> str:
    """Which signals are worth something: those above the fixed length and above their shuffled selves.

    Args:
        results: raw measurements.
        size: the sizes of passes, `COMPILED` or `EVERY`.
    """
    parts = []
    for drafter in dict.fromkeys(cell["drafter"] for cell in results["cells"]):
        cells = [cell for cell in results["cells"] if cell["drafter"] == drafter]
        signal = signal_of(drafter)
        over, real = pooled(cells, size, signal, FIXED), pooled(cells, size, signal, SHUFFLED)
        if over is not None and real is not None and min(over.low, real.low) > 1:
            gained = f"{100 * (over.value - 1):.1f} %"
            parts.append(f"{drafter}: the {signal} gains {gained} over a fixed length")
        else:
            parts.append(f"{drafter}: no gain by the {signal} is shown")
    return f"With passes of {SIZES[size]} tokens, over all cells: {'; '.join(parts)}."


def notes(results: dict[str, Any]) -> list[str]:
    """The machine, and what the columns mean."""
    machine = f"{results['cpu']}, {results['threads']} threads, jax {results['jax']}"
    if xla_threads := results.get("xla_threads"):
        machine += f", NPROC={xla_threads}"
    passes = [cell["passes"] for cell in results["cells"]]
    same = sum(p["replayed"] == p["engine"] for p in passes)
    looped = max(cell["looped"] for cell in results["cells"])
    tokens = (
        "A token is tested if all drafted before it were accepted. Drafts of 15 tokens begin at every "
        "position. Intervals: shares by Wilson with the design effect of texts, all else by a bootstrap over "
        "texts."
    )
    signals = (
        "*draft entropy*, *top probability*: of the draft's distribution. *AdaEDL*: 1 − √(0.2 H) (Agrawal, "
        "Jeon and Lee 2024, arXiv 2410.18351), which orders tokens as H does. *previous entropy*: of the "
        "draft's token before, or of the model's at the first token (the suffix drafter: always). "
        "*shuffled*: the entropy, or match length, of another draft of the same text, at the same place in "
        "it, mean of five; what it predicts, the text and the place in a draft predict."
    )
    rules = (
        "As a rule, a draft ends where the signal, or the product of calibrated probabilities, falls below "
        "a threshold, and at a longest length. Both are chosen on half of the texts and timed on the other "
        "half, and the reverse; fixed lengths are among the choices. *law*: as it ships. *oracle*: knows "
        "what will be accepted. Seconds are sums of measured costs of draft steps and passes."
    )
    return [
        f"{machine}; model {results['model']}, {results['dtype']}. Pass costs: {results['costs_of']}.",
        f"Texts that loop are left out, at most {looped} of a cell.",
        tokens,
        signals,
        rules,
        verdict(results, COMPILED),
        verdict(results, EVERY),
        f"Texts in which the engine took as many passes as the replayed law: {same} of {len(passes)}.",
    ]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
