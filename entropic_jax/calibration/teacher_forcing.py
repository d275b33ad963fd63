"""A model that reads given text: the logits of every token to come, chunk by chunk."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..attention.attend import Step, attend_to
from ..cache import Cache, allocate, grant
from ..loop import Decoder

CHUNK, CHUNK_LOGITS = 512, 1 << 25  # positions read at once, and most logits of them


def pieces(sequences: Sequence[Sequence[int]], context: int, tokens: int | None = None) -> list[np.ndarray]:
    """Token sequences cut so that each piece has at most `context` tokens to predict, `tokens` in all.

    Every token but the first of its sequence is predicted once. The beginnings of all sequences come first,
    then what follows them, so that a limit is shared.

    >>> [piece.tolist() for piece in pieces([[1, 2, 3, 4, 5], [6, 7]], 2, tokens=4)]
    [[1, 2, 3], [6, 7], [3, 4]]
    """
    for name, value in (("context", context), ("tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; accepted are integers of at least 1")
    places = sorted((at, n) for n, whole in enumerate(sequences) for at in range(0, len(whole) - 1, context))
    found, left = [], math.inf if tokens is None else tokens
    for at, number in places:
        if left < 1:
            break
        size = int(min(context, left, len(sequences[number]) - 1 - at))
        found.append(np.asarray(sequences[number][at : at + size + 1], np.int32))
        left -= size
    return found


@partial(jax.jit, static_argnames="decoder", donate_argnames="cache")
def _read(decoder: Decoder, params: Any, cache: Cache, start: jax.Array, count: jax.Array, tokens: jax.Array):
    attend = attend_to(cache, Step(start, count))
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    hidden, layers = decoder.hidden(params, tokens, positions, cache.layers, attend)
    return cache._replace(layers=layers), decoder.logits(params, hidden[0])


def teacher_forced(
    decoder: Decoder, params: Any, sequences: Sequence[Sequence[int] | np.ndarray]
) -> Iterator[tuple[int, jax.Array, np.ndarray]]:
    """Logits of a model that reads given tokens: (number of the sequence, logits, tokens) per chunk.

    logits float32 `[n, vocabulary]`, tokens int32 `[n]` as in `Batch`. Each sequence starts an empty context
    and attends to all of it; a chunk is what is computed at once, of one sequence, in order. Raises
    ValueError for a token outside the vocabulary.
    """
    vocabulary = decoder.shape.vocabulary
    for number, whole in enumerate(sequences):
        wrong = [t for t in whole if not 0 <= t < vocabulary]
        if wrong:
            raise ValueError(f"sequences[{number}] has token {wrong[0]}; accepted are 0 to {vocabulary - 1}")
    longest = max((len(whole) - 1 for whole in sequences), default=0)
    if longest < 1:
        return
    power = lambda value: 1 << max(1, int(value - 1).bit_length())  # at least 2
    chunk = min(CHUNK, power(longest), max(2, power(CHUNK_LOGITS // vocabulary) // 2))
    cache = allocate(decoder.shape, 1, longest, dtype=jax.tree.leaves(params)[0].dtype)
    cache, _ = grant(cache, jnp.array([longest], jnp.int32))
    for number, whole in enumerate(sequences):
        whole = np.asarray(whole, np.int32)
        for start in range(0, len(whole) - 1, chunk):
            count = min(chunk, len(whole) - 1 - start)
            given, wanted = np.zeros((1, chunk), np.int32), np.full(chunk, -1, np.int32)
            given[0, :count] = whole[start : start + count]
            wanted[:count] = whole[start + 1 : start + 1 + count]
            where = (jnp.array([x], jnp.int32) for x in (start, count))
            cache, logits = _read(decoder, params, cache, *where, jnp.asarray(given))
            yield number, logits, wanted
