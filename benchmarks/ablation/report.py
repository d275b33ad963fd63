"""The tables and the picture of `benchmarks.ablation`."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from entropic_jax.analysis import tables
from entropic_jax.analysis.statistics import (
    beyond_product,
    compared,
    estimate,
    mean,
    middle,
    split,
    spread,
    worded,
)
from entropic_jax.analysis.tables import of

from .report import Grid, machine, markdown, processor, show_grids, slug, write_section
from .worker import ROOT

__all__ = ["document", "load", "machine", "processor", "show", "slug"]

Rows = list[dict[str, Any]]
DOCUMENT = ROOT / "docs" / "results.md"
PICTURE = ROOT / "docs" / "selectors.svg"
FASTER_THAN = {16384: {"openvino": 1.7, "openvino-half": 1.0}, 32768: {"openvino": 2.5, "openvino-half": 1.7}}
NOTES = (
    "`off`: plain sampling, everything read. `paper`: every law as printed.",
    "Intervals are of 95 % (Student's t) over seeds, turns or questions; *: p < 0.05, paired with `off`.",
    "Teacher forcing knows no temperature and no schedule: `micro` and `macro` are `off`, `full` is `meso`.",
    "dτ/dC: nats of entropic time per roofline second (25 GB/s). Kept: share of keys and values read.",
    "The certificate bounds the change of any head's output; median over tokens.",
    "A question counts as answered when every token of the answer has more than half of the probability.",
    "`meso, every n`: the lists of pages are kept for n steps; the presets choose at every step.",
    "Latency: launches of 8 steps, the configurations taking turns; p95 is over launches.",
    "Under load prompts have been read beforehand; 16 sequences come as a Poisson process for 4 places.",
    "They come at the rate that `off` can write; without the macro scale it is first come, first served.",
    "Repeated: 8-grams written within the last 128 tokens. Bigram JS: divergence from held-out text.",
)


def load(file: Path) -> dict[str, Any]:
    """The lines of a run as one: what they say of the machine, and the rows of each study."""
    results: dict[str, Any] = {"studies": {}, "seconds": 0.0}
    for line in file.read_text("utf-8").splitlines():
        entry = json.loads(line)
        if "study" in entry:
            results["studies"].setdefault(entry["study"], []).extend(entry["rows"])
            results["seconds"] += entry["seconds"]
        else:
            results.update(entry)
    return results


def recalled(rows: Rows) -> Grid:
    lines = []
    for (distance,), some in split(rows, "distance"):
        base = {(r["seed"], r["question"]): float(r["right"]) for r in of(some, "off")}
        for (name,), mine in split(some, "preset"):
            right = estimate([100.0 * r["right"] for r in mine])
            change = estimate([100 * (r["right"] - base[r["seed"], r["question"]]) for r in mine])
            kinds = (f"{k} {100 * mean(part, 'right'):.0f}" for (k,), part in split(mine, "kind"))
            lines.append(
                [
                    str(distance),
                    name,
                    spread(right, 1),
                    "" if name == "off" else worded(change),
                    str(len(mine)),
                    f"{mean(mine, 'kept'):.3f}",
                    ", ".join(kinds),
                ]
            )
    head = ["tokens between", "preset", "right, %", "points (95 %)", "questions", "kept", "by kind, %"]
    return "Recall", head, lines


def selectors(rows: Rows) -> Grid:
    lines = [
        [
            r["selector"],
            f"{r['setting']:g}",
            f"{r['kept']:.3f}",
            f"{r['bits_per_byte']:.4f}",
            f"{100 * r['above']:+.2f}",
            f"{100 * r['right']:.0f}",
        ]
        for r in curves(rows)
    ]
    head = ["selector", "ε or budget", "kept", "bits/byte", "against dense, %", "recall, %"]
    return "Which pages: quality against the share read", head, lines


def curves(rows: Rows) -> Rows:
    """The rows of the selectors, means over seeds; `above`: bits per byte over those of dense, less 1."""
    dense = {r["seed"]: r["bits_per_byte"] for r in rows if r["selector"] == "dense"}
    fields = ("kept", "bits_per_byte", "right")
    return [
        {
            "selector": name,
            "setting": setting,
            **{field: mean(mine, field) for field in fields},
            "above": estimate([r["bits_per_byte"] / dense[r["seed"]] - 1 for r in mine]).mean,
        }
        for (name, setting), mine in split(rows, "selector", "setting")
    ]


def shape(rows: Rows) -> Grid:
    """The larger shape beside other engines: `full` over each."""
    lines = []
    for (context,), some in split([r for r in rows if "milliseconds" in r], "context"):
        ours = of(some, "full")
        for (name,), mine in split(some, "preset"):
            times = sorted(r["milliseconds"] for r in mine)
            median = middle(mine, "milliseconds")
            lines.append(
                [
                    str(context),
                    name if name.startswith(("off", "full")) else f"{name} (dense)",
                    f"{median:.2f}",
                    f"{times[0]:.2f}–{times[-1]:.2f}",
                    f"{1e3 / median:.0f}",
                    f"{middle(ours, 'milliseconds') / median:.2f}",
                    f"{median / middle(ours, 'milliseconds'):.2f}×",
                    f"{mean(mine, 'kept'):.3f}" if "kept" in mine[0] else "1",
                ]
            )
    lines += [
        [str(r["context"]), r["preset"], "failed", r["error"], "", "", "", ""] for r in rows if "error" in r
    ]
    head = ["context", "engine", "ms/token", "least–greatest", "tokens/s", "full ÷ it", "speed-up", "kept"]
    return "The 25M shape, one sequence, the share read imposed on `full`", head, lines


def pages(rows: Rows) -> Grid:
    """Keys and values of fewer bits: quality, and the time of a step."""
    read, timed = ([r for r in rows if field in r] for field in ("bits_per_byte", "milliseconds"))
    exact, dense = of(read, "off, float32"), of(timed, "off, float32")
    lines = []
    for (name,), mine in split(read, "preset"):
        preset, _, kind = name.partition(", ")
        times = of(timed, name)
        line = [
            kind,
            preset,
            f"{mean(mine, 'bits_per_byte'):.4f}",
            "" if name == "off, float32" else worded(compared(mine, exact, "bits_per_byte", "seed"), 2),
            f"{mean(mine, 'kept'):.3f}",
            f"{mean(mine, 'bytes_read') / 1e6:.1f}",
        ]
        if times:
            spent = [r["milliseconds"] for r in times]
            median, base = middle(times, "milliseconds"), middle(dense, "milliseconds")
            line += [f"{median:.2f} ({min(spent):.2f}–{max(spent):.2f})", f"{median / base:.2f}"]
        lines.append([*line, *[""] * (8 - len(line))])
    head = ["keys and values", "preset", "bits/byte", "against the first, % (95 %)", "kept", "MB/token"]
    return "Keys and values of fewer bits", [*head, "ms/token", "÷ the first"], lines


def stress(rows: Rows) -> Grid:
    lines = []
    for (scale, bias), some in split(rows, "scale", "bias"):
        base = [r for r in some if r["way"] == "dense"]
        for name in ("guarded", "bare"):
            mine = [r for r in some if r["way"] == name]
            change = worded(compared(mine, base, "bits_per_byte", "seed"), 2)
            figures = (f"{mean(mine, field):.3f}" for field in ("kept", "unsteady"))
            lines.append([f"{scale:g}", f"{bias:+g}", name, change, *figures])
    head = ["logits ×", "bias, nats", "guards", "bits/byte against dense, % (95 %)", "kept", "mean |Δε|"]
    return "Stress: a belief that is wrong", head, lines


def held(rows: Rows) -> Grid:
    lines = []
    for (scale, law), mine in split(rows, "scale", "law"):
        figures = (f"{mean(mine, field):.3f}" for field in ("error", "clipped", "temperature"))
        lines.append([f"{scale:g}", law, *figures])
    return "Stress: the entropy held", ["logits ×", "law", "|H_T − H*|", "at a clip", "T"], lines


def estimators(rows: Rows) -> Grid:
    base = [r for r in rows if r["estimator"] == "exact"]
    lines = []
    for (name,), mine in split(rows, "estimator"):
        change = lambda field, digits, mine=mine: worded(compared(mine, base, field, "seed"), digits)
        lines.append(
            [
                name,
                f"{mean(mine, 'correlation'):.4f}",
                f"{mean(mine, 'error'):.3f}",
                f"{middle(mine, 'milliseconds'):.3f}",
                "" if name == "exact" else change("milliseconds", 1),
                f"{mean(mine, 'kept'):.3f}",
                "" if name == "exact" else change("bits_per_byte", 2),
            ]
        )
    head = ["estimator", "correlation", "|error|, nats", "ms/token", "change, %", "kept", "bits/byte, %"]
    return "Estimators of H₁ in the loop (50 logits), `full`", head, lines


def together(studies: dict[str, Rows]) -> Grid:
    """Whether the scales bring more together than the product of what each brings alone."""
    lines = []
    speeds = [{**r, "rate": 1e3 / r["milliseconds"]} for r in studies.get("speed", [])]
    for (context,), some in split(speeds, "context"):
        lines.append([f"speed of one sequence, {context}", *_verdict(some, "rate", "turn")])
    for what, field in (
        ("tokens/s under load", "tokens_per_second"),
        ("τ/s under load", "entropic_time_per_second"),
    ):
        if "micro" in {r["preset"] for r in studies.get("load", [])}:
            lines.append([what, *_verdict(studies["load"], field, "seed")])
    head = ["measure", "full over the product of its parts, % (95 %)", "super-additive"]
    return "Super-additivity", head, lines


def _verdict(rows: Rows, field: str, key: str) -> list[str]:
    if not {"off", "micro", "meso", "macro", "full"} <= {r["preset"] for r in rows}:
        return ["", "not measured"]
    found = beyond_product(rows, field, "full", ("micro", "meso", "macro"), key)
    verdict = "yes" if found.low > 0 else "no" if found.high < 0 else "not shown"
    return [worded(found), verdict]


def bars(studies: dict[str, Rows]) -> Grid:
    """What `full` was asked to reach, and what it does."""
    lines: list[list[str]] = []

    def enter(what: str, bar: float, value: float, least: bool, form: str = ".2f") -> None:
        good = value >= bar if least else value <= bar
        sign = "≥" if least else "≤"
        lines.append([what, f"{sign} {bar:g}", format(value, form), "yes" if good else "no"])

    def ratio(rows: Rows, name: str, base: str) -> float | None:
        mine, other = of(rows, name), of(rows, base)
        return middle(mine, "milliseconds") / middle(other, "milliseconds") if mine and other else None

    timed = [r for r in studies.get("speed", []) if r["context"] > 4096]
    longest = max((r["context"] for r in timed), default=0)
    found = ratio([r for r in timed if r["context"] == longest], "full", "off")
    if found is not None:
        enter(f"embedded model, {longest} tokens: latency ÷ off", 0.6, found, False)
        enter(f"embedded model, {longest} tokens: throughput ÷ off", 1.7, 1 / found, True)
    larger = [r for r in studies.get("shape", []) if "milliseconds" in r]
    for context, bar in {512: 1.05, 16384: 0.5, 32768: 0.35}.items():
        some = [r for r in larger if r["context"] == context]
        for ending in ("", "-half"):
            if (found := ratio(some, f"full{ending}", f"off{ending}")) is not None:
                enter(f"25M shape, {context} tokens: full{ending} ÷ off{ending}, latency", bar, found, False)
        for engine, least in FASTER_THAN.get(context, {}).items():
            mine = "full-half" if engine.endswith("half") else "full"  # as many bits as the other's
            if (found := ratio(some, engine, mine)) is not None:
                enter(f"25M shape, {context} tokens: speed ÷ {engine}", least, found, True)
    quality = studies.get("quality", [])
    longest = max((r["context"] for r in quality), default=0)
    if longest > 4096:
        mine, base = (of([r for r in quality if r["context"] == longest], name) for name in ("meso", "off"))
        enter(
            f"{longest} tokens: dτ/dC ÷ off", 1.7, mean(mine, "efficiency") / mean(base, "efficiency"), True
        )
        change = compared(mine, base, "bits_per_byte", "seed").mean
        enter(f"{longest} tokens: bits per byte, change in %", 1.0, change, False)
    asked = studies.get("recall", [])
    for (distance,), some in split(asked, "distance"):
        lost = 100 * (mean(of(some, "off"), "right") - mean(of(some, "meso"), "right"))
        enter(f"recall over {distance} tokens, points lost", 1.0, lost, False, ".1f")
    return "What `full` is to reach", ["measure", "bar", "found", "met"], lines


def grids(results: dict[str, Any]) -> list[Grid]:
    studies = results["studies"]
    made = {
        "quality": tables.quality,
        "recall": recalled,
        "selectors": selectors,
        "speed": tables.timed("Speed of the embedded model, one sequence"),
        "shape": shape,
        "pages": pages,
        "load": tables.load,
        "writing": tables.writing,
        "stress": stress,
        "held": held,
        "estimators": estimators,
    }
    longest = max((r["context"] for r in studies.get("speed", [])), default=0)
    return [
        bars(studies),
        tables.beside_paper(studies, longest),
        *(make(studies[name]) for name, make in made.items() if studies.get(name)),
        together(studies),
    ]


def notes(results: dict[str, Any]) -> list[str]:
    gains = ", ".join(
        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in results["gains"].items()
    )
    load, minutes = results["load_average"], results["seconds"] / 60
    found = [
        f"{results['cpu']}, {results['date']}, load before the start {load:.1f}; {minutes:.0f} minutes.",
        f"Gains: {gains}; entropies in nats.",
        *NOTES,
    ]
    imposed = {r["context"]: r["imposed"] for r in results["studies"].get("shape", [])}
    if imposed:
        shares = ", ".join(f"{v:.2f} at {k}" for k, v in imposed.items())
        found.append(
            "25M shape: random weights attend to everything, so that the share that the layers which choose "
            f"read is imposed, as measured on the trained model at the nearest context ({shares}); the cache "
            "holds random numbers. Speed only. `-half`: weights, keys and values of bfloat16."
        )
    if results.get("versions"):
        found.append("; ".join(f"{name}: {version}" for name, version in results["versions"].items()) + ".")
    return found


def show(results: dict[str, Any], console: Console) -> None:
    show_grids(grids(results), notes(results), console)


def document(results: dict[str, Any]) -> None:
    """Write the tables into docs/results.md, and the picture of the selectors beside it."""
    write_section(DOCUMENT, "ablation", markdown(grids(results), notes(results)))
    if results["studies"].get("selectors"):
        draw(results["studies"]["selectors"], PICTURE)


def draw(rows: Rows, file: Path) -> None:
    """Bits per byte and recall over the share of keys and values read, a line for each selector."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    points = curves(rows)
    dense = next(r for r in points if r["selector"] == "dense")
    figure, (bits, recall) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for (name,), some in split([r for r in points if r["selector"] != "dense"], "selector"):
        mine = sorted(some, key=lambda r: r["kept"])
        strong = dict(lw=2.2, color="#c03030", zorder=3) if name == "entropy" else dict(lw=1.2)
        kept = [100 * r["kept"] for r in mine]
        bits.plot(kept, [100 * r["above"] for r in mine], "o-", ms=4, label=name, **strong)
        recall.plot(kept, [100 * r["right"] for r in mine], "o-", ms=4, label=name, **strong)
    bits.axhline(0, color="#888888", lw=0.8)
    recall.axhline(100 * dense["right"], color="#888888", lw=0.8)
    bits.set(xlabel="keys and values read, %", ylabel="bits per byte above dense, %")
    bits.set_yscale("symlog", linthresh=1)
    recall.set(xlabel="keys and values read, %", ylabel="questions answered, %", ylim=(0, 101))
    recall.legend(frameon=False, fontsize="small")
    figure.savefig(file)
    plt.close(figure)
