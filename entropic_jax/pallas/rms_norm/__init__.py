"""RMS normalisation: x / rms(x) · weight over the last axis, the mean square taken in float32.

`rms_norm(x, weight, epsilon)` computes

    y = x / √(mean(x²) + ε) · weight

The contract:

Args:
    x: `[rows, size]`.
    weight: `[size]`.
    epsilon: ε, static.

Returns:
    `[rows, size]` in the dtype of x. With the back end `cpu`, each row of the result depends, bit for bit, on
    the same row of x alone, not on the number of rows.

Raises:
    NotImplementedError: a back end does not support the case; the message is the reason.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019; arXiv 1910.07467), equation 4.
"""

from functools import partial

import jax

from ..dispatch import Operation
from . import cpu, reference

__all__ = ["rms_norm"]

RMS_NORM = Operation("rms_norm", {"cpu": cpu.rms_norm, "xla": reference.rms_norm})


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float, *, backend: str | None = None) -> jax.Array:
    """Normalise x over its last axis.

    Args:
        x: `[..., size]`.
        weight: `[size]`.
        epsilon: ε, added to the mean square.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        `[..., size]` in the dtype of x. Derivatives are those of the plain formula.
    """
    return _rms_norm(backend, epsilon, x.reshape(-1, x.shape[-1]), weight).reshape(x.shape)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _rms_norm(backend, epsilon, x, weight):
    return RMS_NORM(x, weight, epsilon, backend=backend)


@_rms_norm.defjvp
def _derivative(_backend, epsilon, primals, tangents):
    return jax.jvp(lambda x, weight: reference.rms_norm(x, weight, epsilon), primals, tangents)
