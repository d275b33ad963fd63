"""Tables of the single studies of the ablation."""

import math
from typing import Any

from entropic_jax.analysis.statistics import compared, estimate, mean, middle, split, spread, worded
from entropic_jax.analysis.tables import of

from ..harness.tables import Table

Rows = list[dict[str, Any]]


def recalled(rows: Rows) -> Table:
    lines = []
    for (distance,), group in split(rows, "distance"):
        base = {(r["seed"], r["question"]): float(r["right"]) for r in of(group, "off")}
        for (name,), selected in split(group, "preset"):
            right = estimate([100.0 * r["right"] for r in selected])
            change = estimate([100 * (r["right"] - base[r["seed"], r["question"]]) for r in selected])
            kinds = (f"{k} {100 * mean(part, 'right'):.0f}" for (k,), part in split(selected, "kind"))
            lines.append(
                [
                    str(distance),
                    name,
                    spread(right, 1),
                    "" if name == "off" else worded(change),
                    str(len(selected)),
                    f"{mean(selected, 'kept'):.3f}",
                    ", ".join(kinds),
                ]
            )
    head = ["tokens between", "preset", "right, %", "points (95 %)", "questions", "kept", "by kind, %"]
    return "Recall", head, lines


def selectors(rows: Rows) -> Table:
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
    return "Page selectors: quality against the fraction kept", head, lines


def curves(rows: Rows) -> Rows:
    """The rows of the selectors, means over seeds; `above`: bits per byte over those of dense, less 1."""
    dense = {r["seed"]: r["bits_per_byte"] for r in rows if r["selector"] == "dense"}
    fields = ("kept", "bits_per_byte", "right")
    return [
        {
            "selector": name,
            "setting": setting,
            **{field: mean(selected, field) for field in fields},
            "above": estimate([r["bits_per_byte"] / dense[r["seed"]] - 1 for r in selected]).mean,
        }
        for (name, setting), selected in split(rows, "selector", "setting")
    ]


def page_rules(rows: Rows) -> Table:
    """Every arm under fixed ε: what it reads, and what it loses against dense attention."""
    dense = [r for r in rows if r["arm"] == "dense"]
    lines = []
    for (limit, name), selected in split(rows, "limit", "arm"):
        change = compared(selected, dense, "bits_per_byte", "seed")
        questions = sum(r["questions"] for r in selected)
        right = sum(r["right"] * r["questions"] for r in selected)
        lines.append(
            [
                f"{limit:g}",
                name,
                f"{mean(selected, 'kept'):.3f}",
                f"{mean(selected, 'bytes_read') / 1e6:.2f}",
                f"{mean(selected, 'bits_per_byte'):.4f}",
                "" if name == "dense" else worded(change, 2),
                f"{right:.0f} of {questions}",
            ]
        )
    head = ["ε", "arm", "kept", "MB/token", "bits/byte", "against dense, % (95 %)", "answered"]
    return "Rules of page selection, one at a time under fixed ε", head, lines


def larger_model(rows: Rows) -> Table:
    """The reference model and other engines: `full-lossy` over each."""
    lines = []
    for (context,), group in split([r for r in rows if "milliseconds" in r], "context"):
        ours = of(group, "full-lossy")
        for (name,), selected in split(group, "preset"):
            times = sorted(r["milliseconds"] for r in selected)
            median = middle(selected, "milliseconds")
            lines.append(
                [
                    str(context),
                    name if name.startswith(("off", "full-lossy")) else f"{name} (dense)",
                    f"{median:.2f}",
                    f"{times[0]:.2f}–{times[-1]:.2f}",
                    f"{1e3 / median:.0f}",
                    f"{middle(ours, 'milliseconds') / median:.2f}",
                    f"{median / middle(ours, 'milliseconds'):.2f}×",
                    f"{mean(selected, 'kept'):.3f}" if "kept" in selected[0] else "1",
                ]
            )
    lines += [
        [str(r["context"]), r["preset"], "failed", r["error"], "", "", "", ""] for r in rows if "error" in r
    ]
    head = [
        "context",
        "engine",
        "ms/token",
        "least–greatest",
        "tokens/s",
        "full-lossy ÷ it",
        "speed-up",
        "kept",
    ]
    return "The 25M model, one sequence, the kept fraction imposed on `full-lossy`", head, lines


