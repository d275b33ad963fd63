"""Entropy moments: log-sum-exp and moments of ln p under softmax(z / T), for entropy and varentropy.

With d = (z − max z) / T and p = softmax(d), every back end of `entropy_moments` computes

    log_total = ln Σ exp d,   mean = Σ p d,   square = Σ p d²

so that H = log_total − mean and V = square − mean². The contract:

Args:
    logits: float32 `[rows, vocabulary]`. Masked tokens (−inf) do not count.
    inverse_temperature: float32 `[rows]`, 1 / T > 0.
    active: bool `[rows]`. The moments of other rows are 0; a back end need not read them.

Returns:
    `Moments`, each float32 `[rows]`; `highest` is max z. For a row that is not a distribution (all tokens
    masked, a +inf or a NaN) `highest` is 0, `log_total` is max z, `mean` and `square` are NaN.

Raises:
    NotImplementedError: a back end does not support the case; the message is the reason.
"""

import jax
import jax.numpy as jnp

from ..dispatch import Operation
from . import cpu, reference
from .reference import Moments

__all__ = ["Moments", "entropy_moments"]

ENTROPY_MOMENTS = Operation("entropy_moments", {"cpu": cpu.entropy_moments, "xla": reference.entropy_moments})


def entropy_moments(
    logits: jax.Array, inverse_temperature: jax.Array, active: jax.Array | None = None
) -> Moments:
    """The moments of logits `[..., vocabulary]` at `[...]`, each `[...]`; see the package's docstring.

    Args:
        logits: float32 `[..., vocabulary]`.
        inverse_temperature: float32 `[...]`, 1 / T > 0.
        active: bool `[...]`; None if every row is.
    """
    leading = logits.shape[:-1]
    active = jnp.ones(leading, bool) if active is None else active
    moments = _entropy_moments(
        logits.reshape(-1, logits.shape[-1]), inverse_temperature.reshape(-1), active.reshape(-1)
    )
    return Moments(*(x.reshape(leading) for x in moments))


@jax.custom_jvp
def _entropy_moments(logits, inverse_temperature, active):
    return ENTROPY_MOMENTS(logits, inverse_temperature, active)


@_entropy_moments.defjvp
def _derivative(primals, tangents):
    return jax.jvp(reference.entropy_moments, primals, tangents)
