"""Meso: how much attention mass the next step may leave unread, from how certain the model is now."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..state import Action, Signal
from .controller import pytree


class Confidence(NamedTuple):
    """What a pruning law remembers; each `[rows]`."""

    entropy: jax.Array  # smoothed H₁, nats
    seen: jax.Array  # int32, steps


def opening(
    entropy: jax.Array,
    low_entropy: jax.Array | float,
    high_entropy: jax.Array | float,
    dropped_mass_limit: jax.Array | float,
    lowest_dropped_mass_limit: jax.Array | float = 0.0,
) -> jax.Array:
    """ε = ε_min + (ε_max − ε_min) · clip((H_hi − H) / (H_hi − H_lo), 0, 1).

    >>> opening(jnp.array([0.0, 1.0, 2.0, 9.0]), 0.0, 2.0, 0.1).tolist()
    [0.10000000149011612, 0.05000000074505806, 0.0, 0.0]
    """
    share = (high_entropy - entropy) / jnp.maximum(high_entropy - low_entropy, 1e-6)
    return lowest_dropped_mass_limit + (dropped_mass_limit - lowest_dropped_mass_limit) * jnp.clip(
        share, 0.0, 1.0
    )


@pytree
class Pruning:
    """Prune only when confidently certain: ε(H) from a smoothed upper bound of the entropy.

        Ĥ ← max(H_min, Ĥ + smoothing · (H₁ − Ĥ)),   ε* = opening(Ĥ + ε_H),
        ε ← ε* where ε* is closer to 0,  else ε + min(ε* − ε, rate)  where ε* − ε > hysteresis

    H₁ of a token that was hard to predict closes ε at once; certainty opens it by at most `rate` a step, and
    changes of less than `hysteresis` are left alone. Entropies in nats, ε in [0, most]. The first `patience`
    tokens of a sequence read everything. NaN counts as full uncertainty. Differentiable almost everywhere.

    Source: Kiruluta 2026 (arXiv 2603.03310), entropy-gated pruning. Differs from the paper: pages are dropped
    below the *upper* bound Ĥ + ε_H of the entropy, not the lower: an error of the estimate reads more.
    """

    dropped_mass_limit: Any = 0.1  # ε_max
    low_entropy: Any = 0.3  # H_lo: at and below, ε_max
    high_entropy: Any = 2.5  # H_hi: at and above, ε_min
    lowest_dropped_mass_limit: Any = 0.0  # ε_min
    entropy_floor: Any = 0.0  # H_min
    entropy_error: Any = 0.0  # ε_H, of the estimate of H₁
    smoothing: Any = 0.5
    rate: Any = 0.05
    hysteresis: Any = 0.0
    patience: Any = 4

    def init(self, action: Action) -> Confidence:
        zero = jnp.zeros_like(action.dropped_mass_limit)
        return Confidence(zero, zero.astype(jnp.int32))

    def update(self, signal: Signal, action: Action, state: Confidence) -> tuple[Action, Confidence]:
        fresh = jnp.where(state.seen == 0, signal.entropy, state.entropy)
        mean = jnp.maximum(fresh + self.smoothing * (signal.entropy - fresh), self.entropy_floor)
        # A sudden doubt is believed at once, a sudden certainty is not.
        doubt = jnp.maximum(mean, signal.entropy) + self.entropy_error
        wanted = opening(
            doubt,
            self.low_entropy,
            self.high_entropy,
            self.dropped_mass_limit,
            self.lowest_dropped_mass_limit,
        )
        wanted = jnp.where(jnp.isfinite(doubt) & (state.seen >= self.patience), wanted, 0.0)
        more = wanted - action.dropped_mass_limit
        opened = action.dropped_mass_limit + jnp.minimum(more, self.rate)
        dropped_mass_limit = jnp.where(
            more <= 0, wanted, jnp.where(more > self.hysteresis, opened, action.dropped_mass_limit)
        )
        after = Confidence(jnp.where(jnp.isfinite(mean), mean, fresh), state.seen + 1)
        return action._replace(
            dropped_mass_limit=dropped_mass_limit.astype(action.dropped_mass_limit.dtype)
        ), after


@pytree
class FixedPruning:
    """ε is the same at every step: top-p over pages, what entropy must beat. ε in [0, 1)."""

    dropped_mass_limit: Any = 0.05

    def init(self, action: Action) -> tuple[()]:
        return ()

    def update(self, signal: Signal, action: Action, state: tuple[()]) -> tuple[Action, tuple[()]]:
        return action._replace(
            dropped_mass_limit=jnp.full_like(action.dropped_mass_limit, 1.0) * self.dropped_mass_limit
        ), state


@pytree
class PaperPruning:
    """As printed: the share of blocks dropped grows as the entropy falls below a threshold, without guards.

        ε = most · max(0, 1 − H̃ / threshold)

    with H̃ the entropy itself, neither bounded from above, smoothed nor limited in rate. Kept for comparison.

    Source: Kiruluta 2026 (arXiv 2603.03310), entropy-gated pruning.
    """

    dropped_mass_limit: Any = 0.3
    entropy_threshold: Any = 2.0  # nats

    def init(self, action: Action) -> tuple[()]:
        return ()

    def update(self, signal: Signal, action: Action, state: tuple[()]) -> tuple[Action, tuple[()]]:
        dropped_mass_limit = self.dropped_mass_limit * jnp.maximum(
            0.0, 1 - signal.entropy / self.entropy_threshold
        )
        dropped_mass_limit = jnp.where(jnp.isfinite(dropped_mass_limit), dropped_mass_limit, 0.0)
        return action._replace(
            dropped_mass_limit=dropped_mass_limit.astype(action.dropped_mass_limit.dtype)
        ), state