def kv_precision(rows: Rows) -> Table:
    """Keys and values in narrower dtypes: quality, and the time of a step."""
    read, timed = ([r for r in rows if field in r] for field in ("bits_per_byte", "milliseconds"))
    exact, dense = of(read, "off, float32"), of(timed, "off, float32")
    lines = []
    for (name,), selected in split(read, "preset"):
        preset, _, kind = name.partition(", ")
        times = of(timed, name)
        line = [
            kind,
            preset,
            f"{mean(selected, 'bits_per_byte'):.4f}",
            "" if name == "off, float32" else worded(compared(selected, exact, "bits_per_byte", "seed"), 2),
            f"{mean(selected, 'kept'):.3f}",
            f"{mean(selected, 'bytes_read') / 1e6:.1f}",
        ]
        if times:
            spent = [r["milliseconds"] for r in times]
            median, base = middle(times, "milliseconds"), middle(dense, "milliseconds")
            line += [f"{median:.2f} ({min(spent):.2f}–{max(spent):.2f})", f"{median / base:.2f}"]
        lines.append([*line, *[""] * (8 - len(line))])
    head = ["keys and values", "preset", "bits/byte", "against the first, % (95 %)", "kept", "MB/token"]
    return "Keys and values in narrower dtypes", [*head, "ms/token", "÷ the first"], lines


def guards(rows: Rows) -> Table:
    """Every arm over the conditions: its cost against dense attention, and that of the first arm there."""
    lines = []
    for (limit,), at_limit in split(rows, "limit"):
        first = at_limit[0]["arm"]
        for (name,), selected in split(at_limit, "arm"):
            base = [r for r in at_limit if r["arm"] == first]
            place = lambda r: (r["scale"], r["bias"], r["seed"])
            loss = lambda r: 100 * math.log(r["bits_per_byte"] / r["dense"])
            known = {place(r): loss(r) for r in base}
            saved = {}
            for (seed,), seed_rows in split(selected, "seed"):
                saved[seed] = sum(loss(r) - known[place(r)] for r in seed_rows) / len(seed_rows)
            worst = max(
                sum(map(loss, bias_rows)) / len(bias_rows)
                for _, bias_rows in split(selected, "scale", "bias")
            )
            lines.append(
                [
                    f"{limit:g}",
                    name,
                    f"{sum(map(loss, selected)) / len(selected):+.2f}",
                    f"{worst:+.2f}",
                    "" if name == first else worded(estimate(list(saved.values())), 2),
                    f"{mean(selected, 'kept'):.3f}",
                    f"{mean(selected, 'unsteady'):.4f}",
                ]
            )
    head = [
        "ε_max",
        "arm",
        "bits/byte against dense, %",
        "worst condition, %",
        "against the first arm, points (95 %)",
    ]
    return "Guards of pruning, one at a time on the same pages", [*head, "kept", "mean |Δε|"], lines


def stress(rows: Rows) -> Table:
    """The former study, whose arm without guards has other pages."""
    lines = []
    for (scale, bias), group in split(rows, "scale", "bias"):
        base = [r for r in group if r["arm"] == "dense"]
        for name in ("guarded", "bare"):
            selected = [r for r in group if r["arm"] == name]
            change = worded(compared(selected, base, "bits_per_byte", "seed"), 2)
            figures = (f"{mean(selected, field):.3f}" for field in ("kept", "unsteady"))
            lines.append([f"{scale:g}", f"{bias:+g}", name, change, *figures])
    head = ["logits ×", "bias, nats", "guards", "bits/byte against dense, % (95 %)", "kept", "mean |Δε|"]
    return "Stress: wrong logits and a biased entropy", head, lines


def held(rows: Rows) -> Table:
    lines = []
    for (scale, law), selected in split(rows, "scale", "law"):
        figures = (f"{mean(selected, field):.3f}" for field in ("error", "clipped", "temperature"))
        lines.append([f"{scale:g}", law, *figures])
    return (
        "Stress: how closely temperature laws hold the entropy",
        ["logits ×", "law", "|H_T − H*|", "at a clip", "T"],
        lines,
    )


def estimators(rows: Rows) -> Table:
    base = [r for r in rows if r["estimator"] == "exact"]
    lines = []
    for (name,), selected in split(rows, "estimator"):
        changes = [
            "" if name == "exact" else worded(compared(selected, base, field, "seed"), digits)
            for field, digits in (("milliseconds", 1), ("bits_per_byte", 2))
        ]
        lines.append(
            [
                name,
                f"{mean(selected, 'correlation'):.4f}",
                f"{mean(selected, 'error'):.3f}",
                f"{middle(selected, 'milliseconds'):.3f}",
                changes[0],
                f"{mean(selected, 'kept'):.3f}",
                changes[1],
            ]
        )
    head = ["estimator", "correlation", "|error|, nats", "ms/token", "change, %", "kept", "bits/byte, %"]
    return "Estimators of H₁ in the loop (50 logits), `full-lossy`", head, lines
