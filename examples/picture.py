"""Draw a generation as the terminal shows it: `python examples/picture.py docs/generation.svg`."""

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from entropic_jax.serving.commands.terminal import legend, tint
from entropic_jax.serving.offline.generation import load
from entropic_jax.serving.options.model import EMBEDDED
from entropic_jax.serving.request import Request

PROMPT = '''class Stack:
    """A last-in, first-out collection."""

    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
'''


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "generation.svg")
    text, entropies, resolved = Text(PROMPT, "bold"), [], 0.0
    for token in load(EMBEDDED).stream(
        Request(prompt=PROMPT, max_tokens=160, temperature=0.6, top_p=0.95, seed=1)
    ):
        entropies.append(token.metrics["entropy"])
        text.append(token.text, tint(entropies[-1]))
        resolved = token.metrics["entropic_time"]
    text.append(
        f"\n\n{len(entropies)} tokens · mean entropy {sum(entropies) / len(entropies):.2f} nats", "dim"
    )
    text.append(f" · entropic time {resolved:.1f} nats\n", "dim").append(legend())
    console = Console(record=True, width=92, file=io.StringIO())
    console.print(text)
    console.save_svg(str(path), title="entropic generate")


if __name__ == "__main__":
    main()
