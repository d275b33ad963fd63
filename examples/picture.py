"""Draw a generation as the terminal shows it: `python examples/picture.py docs/generation.svg`."""

import argparse
import dataclasses
import io
from pathlib import Path

from rich.console import Console
from rich.text import Text

from entropic_jax import LLM
from entropic_jax.serving.commands.terminal import legend, tint

PROMPT = '''class Stack:
    """A last-in, first-out collection."""

    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("file", type=Path, nargs="?", default=Path("generation.svg"))
    path = parser.parse_args().file
    with LLM() as llm:
        defaults = llm.get_default_sampling_params()  # of the model's generation config
        params = dataclasses.replace(defaults, max_tokens=160, seed=1, logprobs=0)
        (completion,) = llm.generate(PROMPT, params)[0].outputs
    assert completion.logprobs is not None
    text, summary = Text(PROMPT, "bold"), completion.summary
    shown = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
    for number, token in enumerate(shown):
        entropy = completion.trace["entropy"][number]
        text.append(completion.logprobs[number][token].decoded_token, tint(entropy))
    text.append(
        f"\n\n{len(completion.token_ids)} tokens · mean entropy {summary['mean_entropy']:.2f} nats", "dim"
    )
    text.append(f" · entropic time {summary['entropic_time']:.1f} nats\n", "dim").append(legend())
    console = Console(record=True, width=92, file=io.StringIO())
    console.print(text)
    console.save_svg(str(path), title="entropic generate")


if __name__ == "__main__":
    main()
