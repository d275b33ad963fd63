"""Longest match: where the last tokens of a text occurred before, the search of suffix drafts.

`longest_match(text, last, longest)` compares the tokens that end each text with those that end at every
earlier position. The contract:

Args:
    text: int32 `[rows, context]`.
    last: int32 `[rows]`, the position of each row's last token, from 0 to context − 1.
    longest: matches of more tokens than this count as this many; static.

Returns:
    The length of the longest match, 0 without one, and the position of its last token, both int32 `[rows]`.
    Of equally long matches it is the latest; without one it is the position before the last token.

Raises:
    NotImplementedError: a back end does not support the case; the message is the reason.
"""

import jax

from ..dispatch import Operation
from . import cpu, reference

__all__ = ["longest_match"]

LONGEST_MATCH = Operation("longest_match", {"cpu": cpu.longest_match, "xla": reference.longest_match})


def longest_match(
    text: jax.Array, last: jax.Array, longest: int, *, backend: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The latest of the longest earlier occurrences of the tokens that end each text.

    Args:
        text: int32 `[rows, context]`.
        last: int32 `[rows]`, the position of the last token.
        longest: matches of more tokens than this count as this many; static.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        The length of the match, 0 without one, and the position of its last token, both int32 `[rows]`.

    >>> import jax.numpy as jnp
    >>> matched, end = longest_match(jnp.array([[5, 6, 7, 9, 6, 7, 0, 0]]), jnp.array([5]), 4)
    >>> matched.tolist(), end.tolist()
    ([2], [2])
    """
    return LONGEST_MATCH(text, last, longest, backend=backend)
