"""Contents of prompts: stretches of a text, or random tokens. Blocks with equal names share tokens."""

from collections.abc import Sequence

import numpy as np

from .arrivals import BLOCK, Arrival


class Prompts:
    """Generates the prompt of each arrival; the same seed gives the same prompts.

    Each prompt starts at a random place of the source. If a trace names blocks, the name determines where a
    block starts.

    Args:
        source: token ids, or pieces of text of about one token each, which are joined.
        seed: the seed of the places.
        factor: factor by which the lengths were scaled, so that prompts share the same prefixes as before.
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
        while len(stretch) < length:  # wraps around
            stretch += self.source[: length - len(stretch)]
        return stretch


def random_tokens(vocabulary: int, seed: int, count: int = 1 << 16) -> list[int]:
    """Token ids drawn uniformly from `vocabulary`, except its lowest sixteenth, which has special tokens.

    Args:
        vocabulary: tokens of the model.
        seed: the seed of the draws.
        count: how many.
    """
    low = min(vocabulary // 16, 256)
    return np.random.default_rng(seed).integers(low, vocabulary, count).tolist()


def pieces_of(text: str, size: int = 4) -> list[str]:
    """A text in pieces of about as many characters as a token."""
    return [text[i : i + size] for i in range(0, len(text), size)]
