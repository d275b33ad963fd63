"""Plot of the decoding benchmark: tokens per second of every engine, by context and batch."""

from pathlib import Path
from typing import Any

from ..harness.plots import svg_figure

FILE = "decoding.svg"
COLORS = ("#c03030", "#404040", "#4060a0", "#80a0d0", "#a0a0a0", "#c0c0c0", "#909050")  # ours, then others


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Draw the median rates of decoding as bars with their ranges, one panel a batch size.

    Args:
        runs: the results; those without engines in float32 are left out.
        file: the plot.
    """
    cells = [cell for results in runs for cell in results["cells"] if "ours" in cell["engines"]]
    batches = sorted({cell["batch"] for cell in cells})
    engines = list(dict.fromkeys(name for cell in cells for name in cell["engines"]))
    with svg_figure(file, len(batches), 9, 3.6) as panels:
        for panel, batch in zip(panels, batches, strict=True):
            group = sorted((cell for cell in cells if cell["batch"] == batch), key=lambda c: c["context"])
            for number, engine in enumerate(engines):
                rates = [
                    (place, cell["engines"][engine]["decode_rate"])
                    for place, cell in enumerate(group)
                    if cell["engines"].get(engine, {}).get("decode_rate")
                ]
                middle = [rate["median"] for _, rate in rates]
                error = [
                    [r["median"] - r["min"] for _, r in rates],
                    [r["max"] - r["median"] for _, r in rates],
                ]
                at = [place + 0.8 * (number - (len(engines) - 1) / 2) / len(engines) for place, _ in rates]
                color = COLORS[number % len(COLORS)]
                style = dict(width=0.75 / len(engines), error_kw=dict(lw=0.8), color=color)
                panel.bar(at, middle, yerr=error, label=engine, **style)
            panel.set_xticks(range(len(group)), [str(cell["context"]) for cell in group])
            panel.set(xlabel="context, tokens", ylabel="tokens/s", title=f"batch {batch}")
        panels[0].legend(frameon=False, fontsize="small")
