"""Reproducible SVG plots."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def svg_figure(file: Path, columns: int, width: float, height: float) -> Iterator[Any]:
    """Axes in one row; the figure is saved at the end.

    Args:
        file: where to save it.
        columns: number of axes.
        width: the width of the figure, in inches.
        height: the height of the figure, in inches.

    Yields:
        The axes, a list.
    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": file.name, "svg.fonttype": "none", "font.size": 9}):
        figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)
        yield list(axes[0])
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)
