"""The studies of an ablation as tables: a title, a header, and lines of text."""

from collections.abc import Callable
from functools import partial

from .statistics import Rows, compared, differences, estimate, mean, middle, split, spread, worded
from .studies import EQUIVALENT_PRESETS

Grid = tuple[str, list[str], list[list[str]]]
# Table 1 of Kiruluta 2026 (arXiv 2603.03310), each over its baseline; the names are the paper's.
PAPER = {
    "micro": {"latency": 0.98, "throughput": 1.02, "dτ/dC": 1.08, "quality": 1.00},
    "meso": {"latency": 0.85, "throughput": 1.20, "dτ/dC": 1.25, "quality": 0.98},  # attention only
    "macro": {"latency": 0.88, "throughput": 1.15, "dτ/dC": 1.12, "quality": 1.00},  # scheduling only
    "full": {"latency": 0.70, "throughput": 1.40, "dτ/dC": 1.55, "quality": 1.00},
}
LIKE_THE_PAPER = {"meso": "meso-lossy", "full": "full-lossy"}  # our presets that prune as the paper's do


def of(rows: Rows, name: str) -> Rows:
    """The rows of one preset."""
    return [r for r in rows if r["preset"] == name]


def quality(rows: Rows) -> Grid:
    """Bits per byte and fraction of the cache read, per context and preset."""
    lines = []
    for (context,), in_context in split(rows, "context"):
        base = of(in_context, "off")
        for (name,), of_preset in split(in_context, "preset"):
            change = worded(compared(of_preset, base, "bits_per_byte", "seed"), 2)
            lines.append(
                [
                    str(context),
                    " = ".join([name, *(k for k, v in EQUIVALENT_PRESETS.items() if v == name)]),
                    f"{mean(of_preset, 'bits_per_byte'):.4f}",
                    "" if name == "off" else change,
                    f"{mean(of_preset, 'kept'):.3f}",
                    f"{mean(of_preset, 'bytes_read') / 1e6:.1f}",
                    f"{mean(of_preset, 'flops') / 1e6:.1f}",
                ]
            )
    head = ["context", "preset", "bits/byte", "change, % (95 %)", "kept", "MB/token", "MFLOP/token"]
    return "Quality under teacher forcing, held-out text", head, lines


def _change(of_preset: Rows, base: Rows, field: str, digits: int) -> str:
    return worded(differences(of_preset, base, field, "seed", "window"), digits)


def information(rows: Rows) -> Grid:
    """Information gained about the text and dτ/dC, per roofline second of prompt and text together."""
    lines = []
    for (context,), in_context in split(rows, "context"):
        base = of(in_context, "off")
        for (name,), of_preset in split(in_context, "preset"):
            change = partial(_change, of_preset, base)
            spent = sum(r["prefill_seconds"] + r["decode_seconds"] for r in of_preset)
            lines.append(
                [
                    str(context),
                    " = ".join([name, *(k for k, v in EQUIVALENT_PRESETS.items() if v == name)]),
                    f"{mean(of_preset, 'bits_per_token'):.3f}",
                    "" if name == "off" else change("bits_per_token", 3),
                    f"{mean(of_preset, 'entropic_time'):.3f}",
                    f"{100 * sum(r['prefill_seconds'] for r in of_preset) / spent:.0f}",
                    f"{mean(of_preset, 'bits_per_second'):.0f}",
                    "" if name == "off" else change("bits_per_second", 0),
                    "" if name == "off" else f"{_over(mean, of_preset, base, 'efficiency'):.2f}",
                    "" if name == "off" else f"{_over(mean, of_preset, base, 'decode_efficiency'):.2f}",
                ]
            )
    head = ["context", "preset", "bits explained/token", "difference", "τ, nats/token", "prompt, % of C"]
    head += ["bits/s", "difference", "dτ/dC ÷ off", "without the prompt"]
    return "Information gained about held-out text, one sequence, modelled cost", head, lines


