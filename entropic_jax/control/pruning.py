"""Pruning laws, the meso scale of the lossy presets: how much attention mass the next step may leave unread.

Every law writes the budget ε, `Action.dropped_mass_limit`: a fixed one, that of the presets, or the less
uncertain the model, the larger ε. The page policy (`attention.page_selection`) turns ε into lists of pages.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..state import Action, Signal
from ..state.pytree import Gain, pytree


class PruningState(NamedTuple):
    """The state of `Pruning`; each `[rows]`."""

    smoothed_entropy: jax.Array  # Ĥ, nats
    num_tokens: jax.Array  # int32, tokens emitted


def limit_at_entropy(
    entropy: jax.Array,
    low_entropy: jax.Array | float,
    high_entropy: jax.Array | float,
    dropped_mass_limit: jax.Array | float,
    lowest_dropped_mass_limit: jax.Array | float = 0.0,
) -> jax.Array:
    """The budget ε at an entropy: ε_min + (ε_max − ε_min) · clip((H_hi − H) / (H_hi − H_lo), 0, 1).

    Args:
        entropy: H, nats, `[rows]`.
        low_entropy: H_lo, nats; ε is ε_max at and below it.
        high_entropy: H_hi > H_lo, nats; ε is ε_min at and above it.
        dropped_mass_limit: ε_max, in [0, 1).
        lowest_dropped_mass_limit: ε_min, in [0, ε_max].

    Returns:
        ε, `[rows]`.

    >>> limit_at_entropy(jnp.array([0.0, 1.0, 2.0, 9.0]), 0.0, 2.0, 0.1).tolist()
    [0.10000000149011612, 0.05000000074505806, 0.0, 0.0]
    """
    fraction = jnp.clip((high_entropy - entropy) / jnp.maximum(high_entropy - low_entropy, 1e-6), 0.0, 1.0)
    return lowest_dropped_mass_limit + (dropped_mass_limit - lowest_dropped_mass_limit) * fraction


def _with_limit(action: Action, dropped_mass_limit: jax.Array) -> Action:
    return action._replace(
        dropped_mass_limit=jnp.asarray(dropped_mass_limit).astype(action.dropped_mass_limit.dtype)
    )


@pytree
class Pruning:
    """Prunes less when uncertain: ε follows a smoothed upper bound of the entropy.

        Ĥ ← max(H_min, Ĥ + smoothing · (H₁ − Ĥ)),   ε* = limit_at_entropy(max(Ĥ, H₁) + ε_H),
        ε ← ε* where ε* ≤ ε,  else ε + min(ε* − ε, rate)  where ε* − ε > hysteresis

    High entropy lowers ε at once; low entropy raises it by at most `rate` a step. A NaN entropy counts as
    full uncertainty. Where ε_min = ε_max ≤ `rate`, ε is fixed after the first `patience` tokens.
    Differentiable almost everywhere.

    Args:
        dropped_mass_limit: ε_max, in [0, 1).
        low_entropy: H_lo, nats; ε is ε_max at and below it.
        high_entropy: H_hi, nats; ε is ε_min at and above it.
        lowest_dropped_mass_limit: ε_min, in [0, ε_max].
        entropy_floor: H_min, nats, the smallest value of Ĥ.
        entropy_error: ε_H, nats, the error bound of the entropy estimate.
        smoothing: weight of the newest token, in (0, 1].
        rate: largest increase of ε in a step.
        hysteresis: increases of ε up to this size are not made.
        patience: tokens at the start of a sequence for which ε is 0.

    Source: Kiruluta 2026 (arXiv 2603.03310), entropy-gated pruning, with its entropy floor H_min and rate
    limit. Differs from the paper: the formula of ε and its constants are ours, since the paper prints none;
    pages are dropped by the *upper* bound Ĥ + ε_H of the entropy, not the lower, so that an error of the
    estimate reads more. Where the entropy is exact, ε_H = 0 and both bounds are the same.
    """

    dropped_mass_limit: Gain = 0.1
    low_entropy: Gain = 0.3
    high_entropy: Gain = 2.5
    lowest_dropped_mass_limit: Gain = 0.0
    entropy_floor: Gain = 0.0
    entropy_error: Gain = 0.0
    smoothing: Gain = 0.5
    rate: Gain = 0.05
    hysteresis: Gain = 0.0
    patience: Gain = 4

    def init(self, action: Action) -> PruningState:
        """See `Controller`."""
        zero = jnp.zeros_like(action.dropped_mass_limit)
        return PruningState(zero, zero.astype(jnp.int32))

    def update(self, signal: Signal, action: Action, state: PruningState) -> tuple[Action, PruningState]:
        """See `Controller`: writes `dropped_mass_limit`."""
        previous = jnp.where(state.num_tokens == 0, signal.entropy, state.smoothed_entropy)
        smoothed = jnp.maximum(previous + self.smoothing * (signal.entropy - previous), self.entropy_floor)
        # A sudden rise of the entropy counts at once, a sudden fall does not.
        upper = jnp.maximum(smoothed, signal.entropy) + self.entropy_error
        target = limit_at_entropy(
            upper,
            self.low_entropy,
            self.high_entropy,
            self.dropped_mass_limit,
            self.lowest_dropped_mass_limit,
        )
        target = jnp.where(jnp.isfinite(upper) & (state.num_tokens >= self.patience), target, 0.0)
        increase = target - action.dropped_mass_limit
        raised = action.dropped_mass_limit + jnp.minimum(increase, self.rate)
        limit = jnp.where(increase > self.hysteresis, raised, action.dropped_mass_limit)
        limit = jnp.where(increase <= 0, target, limit)
        after = PruningState(jnp.where(jnp.isfinite(smoothed), smoothed, previous), state.num_tokens + 1)
        return _with_limit(action, limit), after


@pytree
class FixedPruning:
    """The same ε at every step, top-p over pages: the baseline that an entropy-dependent ε must beat.

    Args:
        dropped_mass_limit: ε, in [0, 1).
    """

    dropped_mass_limit: Gain = 0.05

    def init(self, action: Action) -> tuple[()]:
        """See `Controller`."""
        return ()

    def update(self, signal: Signal, action: Action, state: tuple[()]) -> tuple[Action, tuple[()]]:
        """See `Controller`: writes `dropped_mass_limit`."""
        return _with_limit(action, jnp.ones_like(action.dropped_mass_limit) * self.dropped_mass_limit), state


@pytree
class LinearPruning:
    """ε falls linearly from ε_max at no entropy to 0 at a threshold.

        ε = ε_max · max(0, 1 − H₁ / H_threshold)

    The entropy is neither bounded from above nor smoothed, and ε is not limited in rate: it has none of the
    guards of `Pruning`.

    Args:
        dropped_mass_limit: ε_max, in [0, 1).
        entropy_threshold: H_threshold > 0, nats; at and above it ε is 0.

    Source: ours, formula and constants. Kiruluta 2026 (arXiv 2603.03310) prints no formula for ε; its least
    number of blocks, entropy floor and rate limits are those of `Pruning` and of the page selection.
    """

    dropped_mass_limit: Gain = 0.3
    entropy_threshold: Gain = 2.0

    def init(self, action: Action) -> tuple[()]:
        """See `Controller`."""
        return ()

    def update(self, signal: Signal, action: Action, state: tuple[()]) -> tuple[Action, tuple[()]]:
        """See `Controller`: writes `dropped_mass_limit`."""
        limit = self.dropped_mass_limit * jnp.maximum(0.0, 1 - signal.entropy / self.entropy_threshold)
        return _with_limit(action, jnp.where(jnp.isfinite(limit), limit, 0.0)), state
