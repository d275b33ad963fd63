"""The entropies that a step needs, from as few passes over the logits as there is a kernel for.

A kernel takes the moments at two temperatures from one pass over the logits; plain JAX takes two passes for
each. Nothing but rounding depends on which of them serves (`pallas.dispatch`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from . import entropy
from .entropy import EntropyStatistics
from .pallas import topk_entropy


def of_step(
    logits: jax.Array, adjusted: jax.Array, changed: jax.Array, temperature: jax.Array, calibration: jax.Array
) -> tuple[EntropyStatistics, EntropyStatistics]:
    """The belief softmax(logits / calibration), and what is sampled from, softmax(adjusted / temperature).

    Logits float32 `[rows, vocabulary]`, temperature `[rows]`, calibration `[]`; changed bool `[]`, whether
    the adjusted logits are others than the logits. Each as `entropy.at_temperature`.
    """
    if kernel(logits) is None:
        return entropy.entropy_statistics(logits / calibration), entropy.at_temperature(adjusted, temperature)
    both = topk_entropy.topk_entropy(logits, 1, temperature, calibration)
    tempered = lax.cond(
        changed, lambda: _tempered(adjusted, temperature), lambda: EntropyStatistics(*both.tempered)
    )
    return EntropyStatistics(*both.calibrated), tempered


def anew(
    adjusted: jax.Array, temperature: jax.Array, before: jax.Array, tempered: EntropyStatistics
) -> EntropyStatistics:
    """`tempered`, which was taken at the temperature `before`, as it is at the temperature `[rows]`."""
    if kernel(adjusted) is None:
        return entropy.at_temperature(adjusted, temperature)  # where T stands, the same expression
    return lax.cond(
        jnp.any(temperature != before), lambda: _tempered(adjusted, temperature), lambda: tempered
    )


def kernel(logits: jax.Array, k: int = 1) -> str | None:
    """The back end, other than plain JAX, that has the k largest logits and the moments in one pass."""
    row = jnp.ones(logits.shape[:1], jnp.float32)
    return topk_entropy.TOPK_ENTROPY.kernel_name(logits, k, row, row)


def _tempered(adjusted: jax.Array, temperature: jax.Array) -> EntropyStatistics:
    return EntropyStatistics(*topk_entropy.topk_entropy(adjusted, 1, temperature).tempered)
