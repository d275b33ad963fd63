"""Gumbel-max sampling: the index of the largest logit, after Gumbel noise from a key of each row.

`gumbel_argmax(logits, keys, noisy, active)` draws a token from softmax(logits) in the rows that are noisy,
and takes the likeliest in the others. The contract:

Args:
    logits: float32 `[rows, vocabulary]`.
    keys: uint32 `[rows, 2]`, Threefry keys.
    noisy: bool `[rows]`.
    active: bool `[rows]`. Other rows give 0; a back end need not read them.

Returns:
    argmax(logits + G) of a noisy row, argmax(logits) of another; int32 `[rows]`, the first of ties. The bits
    from which G is made are those of `jax.random.bits(key, (vocabulary,))`, whichever back end serves; G
    itself differs between back ends by rounding. A row with NaN gives a valid index. Every row's result
    depends on its own arguments alone.

Raises:
    NotImplementedError: a back end does not support the case; the message is the reason.
"""

import jax
import jax.numpy as jnp

from ..dispatch import Operation
from . import cpu, reference
from .reference import gumbel, threefry

__all__ = ["gumbel", "gumbel_argmax", "threefry"]

GUMBEL_ARGMAX = Operation("gumbel_argmax", {"cpu": cpu.gumbel_argmax, "xla": reference.gumbel_argmax})


def gumbel_argmax(
    logits: jax.Array,
    keys: jax.Array,
    noisy: jax.Array,
    active: jax.Array | None = None,
    *,
    backend: str | None = None,
) -> jax.Array:
    """The index of the largest logit of each row, after Gumbel noise where the row is noisy.

    Args:
        logits: float32 `[rows, vocabulary]`.
        keys: uint32 `[rows, 2]`, Threefry keys.
        noisy: bool `[rows]`.
        active: bool `[rows]`, the rows whose index is needed; None if each is.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        int32 `[rows]`. Not differentiable.
    """
    active = jnp.ones_like(noisy) if active is None else active
    return GUMBEL_ARGMAX(jax.lax.stop_gradient(logits), keys, noisy, active, backend=backend)
