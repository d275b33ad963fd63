"""Tables of the benchmark of draft lengths."""

import statistics
from typing import Any

from ...harness.provenance import stamp
from ...harness.tables import Table

MEASURED_CODE = (
    "entropic_jax/speculation",
    "entropic_jax/loop.py",
    "entropic_jax/pallas",
    "models/layers.py",
    "models/embedded",
)
OFF, LAW = "off", "law"
Cell = tuple[str, int, float]  # text, context, temperature
BAR = 0.99  # of the rate of the best fixed length of a workload


def entries(results: dict[str, Any], drafter: str, cell: Cell | None = None) -> list[dict[str, Any]]:
    """The texts of a drafter; those that loop are left out, unless they are greedy, or all of a workload do.

    Args:
        results: raw measurements.
        drafter: the name of the drafter.
        cell: a workload; None for all.
    """
    if cell is None:
        return [entry for other in cells(results) for entry in entries(results, drafter, other)]
    texts = [e for e in results["rates"] if e["drafter"] == drafter and cell_of(e) == cell]
    return [e for e in texts if cell[2] == 0 or not e["loops"]] or texts


def cell_of(entry: dict[str, Any]) -> Cell:
    """The workload of a text."""
    return entry["text"], entry["context"], entry["temperature"]


def cells(results: dict[str, Any]) -> list[Cell]:
    """All workloads."""
    return list(dict.fromkeys(map(cell_of, results["rates"])))


def drafters(results: dict[str, Any]) -> list[str]:
    """The names of all drafters."""
    return list(dict.fromkeys(entry["drafter"] for entry in results["rates"]))


def seconds(texts: list[dict[str, Any]], arm: str) -> float:
    """Seconds of an arm over texts; they are those of the same tokens in every arm."""
    return sum(entry["arms"][arm]["seconds"] for entry in texts)


def best_length(texts: list[dict[str, Any]]) -> str:
    """The fixed length with the least seconds over texts."""
    lengths = [arm for arm in texts[0]["arms"] if arm not in (OFF, LAW)]
    return min(lengths, key=lambda arm: seconds(texts, arm))


def ratio(texts: list[dict[str, Any]], arm: str, base: str) -> str:
    """The speed of an arm ÷ that of another: the median over texts, and the range."""
    ratios = [e["arms"][base]["seconds"] / e["arms"][arm]["seconds"] for e in texts]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def speeds(results: dict[str, Any]) -> Table:
    """Speed ÷ off of the law and of every fixed length."""
    rows = []
    for drafter in drafters(results):
        for cell in cells(results):
            texts = entries(results, drafter, cell)
            law = texts[0]["arms"], sum(e["arms"][LAW]["tokens"] for e in texts)
            passes = sum(e["arms"][LAW]["passes"] for e in texts)
            arms = [arm for arm in law[0] if arm != OFF]
            cells_of_arms = [ratio(texts, arm, OFF) for arm in arms]
            rows.append(
                [drafter, *map(str, cell), str(len(texts)), f"{law[1] / max(1, passes):.2f}", *cells_of_arms]
            )
    first = results["rates"][0]["arms"]
    names = ["law" if arm == LAW else f"{arm} tokens" for arm in first if arm != OFF]
    header = ["drafter", "text", "context", "T", "texts", "tokens a pass (law)", *names]
    return "Speed ÷ off: the law, and fixed lengths; median (range)", header, rows


def against_best(results: dict[str, Any]) -> Table:
    """The law ÷ the best fixed length of each workload."""
    rows = []
    for drafter in drafters(results):
        for cell in cells(results):
            texts = entries(results, drafter, cell)
            best = best_length(texts)
            total = seconds(texts, best) / seconds(texts, LAW)
            held = "yes" if total >= BAR else "no"
            rows.append([drafter, *map(str, cell), best, f"{total:.3f}", ratio(texts, LAW, best), held])
    header = ["drafter", "text", "context", "T", "best length", "law ÷ it, all texts", "median (range)"]
    return "The law ÷ the best fixed length of the workload", [*header, f"≥ {BAR}"], rows


def mix_seconds(results: dict[str, Any], drafter: str, arm: str) -> float:
    """Seconds of an arm for the mix, in which plain decoding spends as long on each workload.

    Args:
        results: raw measurements.
        drafter: the name of the drafter.
        arm: the name of the arm.
    """
    groups = [entries(results, drafter, cell) for cell in cells(results)]
    return sum(seconds(texts, arm) / seconds(texts, OFF) for texts in groups)


def mix(results: dict[str, Any]) -> Table:
    """The law ÷ every fixed length, over the sum of all workloads."""
    rows, lengths = [], [arm for arm in results["rates"][0]["arms"] if arm not in (OFF, LAW)]
    fixed = {(name, arm): mix_seconds(results, name, arm) for name in drafters(results) for arm in lengths}
    of_all = min(fixed, key=lambda key: fixed[key])
    for drafter in drafters(results):
        everything, law = entries(results, drafter), mix_seconds(results, drafter, LAW)
        summed = {arm: seconds(everything, arm) / seconds(everything, LAW) for arm in lengths}
        alike = {arm: fixed[drafter, arm] / law for arm in lengths}
        best, best_alike = min(summed, key=lambda n: summed[n]), min(alike, key=lambda n: alike[n])
        rows.append(
            [
                drafter,
                f"{seconds(everything, OFF) / seconds(everything, LAW):.2f}",
                f"{summed[best]:.3f} ({best})",
                f"{alike[best_alike]:.3f} ({best_alike})",
                f"{fixed[of_all] / law:.3f} ({of_all[0]}, {of_all[1]})",
                "yes" if min(summed[best], alike[best_alike]) > 1 else "no",
            ]
        )
    header = ["drafter", "law ÷ off", "law ÷ best single length (which), sum of seconds"]
    header += ["the same, workloads weighted alike", "÷ best length of any drafter, weighted alike"]
    return "The mix of all workloads", [*header, "above every length"], rows


def tables(results: dict[str, Any]) -> list[Table]:
    """Speeds, and the law against the best fixed lengths."""
    return [speeds(results), against_best(results), mix(results)]


def notes(results: dict[str, Any]) -> list[str]:
    """The machine, and what the columns mean."""
    machine = f"{results['cpu']}, {results['threads']} threads, jax {results['jax']}"
    if xla_threads := results.get("xla_threads"):
        machine += f", NPROC={xla_threads}"
    measured = [(e["arms"], arm) for e in results["rates"] for arm in e["arms"]]
    equal = sum(of_text[arm]["equal"] >= of_text[OFF]["tokens"] for of_text, arm in measured)
    arms = (
        "All arms of a drafter continue the same prompt and seed, launch by launch in turn. A fixed length "
        "drafts as many tokens where the drafter has them, verifies all of them, and has passes of just "
        "their size compiled. With `auto`, it is applied to the drafter that `auto` chooses."
    )
    best = (
        "The best length is chosen on the texts that it is compared on, which favours it. *weighted alike*: "
        "seconds of each workload ÷ those of `off`."
    )
    return [
        f"{machine}; model {results['model']}, {results['dtype']}. Looped texts left out, but greedy ones.",
        arms,
        best,
        f"Texts equal to those of `off`: {equal} of {len(measured)}.",
    ]


def stamps(results: dict[str, Any]) -> str:
    """Date and commit, the same for all tables."""
    return stamp([results], MEASURED_CODE)
