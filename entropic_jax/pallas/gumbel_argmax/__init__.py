"""Gumbel-max sampling: the index of the largest tempered logit, after Gumbel noise of the row's own key.

`gumbel_argmax(logits, temperature, key, seed, position, active, numbers)` draws a token from
softmax(logits / T) in the rows with T > 0, and takes the likeliest in the others. The contract:

Args:
    logits: float32 `[rows, columns]`.
    temperature: float32 `[rows]`, T.
    key: uint32 `[2]`, the Threefry key of the run.
    seed: int32 `[rows]`.
    position: int32 `[rows]`, of the token that is drawn.
    active: bool `[rows]`. Other rows give 0; a back end need not read them.
    numbers: int32 `[columns]`, ascending: the tokens of the columns, if these are not the whole vocabulary.

Returns:
    The column of max((logits − max logits) / T + G) of a row with T > 0, of max(logits) of another; int32
    `[rows]`, the first of ties. The bits from which G is made are those of `jax.random.bits(fold_in(fold_in(
    key, seed), position), (vocabulary,))` at the tokens of the columns, whichever back end serves; G itself
    differs between back ends by rounding. A row with NaN gives a valid index. Every row's result depends on
    its own arguments alone.

Raises:
    NotImplementedError: a back end does not support the case; the message is the reason.
"""

import jax
import jax.numpy as jnp

from ..dispatch import Operation
from . import cpu, reference
from .reference import folded, gumbel, threefry

__all__ = ["folded", "gumbel", "gumbel_argmax", "threefry"]

GUMBEL_ARGMAX = Operation("gumbel_argmax", {"cpu": cpu.gumbel_argmax, "xla": reference.gumbel_argmax})


def gumbel_argmax(
    logits: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    active: jax.Array | None = None,
    numbers: jax.Array | None = None,
    *,
    backend: str | None = None,
) -> jax.Array:
    """The column of the largest logit of each row, after Gumbel noise where the row's temperature is above 0.

    Args:
        logits: float32 `[rows, columns]`.
        temperature: float32 `[rows]`.
        key: uint32 `[2]`, a Threefry key.
        seed: int32 `[rows]`.
        position: int32 `[rows]`, of the token that is drawn.
        active: bool `[rows]`, the rows whose index is needed; None if each is.
        numbers: int32 `[columns]`, ascending: the tokens of the columns; None if these are the vocabulary.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        int32 `[rows]`. Not differentiable.
    """
    active = jnp.ones(logits.shape[:1], bool) if active is None else active
    logits, temperature = jax.lax.stop_gradient((logits, temperature))
    return GUMBEL_ARGMAX(logits, temperature, key, seed, position, active, numbers, backend=backend)
