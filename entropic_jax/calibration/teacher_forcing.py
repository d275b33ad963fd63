"""Teacher forcing: the logits that a model computes along a known text, chunk by chunk."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..attention.attend import TokenSpan, attend_to
from ..state.cache import Cache, allocate, grant
from ..state.decoder import Decoder

CHUNK, CHUNK_LOGITS = 512, 1 << 25  # most positions, and most logits, computed at once


def split_sequences(
    sequences: Sequence[Sequence[int]], context: int, tokens: int | None = None
) -> list[np.ndarray]:
    """Splits token sequences for prediction with a bounded context.

    Every token but the first of its sequence is predicted once. The beginnings of all sequences come first,
    so that a limit is shared between sequences.

    Args:
        sequences: token ids.
        context: most tokens to predict in a piece.
        tokens: most tokens to predict in total; None is all.

    Raises:
        ValueError: for a context or a number of tokens below 1.

    >>> [piece.tolist() for piece in split_sequences([[1, 2, 3, 4, 5], [6, 7]], 2, tokens=4)]
    [[1, 2, 3], [6, 7], [3, 4]]
    """
    for name, value in (("context", context), ("tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be an integer of at least 1; got {value}")
    places = sorted(
        (at, n) for n, sequence in enumerate(sequences) for at in range(0, len(sequence) - 1, context)
    )
    result, left = [], math.inf if tokens is None else tokens
    for at, number in places:
        if left < 1:
            break
        size = int(min(context, left, len(sequences[number]) - 1 - at))
        result.append(np.asarray(sequences[number][at : at + size + 1], np.int32))
        left -= size
    return result


@partial(jax.jit, static_argnames="decoder", donate_argnames="cache")
def _forward_chunk(
    decoder: Decoder, params: Any, cache: Cache, start: jax.Array, count: jax.Array, tokens: jax.Array
):
    attend = attend_to(cache, TokenSpan(start, count))
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    hidden, layers = decoder.hidden(params, tokens, positions, cache.layers, attend)
    return cache._replace(layers=layers), decoder.logits(params, hidden[0])


def teacher_forced(
    decoder: Decoder, params: Any, sequences: Sequence[Sequence[int] | np.ndarray]
) -> Iterator[tuple[int, jax.Array, np.ndarray]]:
    """Computes the logits of a model along known token sequences.

    Each sequence starts with an empty context. A chunk belongs to one sequence; chunks come in order.

    Args:
        decoder: the model's functions.
        params: the model's parameters.
        sequences: token ids.

    Yields:
        For each chunk: the index of the sequence, logits float32 `[n, vocabulary]`, and the next tokens int32
        `[n]`, −1 for padding.

    Raises:
        ValueError: for a token outside the vocabulary.
    """
    vocabulary = decoder.shape.vocabulary
    for number, sequence in enumerate(sequences):
        wrong = [t for t in sequence if not 0 <= t < vocabulary]
        if wrong:
            raise ValueError(
                f"tokens must be between 0 and {vocabulary - 1}; got {wrong[0]} in sequences[{number}]"
            )
    longest = max((len(sequence) - 1 for sequence in sequences), default=0)
    if longest < 1:
        return
    next_power = lambda value: 1 << max(1, int(value - 1).bit_length())  # of two, at least 2
    chunk = min(CHUNK, next_power(longest), max(2, next_power(CHUNK_LOGITS // vocabulary) // 2))
    cache = allocate(decoder.shape, 1, longest, dtype=jax.tree.leaves(params)[0].dtype)
    cache, _ = grant(cache, jnp.array([longest], jnp.int32))
    for number, sequence in enumerate(sequences):
        sequence = np.asarray(sequence, np.int32)
        for start in range(0, len(sequence) - 1, chunk):
            count = min(chunk, len(sequence) - 1 - start)
            inputs, targets = np.zeros((1, chunk), np.int32), np.full(chunk, -1, np.int32)
            inputs[0, :count] = sequence[start : start + count]
            targets[:count] = sequence[start + 1 : start + 1 + count]
            bounds = (jnp.array([x], jnp.int32) for x in (start, count))
            cache, logits = _forward_chunk(decoder, params, cache, *bounds, jnp.asarray(inputs))
            yield number, logits, targets
