"""Relative temperature law, measured beside the shipped ones: acts on outliers among tokens and entropies."""

from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax.control import pytree
from entropic_jax.control.temperature_bounds import upper_bound
from entropic_jax.control.temperature_solver import SMALLEST, solve_temperature
from entropic_jax.entropy import at_temperature
from entropic_jax.state import Action, Signal

OUTLIER = 2.0  # standard deviations above its expectation, from which on an entropy is brought down


@pytree
class Relative:
    """Excludes tokens of outlying surprisal, and cools where the entropy is an outlier.

        Ĥ = H* + ρ (H₁[t−1] − H*)
        T = clip(T : H(softmax(z / T)) = Ĥ + 2 σ, T_min, T_max)
        tokens with −ln softmax(z / T) > H_T + k √V_T are excluded

    The surprisal of a token has the mean H_T and the variance V_T, so k counts standard deviations. T_max is
    the requested temperature. Before the first token, Ĥ is H*.

    Args:
        target_entropy: H*, nats, to which the expectation reverts.
        surprisal_deviations: k ≥ 0.
        correlation: ρ, in (−1, 1), of the entropies of consecutive tokens.
        scale: σ ≥ 0, nats, of what the expectation leaves unexplained.
        lowest_temperature: T_min > 0.

    Source: the AR(1) expectation is that of `control.entropy_drop`; a truncation that follows the entropy is
    η-sampling, Hewitt et al. 2022, arXiv 2210.15191, which excludes tokens below min(ε, √ε exp(−H)).
    """

    target_entropy: Any
    surprisal_deviations: Any = 0.75
    correlation: Any = 0.2
    scale: Any = 1.5
    lowest_temperature: Any = 0.3

    def init(self, action: Action) -> jax.Array:
        """See `Controller`: H₁[t−1] − H* of each row, 0 before the first token."""
        return jnp.zeros_like(action.temperature)

    def update(self, signal: Signal, action: Action, state: jax.Array) -> tuple[Action, jax.Array]:
        """See `Controller`: writes `temperature` and `surprisal_limit`."""
        logits = signal.logits
        assert logits is not None
        expected = self.target_entropy + self.correlation * state + OUTLIER * self.scale
        highest = upper_bound(0.0, signal)
        lowest = jnp.minimum(self.lowest_temperature, highest)
        target = jnp.broadcast_to(jnp.maximum(expected, 0.0), highest.shape)
        temperature = solve_temperature(logits, target, highest, lowest, highest)
        current = at_temperature(logits, temperature)
        deviation = jnp.sqrt(jnp.maximum(current.varentropy, SMALLEST))
        limit = current.entropy + self.surprisal_deviations * deviation
        action = action._replace(temperature=temperature, surprisal_limit=limit)
        return action, signal.entropy - self.target_entropy
