"""Draw a generation: entropy, temperature, what was read and entropic time, with the text under them.

    python examples/curves.py run.svg [--preset full-lossy] [--max-tokens 96] [--prompt TEXT]

Needs matplotlib (`pip install -e '.[train]'`).
"""

import argparse
from pathlib import Path

from entropic_jax import LLM, SamplingParams

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
    parser.add_argument("--model", help="model directory (default: the embedded model)")
    parser.add_argument("--preset", default="full-lossy", help="preset of LLM (default: full-lossy)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args(arguments)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=1.0, seed=1, logprobs=0)
    with LLM(options.model, preset=options.preset) as llm:
        (completion,) = llm.generate(options.prompt, params)[0].outputs
    assert completion.logprobs is not None
    tokens = zip(completion.logprobs, completion.token_ids, strict=True)
    pieces = [alternatives[token].decoded_token for alternatives, token in tokens]
    draw(options.file, pieces, completion.trace, options.preset)


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
