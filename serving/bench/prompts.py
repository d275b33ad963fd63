"""What is in the prompts: stretches of a text, or random tokens; blocks of one name hold the same tokens."""

from collections.abc import Sequence

import numpy as np

from .arrivals import BLOCK, Arrival


class Prompts:
    """Makes the prompt of each arrival; the same seed makes the same prompts.

    Each prompt begins at a place of its own. Where a trace names blocks, a block begins where its name says.

    Args:
        source: What prompts are cut from: token ids, or pieces of text of about a token each, to be joined.
        seed: Of the places.
        factor: What the lengths were multiplied by, so that prompts still share what they shared.
    """

    def __init__(self, source: Sequence[int] | Sequence[str], seed: int, factor: float = 1.0) -> None:
        self.source, self.seed = source, seed
        self.block = max(1, round(BLOCK * factor))

    def __call__(self, index: int, arrival: Arrival) -> list[int] | str:
        """The prompt of arrival number `index`."""
        length = arrival.prompt_tokens
        pieces: list = []
        for name in arrival.blocks:
            pieces += self._stretch((self.seed, 1, name), min(self.block, length - len(pieces)))
        pieces += self._stretch((self.seed, 0, index), length - len(pieces))
        return "".join(pieces) if pieces and isinstance(pieces[0], str) else pieces

    def _stretch(self, seed: tuple[int, ...], length: int) -> list:
        if length <= 0:
            return []
        start = int(np.random.default_rng(seed).integers(0, len(self.source)))
        stretch = list(self.source[start : start + length])
        while len(stretch) < length:  # the text begins again
            stretch += self.source[: length - len(stretch)]
        return stretch


def random_tokens(vocabulary: int, seed: int, count: int = 1 << 16) -> list[int]:
    """Token ids drawn evenly, without the lowest sixteenth, where special tokens live.

    Args:
        vocabulary: Tokens of the model.
        seed: Of the draws.
        count: How many.
    """
    low = min(vocabulary // 16, 256)
    return np.random.default_rng(seed).integers(low, vocabulary, count).tolist()


def pieces_of(text: str, size: int = 4) -> list[str]:
    """A text in pieces of as many characters as a token has, about."""
    return [text[i : i + size] for i in range(0, len(text), size)]
