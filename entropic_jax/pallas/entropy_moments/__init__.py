"""The moments of −ln p under softmax(z / T), from which entropy and varentropy follow.

Contract of every back end of `moments(logits, inverse_temperature)`: logits float32 `[rows, vocabulary]`,
inverse_temperature float32 `[rows]`, > 0, returns `Moments`, float32 `[rows]` each. With d = (z − max z) / T:

    log_total = ln Σ exp d,   mean = Σ p d,   square = Σ p d²

and `highest` is max z. Masked tokens (−inf) count for nothing. Where there is no distribution (all masked,
one +inf or NaN), `highest` is 0, log_total is max z, mean and square are NaN.
"""

import jax

from ..dispatch import Operation
from . import cpu, reference
from .reference import Moments

__all__ = ["Moments", "moments"]

MOMENTS = Operation("moments", {"cpu": cpu.moments, "xla": reference.moments})


def moments(logits: jax.Array, inverse_temperature: jax.Array) -> Moments:
    """The moments of logits `[..., vocabulary]` at `[...]`, each `[...]`; see the package."""
    leading = logits.shape[:-1]
    found = _moments(logits.reshape(-1, logits.shape[-1]), inverse_temperature.reshape(-1))
    return Moments(*(x.reshape(leading) for x in found))


@jax.custom_jvp
def _moments(logits, inverse_temperature):
    return MOMENTS(logits, inverse_temperature)


@_moments.defjvp
def _derivative(primals, tangents):
    return jax.jvp(reference.moments, primals, tangents)
