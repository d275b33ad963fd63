"""Tables of the benchmark of weight quantisation."""

import statistics
from typing import Any

import numpy as np

from ...harness.provenance import stamp
from ...harness.tables import Table

MEASURED_CODE = (
    "models/quantisation.py",
    "models/layers.py",
    "entropic_jax/pallas/skinny_matmul",
    "entropic_jax/cpu_runtime",
    "models/embedded/model.safetensors",
)
QUALITY, SPEED = "Bits per byte of held-out text", "Tokens decoded per second"
TITLES = {QUALITY: "quality", SPEED: "speed"}
BARS = {"int8": "≤ +0.1 %", "int4": "≤ +2 %", "int4-128": "≤ +2 %"}
BASELINE = "float32"
SPEED_NOTES = [
    "Tokens per second: launches of 32 steps after 512 tokens, all precisions in turn, control off.",
    "Medians and quartiles.",
]


def tables(results: dict[str, Any]) -> list[Table]:
    """Quality and speed of every precision."""
    studies = results["studies"]
    makers = {"quality": quality_table, "speed": speed_table}
    return [makers[name](studies[name]["rows"]) for name in TITLES.values() if name in studies]


def quality_table(rows: list[dict[str, Any]]) -> Table:
    """Bits per byte, and the increase over float32 with the standard error of its mean over windows."""
    baseline = next(row for row in rows if row["precision"] == BASELINE)
    header = ["weights", "MB", "bits per byte", "÷ float32 − 1, %", "± %", "target"]
    body = []
    for row in rows:
        change = np.array(row["windows"]) - np.array(baseline["windows"])
        error = change.std(ddof=1) / len(change) ** 0.5 / baseline["bits_per_byte"]
        increase = row["bits_per_byte"] / baseline["bits_per_byte"] - 1
        body.append(
            [
                row["precision"],
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['bits_per_byte']:.4f}",
                f"{100 * increase:+.3f}",
                f"{100 * error:.3f}",
                BARS.get(row["precision"], ""),
            ]
        )
    return QUALITY, header, body


def speed_table(rows: list[dict[str, Any]]) -> Table:
    """Tokens a second of each batch: medians, and the range of the middle half of the launches."""
    batches = sorted({row["batch"] for row in rows})
    names = dict.fromkeys(row["preset"] for row in rows)
    plural = {batch: "sequence" if batch == 1 else "sequences" for batch in batches}
    header = ["weights", *(f"{batch} {plural[batch]}" for batch in batches)]
    body = []
    for name in names:
        cells = []
        for batch in batches:
            rates = [
                1e3 * batch / row["milliseconds"]
                for row in rows
                if (row["preset"], row["batch"]) == (name, batch)
            ]
            low, middle, high = statistics.quantiles(rates, n=4)
            cells.append(f"{middle:.0f} ({low:.0f}–{high:.0f})")
        body.append([name, *cells])
    return SPEED, header, body


def notes(results: dict[str, Any]) -> list[str]:
    """Explanations of the columns."""
    return [
        f"{results['cpu']}. The embedded model.",
        "Products and KV cache are in float32, under bfloat16 in bfloat16.",
        "Bits per byte: teacher forcing, step by step, of the last 512 tokens of 24 windows of 768 tokens.",
        "The text is the source of `rich`, which the model was not trained on.",
        "±: the standard error of the mean difference to float32 over windows.",
        "MB: all weights in memory, embedding and output projection both included.",
        *SPEED_NOTES * ("speed" in results["studies"]),
    ]


def stamps(results: dict[str, Any]) -> dict[str, str]:
    """Date and commit of each table."""
    studies = results["studies"]
    return {title: stamp([studies[name]], MEASURED_CODE) for title, name in TITLES.items() if name in studies}
