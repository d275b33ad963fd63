"""Draw a generation: entropy, temperature, what was read and entropic time, with the text under them.

    python examples/curves.py run.svg [--preset full-lossy] [--max-tokens 96] [--prompt TEXT]

Needs matplotlib (`pip install -e '.[train]'`).
"""

import argparse
from pathlib import Path

from entropic_jax.parameter_tables.control_gains import PRESETS
from entropic_jax.serving.offline.generation import load
from entropic_jax.serving.options.control_options import Control
from entropic_jax.serving.options.model import EMBEDDED
from entropic_jax.serving.request import Request

PROMPT = '''class Stack:
    """A last-in, first-out collection."""

    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
'''
PANELS = (
    (("entropy", "tempered_entropy"), "nats"),
    (("temperature",), "temperature"),
    (("kept_fraction", "dropped_mass_limit"), "share"),
    (("entropic_time",), "τ, nats"),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", default=Path("run.svg"))
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--preset", choices=PRESETS, default="full-lossy")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args(arguments)
    engine = load(options.model, control=Control(options.preset))
    request = Request(prompt=options.prompt, max_tokens=options.max_tokens, temperature=1.0, seed=1)
    pieces, series = [], {name: [] for names, _ in PANELS for name in names}
    for token in engine.stream(request):
        pieces.append(token.text)
        for name, values in series.items():
            values.append(token.metrics[name])
    draw(options.file, pieces, series, options.preset)


def draw(file: Path, pieces: list[str], series: dict[str, list[float]], title: str) -> None:
    """One panel a quantity, a column a token."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    width = max(6.0, 0.13 * len(pieces))
    figure, panels = plt.subplots(len(PANELS), 1, sharex=True, figsize=(width, 6.5), layout="constrained")
    for axes, (names, unit) in zip(panels, PANELS, strict=True):
        for name in names:
            axes.plot(series[name], drawstyle="steps-mid", lw=1.2, label=name.replace("_", " "))
        axes.set_ylabel(unit)
        axes.legend(frameon=False, fontsize="x-small", loc="upper right")
    panels[0].set_title(f"preset {title}", fontsize="medium", loc="left")
    shown = [piece.replace("\n", "⏎").replace("\t", "⇥").replace("$", r"\$") for piece in pieces]
    panels[-1].set_xticks(range(len(shown)), shown, rotation=90, fontsize=5, family="monospace")
    panels[-1].set_xlim(-0.5, len(shown) - 0.5)
    figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    main()
