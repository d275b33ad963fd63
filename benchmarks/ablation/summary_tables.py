"""Summary tables of the ablation: the targets of `full-lossy`, and whether the scales are super-additive."""

from typing import Any

from entropic_jax.analysis.statistics import beyond_product, compared, mean, middle, split, worded
from entropic_jax.analysis.tables import of

from ..harness.tables import Table

Rows = list[dict[str, Any]]
PARTS = ("micro", "meso-lossy", "macro")
FASTER_THAN = {16384: {"openvino": 1.7, "openvino-half": 1.0}, 32768: {"openvino": 2.5, "openvino-half": 1.7}}


def super_additivity(studies: dict[str, Rows]) -> Table:
    """Whether the scales bring more together than the product of what each brings alone."""
    lines = []
    speeds = [{**r, "rate": 1e3 / r["milliseconds"]} for r in studies.get("speed", [])]
    for (context,), group in split(speeds, "context"):
        lines.append([f"speed of one sequence, {context}", *_verdict(group, "rate", "turn")])
    for measure, field in (
        ("tokens/s under load", "tokens_per_second"),
        ("τ/s under load", "entropic_time_per_second"),
    ):
        if "micro" in {r["preset"] for r in studies.get("load", [])}:
            lines.append([measure, *_verdict(studies["load"], field, "seed")])
    head = ["measure", "full-lossy over the product of its parts, % (95 %)", "super-additive"]
    return "Super-additivity", head, lines


def _verdict(rows: Rows, field: str, key: str) -> list[str]:
    if not {"off", *PARTS, "full-lossy"} <= {r["preset"] for r in rows}:
        return ["", "not measured"]
    measured = beyond_product(rows, field, "full-lossy", PARTS, key)
    verdict = "yes" if measured.low > 0 else "no" if measured.high < 0 else "not shown"
    return [worded(measured), verdict]


def targets(studies: dict[str, Rows]) -> Table:
    """The targets of `full-lossy`, and what was measured."""
    lines: list[list[str]] = []

    def enter(measure: str, target: float, value: float, at_least: bool, form: str = ".2f") -> None:
        met = value >= target if at_least else value <= target
        sign = "≥" if at_least else "≤"
        lines.append([measure, f"{sign} {target:g}", format(value, form), "yes" if met else "no"])

    def ratio(rows: Rows, name: str, base: str) -> float | None:
        selected, other = of(rows, name), of(rows, base)
        return (
            middle(selected, "milliseconds") / middle(other, "milliseconds") if selected and other else None
        )

    timed = [r for r in studies.get("speed", []) if r["context"] > 4096]
    longest = max((r["context"] for r in timed), default=0)
    measured = ratio([r for r in timed if r["context"] == longest], "full-lossy", "off")
    if measured is not None:
        enter(f"embedded model, {longest} tokens: latency ÷ off", 0.6, measured, False)
        enter(f"embedded model, {longest} tokens: throughput ÷ off", 1.7, 1 / measured, True)
    larger = [r for r in studies.get("shape", []) if "milliseconds" in r]
    for context, target in {512: 1.05, 16384: 0.5, 32768: 0.35}.items():
        group = [r for r in larger if r["context"] == context]
        for ending in ("", "-half"):
            if (measured := ratio(group, f"full-lossy{ending}", f"off{ending}")) is not None:
                enter(
                    f"25M model, {context} tokens: full-lossy{ending} ÷ off{ending}, latency",
                    target,
                    measured,
                    False,
                )
        for engine, least in FASTER_THAN.get(context, {}).items():
            # As many bits as the other's.
            selected = "full-lossy-half" if engine.endswith("half") else "full-lossy"
            if (measured := ratio(group, engine, selected)) is not None:
                enter(f"25M model, {context} tokens: speed ÷ {engine}", least, measured, True)
    quality = studies.get("quality", [])
    longest = max((r["context"] for r in quality), default=0)
    if longest > 4096:
        selected, base = (
            of([r for r in quality if r["context"] == longest], name) for name in ("meso-lossy", "off")
        )
        change = compared(selected, base, "bits_per_byte", "seed").mean
        enter(f"{longest} tokens: bits per byte, change in %", 1.0, change, False)
    informed = [r for r in studies.get("information", []) if r["context"] > 4096]
    if informed:
        selected, base = of(informed, "meso-lossy"), of(informed, "off")
        gain = mean(selected, "efficiency") / mean(base, "efficiency")
        enter(f"{informed[0]['context']} tokens, prompt included: dτ/dC ÷ off", 1.7, gain, True)
    questions = studies.get("recall", [])
    for (distance,), group in split(questions, "distance"):
        lost = 100 * (mean(of(group, "off"), "right") - mean(of(group, "meso-lossy"), "right"))
        enter(f"recall over {distance} tokens, points lost", 1.0, lost, False, ".1f")
    return "Targets of `full-lossy`", ["measure", "target", "measured", "met"], lines