def timed(title: str) -> Callable[[Rows], Grid]:
    """The table of a study of speed."""

    def grid(rows: Rows) -> Grid:
        lines = []
        for (context,), in_context in split(rows, "context"):
            base = of(in_context, "off")
            for (name,), of_preset in split(in_context, "preset"):
                times = sorted(r["milliseconds"] for r in of_preset)
                median = middle(of_preset, "milliseconds")
                over = median / middle(base, "milliseconds")
                lines.append(
                    [
                        str(context),
                        name,
                        f"{median:.2f}",
                        f"{times[round(0.95 * (len(times) - 1))]:.2f}",
                        f"{over:.2f}",
                        "" if name == "off" else worded(compared(of_preset, base, "milliseconds", "turn"), 0),
                        f"{1 / over:.2f}",
                        f"{mean(of_preset, 'kept'):.3f}" if "kept" in of_preset[0] else "",
                    ]
                )
        head = ["context", "preset", "ms/token", "p95", "÷ off", "change, % (95 %)", "throughput ÷ off"]
        return title, [*head, "kept"], lines

    return grid


def load(rows: Rows) -> Grid:
    """Completion times under load, per preset."""
    base = of(rows, "off")

    def change(of_preset, field):
        return worded(compared(of_preset, base, field, "seed"), 0)

    lines = [
        [
            name,
            f"{mean(of_preset, 'completion'):.2f}",
            "" if name == "off" else change(of_preset, "completion"),
            f"{mean(of_preset, 'completion_p95'):.2f}",
            f"{mean(of_preset, 'tokens_per_second'):.0f}",
            "" if name == "off" else change(of_preset, "tokens_per_second"),
            f"{mean(of_preset, 'entropic_time_per_second'):.0f}",
        ]
        for (name,), of_preset in split(rows, "preset")
    ]
    head = ["preset", "completion, s", "change, %", "p95, s", "tokens/s", "change, %", "τ/s"]
    return "Under load: more sequences than rows, arriving at random", head, lines


def writing(rows: Rows) -> Grid:
    """Statistics of free generation, per preset."""
    fields = ("entropy_variance", "error", "clipped", "temperature", "fall", "distinct_4", "repetition")
    lines = []
    for (name,), of_preset in split(rows, "preset"):
        estimates = (estimate([r[f] for r in of_preset]) for f in (*fields, "divergence"))
        lines.append([name, *map(spread, estimates)])
    head = ["preset", "Var H_T", "|H_T − H*|", "at a clip", "T", "E[ΔH⁺]", "distinct 4-grams", "repeated"]
    return "Free generation", [*head, "bigram JS"], lines


def paper_comparison(studies: dict[str, Rows], context: int) -> Grid:
    """The paper's Table 1 and our figures, at one context; no rows where a study is missing."""
    names = ("speed", "load", "quality", "information")
    speeds, loads, qualities, informed = (studies.get(name, []) for name in names)
    speeds = [r for r in speeds if r["context"] == context]
    longest = max((r["context"] for r in qualities), default=0)
    qualities, informed = ([r for r in x if r["context"] == longest] for x in (qualities, informed))
    lines = []
    for paper_name, printed in PAPER.items():
        name = LIKE_THE_PAPER.get(paper_name, paper_name)
        same = EQUIVALENT_PRESETS.get(name, name)
        read = of(qualities, same)
        plain = of(qualities, "off")
        ours = {
            "latency": _over(middle, of(speeds, name), of(speeds, "off"), "milliseconds"),
            "throughput": _over(mean, of(loads, name), of(loads, "off"), "tokens_per_second"),
            "dτ/dC": _over(mean, of(informed, same), of(informed, "off"), "efficiency"),
            "quality": _over(mean, plain, read, "bits_per_byte"),
        }
        cells = [f"{printed[k]:.2f} · {x:.2f}" if (x := ours[k]) else f"{printed[k]:.2f} ·" for k in printed]
        lines.append([paper_name if name == paper_name else f"{paper_name} · {name}", *cells])
    head = ["preset", *PAPER["full"]]
    title = f"The paper's table · ours, over its `off`; latency at {context} tokens, throughput under load"
    return title, head, lines if speeds or loads or qualities else []


def _over(average: Callable[[Rows, str], float], rows: Rows, base: Rows, field: str) -> float:
    return average(rows, field) / average(base, field) if rows and base else 0.0
