"""Entropies of a step: of the belief and of the distribution sampled from, in as few passes as possible.

A kernel measures both in one pass over the logits; plain JAX takes two passes for each. The results differ by
rounding only, whichever serves (`pallas.dispatch`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from .. import entropy
from ..entropy import EntropyStatistics
from ..pallas import topk_entropy


def measure(
    logits: jax.Array,
    processed: jax.Array,
    changed: jax.Array,
    temperature: jax.Array,
    belief_temperature: jax.Array,
    active: jax.Array,
) -> tuple[EntropyStatistics, EntropyStatistics]:
    """Entropy statistics of the belief and of the distribution sampled from.

    Args:
        logits: the logits of the model, float32 `[rows, vocabulary]`. The belief is softmax(logits / T_cal).
        processed: after penalties and constraints. softmax(processed / T) is sampled from.
        changed: bool `[]`, whether the two may differ.
        temperature: T, float32 `[rows]`.
        belief_temperature: T_cal, float32 `[]`.
        active: bool `[rows]`; other rows need not be measured.

    Returns:
        The two, each as `entropy.at_temperature`.
    """
    if kernel(logits) is None:
        belief = entropy.entropy_statistics(logits / belief_temperature, active)
        return belief, entropy.at_temperature(processed, temperature, active)
    both = topk_entropy.topk_entropy(logits, 1, temperature, belief_temperature)
    tempered = lax.cond(
        changed, lambda: _measure_tempered(processed, temperature), lambda: EntropyStatistics(*both.tempered)
    )
    return EntropyStatistics(*both.calibrated), tempered


def remeasure(
    processed: jax.Array,
    temperature: jax.Array,
    before: jax.Array,
    tempered: EntropyStatistics,
    active: jax.Array,
) -> EntropyStatistics:
    """Statistics of softmax(processed / temperature), given those at the temperature `before`.

    Args:
        processed: logits, float32 `[rows, vocabulary]`.
        temperature: float32 `[rows]`, in force now.
        before: float32 `[rows]`, the temperature at which `tempered` was measured.
        tempered: statistics at that temperature, returned where no row's temperature has changed.
        active: bool `[rows]`; other rows need not be measured.
    """
    if kernel(processed) is None:
        # The compiler merges it with that of `measure` where T stands.
        return entropy.at_temperature(processed, temperature, active)
    return lax.cond(
        jnp.any(temperature != before), lambda: _measure_tempered(processed, temperature), lambda: tempered
    )


def kernel(logits: jax.Array, k: int = 1) -> str | None:
    """The back end, other than plain JAX, that has the k largest logits and the moments in one pass."""
    row = jnp.ones(logits.shape[:1], jnp.float32)
    return topk_entropy.TOPK_ENTROPY.kernel_name(logits, k, row, row)


def _measure_tempered(processed: jax.Array, temperature: jax.Array) -> EntropyStatistics:
    return EntropyStatistics(*topk_entropy.topk_entropy(processed, 1, temperature).tempered)
