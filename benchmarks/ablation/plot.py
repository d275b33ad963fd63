"""Plot of the ablation: bits per byte and recall of page selectors over the fraction that they keep."""

from pathlib import Path
from typing import Any

from entropic_jax.analysis.statistics import split

from ..harness.plots import svg_figure
from .study_tables import curves

FILE = "selectors.svg"


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw bits per byte and recall over the fraction of keys and values read, a line for each selector."""
    points = curves(results["studies"]["selectors"])
    dense = next(r for r in points if r["selector"] == "dense")
    with svg_figure(file, 2, 9, 3.6) as (bits, recall):
        for (name,), group in split([r for r in points if r["selector"] != "dense"], "selector"):
            line = sorted(group, key=lambda r: r["kept"])
            strong = dict(lw=2.2, color="#c03030", zorder=3) if name == "entropy" else dict(lw=1.2)
            kept = [100 * r["kept"] for r in line]
            bits.plot(kept, [100 * r["above"] for r in line], "o-", ms=4, label=name, **strong)
            recall.plot(kept, [100 * r["right"] for r in line], "o-", ms=4, label=name, **strong)
        bits.axhline(0, color="#888888", lw=0.8)
        recall.axhline(100 * dense["right"], color="#888888", lw=0.8)
        bits.set(xlabel="keys and values read, %", ylabel="bits per byte above dense, %")
        bits.set_yscale("symlog", linthresh=1)
        recall.set(xlabel="keys and values read, %", ylabel="questions answered, %", ylim=(0, 101))
        recall.legend(frameon=False, fontsize="small")
