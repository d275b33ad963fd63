"""Plot of the ablation: bits per byte and recall of page selectors over the fraction that they keep."""

from pathlib import Path

from entropic_jax.analysis.statistics import split

from .study_tables import Rows, curves


def draw(rows: Rows, file: Path) -> None:
    """Draw bits per byte and recall over the fraction of keys and values read, a line for each selector."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    points = curves(rows)
    dense = next(r for r in points if r["selector"] == "dense")
    figure, (bits, recall) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for (name,), group in split([r for r in points if r["selector"] != "dense"], "selector"):
        points_of = sorted(group, key=lambda r: r["kept"])
        strong = dict(lw=2.2, color="#c03030", zorder=3) if name == "entropy" else dict(lw=1.2)
        kept = [100 * r["kept"] for r in points_of]
        bits.plot(kept, [100 * r["above"] for r in points_of], "o-", ms=4, label=name, **strong)
        recall.plot(kept, [100 * r["right"] for r in points_of], "o-", ms=4, label=name, **strong)
    bits.axhline(0, color="#888888", lw=0.8)
    recall.axhline(100 * dense["right"], color="#888888", lw=0.8)
    bits.set(xlabel="keys and values read, %", ylabel="bits per byte above dense, %")
    bits.set_yscale("symlog", linthresh=1)
    recall.set(xlabel="keys and values read, %", ylabel="questions answered, %", ylim=(0, 101))
    recall.legend(frameon=False, fontsize="small")
    figure.savefig(file)
    plt.close(figure)
