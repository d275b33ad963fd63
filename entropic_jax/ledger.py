"""Entropic time: the uncertainty that a sequence has resolved so far."""

import jax.numpy as jnp

from .state import Ledger


def open_ledger(rows: int) -> Ledger:
    """All sums at zero."""
    zero = jnp.zeros(rows, jnp.float32)
    return Ledger(jnp.zeros(rows, jnp.int32), zero, zero, zero)


def post(ledger: Ledger, before, after, active) -> Ledger:
    """Enter one step: the entropy H₁ before and after it, in nats `[rows]`, for the rows that emitted.

    τ = Σ max(0, H₁[t−1] − H₁[t]); the first token of a sequence has no predecessor and adds nothing.
    τ is half the total variation plus a boundary term and can be gamed by anything that alternates the
    entropy, so it is computed on H₁, which no temperature moves, and is never to be reported alone.

    Source: Kiruluta 2026 (arXiv 2603.03310), entropic time.
    """
    change = jnp.where(active & (ledger.steps > 0), before - after, 0.0)
    return Ledger(
        ledger.steps + active.astype(jnp.int32),
        ledger.entropic_time + jnp.maximum(change, 0.0),
        ledger.variation + jnp.abs(change),
        ledger.entropy + jnp.where(active, after, 0.0),
    )
