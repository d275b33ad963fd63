"""Ledger: entropic time τ of a sequence and its cost C.

The cost of a step follows from the model's shapes, the rows that share its weights and the positions that are
actually read; `Hardware` converts it into seconds. Neither τ nor τ/C should be reported alone: report
quality, ΣH₁ and wall-clock time with them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import Hardware, Ledger
from .cache import ModelShape

# Dense bfloat16 products and main memory of one chip, as published. That of a CPU is a round number for a few
# cores, good for comparing costs in one run: for seconds, measure (`benchmarks.harness.bandwidth`) and pass
# yours.
HARDWARE = {
    "cpu": Hardware(200e9, 25e9),
    "tpu-v4": Hardware(275e12, 1228e9),  # cloud.google.com/tpu/docs/v4
    "tpu-v5e": Hardware(197e12, 819e9),  # cloud.google.com/tpu/docs/v5e
    "tpu-v5p": Hardware(459e12, 2765e9),  # cloud.google.com/tpu/docs/v5p
    "tpu-v6e": Hardware(918e12, 1640e9),  # cloud.google.com/tpu/docs/v6e
    # nvidia.com/en-us/data-center/h100 and h200, SXM: half of the rate that is stated with sparsity.
    "h100": Hardware(989e12, 3.35e12),
    "h200": Hardware(989e12, 4.8e12),
}
DEVICE_KINDS = {  # part of JAX's device kind, and the entry of `HARDWARE`
    "v4": "tpu-v4",
    "v5 lite": "tpu-v5e",
    "v5p": "tpu-v5p",
    "v5": "tpu-v5p",
    "v6": "tpu-v6e",
    "h100": "h100",
    "h200": "h200",
}


def default_hardware() -> Hardware:
    """The entry of `HARDWARE` for JAX's default device; that of a CPU for unknown devices."""
    kind = jax.devices()[0].device_kind.lower()
    return HARDWARE[next((name for part, name in DEVICE_KINDS.items() if part in kind), "cpu")]


class Cost(NamedTuple):
    """Cost of one step; each float32 `[rows]`."""

    flops: jax.Array
    bytes_read: jax.Array  # the row's share of the weights, and its own keys and values
    kv_bytes: jax.Array  # held in the cache, whether read or not
    seconds: jax.Array  # max(flops / peak, bytes_read / bandwidth)


def new_ledger(rows: int) -> Ledger:
    """All sums at zero."""
    zero = jnp.zeros(rows, jnp.float32)
    return Ledger(jnp.zeros(rows, jnp.int32), *(zero,) * 7)


def weights_read(shape: ModelShape, rows: jax.Array | float = 1.0) -> jax.Array:
    """Number of weights that a step reads, float32.

        W + E · ((1 − (1 − s)ⁿ) − s)

    n rows, W weights used for one token, E weights of all experts, of which a token uses the fraction s.
    Without experts this is W. With experts it is the expectation for rows that select experts independently
    and uniformly; rows that agree read less.

    Args:
        shape: sizes of the model.
        rows: n, the rows of the step.

    >>> from .cache import ModelShape
    >>> sizes = dict(layers=1, heads=1, kv_heads=1, head_dim=2, vocabulary=2, hidden=2)
    >>> shape = ModelShape(**sizes, weights=40, expert_weights=80, expert_share=0.25)
    >>> float(weights_read(shape)), float(weights_read(shape, 2.0))
    (40.0, 55.0)
    """
    rows = jnp.asarray(rows, jnp.float32)
    share = shape.expert_share
    touched = jnp.where(rows > 0, (1 - (1 - share) ** rows) - share, 0.0)
    return jnp.float32(shape.weights) + jnp.float32(shape.expert_weights) * touched


def experts_touched(shape: ModelShape, active: jax.Array, fraction: jax.Array) -> jax.Array:
    """Expected number of weights of experts that a step reads, if rows read fractions of what routers choose.

        E (1 − Π_i (1 − s f_i))

    f_i is the fraction of an active row, s and E as in `weights_read`, to which this adds up where every
    fraction is 1.

    Args:
        shape: sizes of the model.
        active: bool `[rows]`.
        fraction: f, float32 `[rows]`.

    >>> from .cache import ModelShape
    >>> sizes = dict(layers=1, heads=1, kv_heads=1, head_dim=2, vocabulary=2, hidden=2)
    >>> shape = ModelShape(**sizes, weights=40, expert_weights=80, expert_share=0.25)
    >>> float(experts_touched(shape, jnp.array([True, False]), jnp.array([0.5, 1.0])))
    10.0
    """
    unread = jnp.where(active, 1 - shape.expert_share * fraction, 1.0)
    return jnp.float32(shape.expert_weights) * (1 - jnp.prod(unread))


def step_cost(
    shape: ModelShape,
    *,
    active: jax.Array,
    positions_read: jax.Array,
    length: jax.Array,
    bytes_per_weight: int | float,
    bytes_per_cache: int | float,
    hardware: Hardware,
    expert_fraction: jax.Array | None = None,
) -> Cost:
    """The cost of decoding one token in each active row.

        FLOPs = 2 W + 4 d g r,            bytes = b_W · W(n) / n + 2 d b_KV r
        held = 2 d b_KV · layers · KV heads · L,   seconds = max(FLOPs / peak, bytes / bandwidth)

    W weights used for one token, W(n) those that n active rows read together (`weights_read`), d = head_dim,
    g = query heads per KV head. A multiply-add counts as two FLOPs. Norms, softmax, sampling and writes are
    not counted. An inactive row costs nothing.

    Args:
        shape: sizes of the model.
        active: bool `[rows]`.
        positions_read: r, float `[rows]`: positions whose K and V are read, summed over layers and KV heads.
        length: L, int `[rows]`, positions held.
        bytes_per_weight: b_W.
        bytes_per_cache: b_KV, per number of K or V.
        hardware: peak FLOP/s and memory bandwidth.
        expert_fraction: float32 `[rows]`, the fraction that was read of the experts that routers choose, None
            for all. W is then smaller by what was not read, and rows share the weights of experts
            (`experts_touched`) in proportion to their fractions.

    Source: Kiruluta 2026 (arXiv 2603.03310). Differs from the paper: C is in roofline seconds.
    """
    rows = jnp.sum(active, dtype=jnp.float32)
    read = jnp.asarray(positions_read, jnp.float32)
    position = 2.0 * shape.head_dim * bytes_per_cache  # bytes of one K and one V of one KV head
    group = shape.heads / shape.kv_heads
    flops = 2.0 * shape.weights + 4.0 * shape.head_dim * group * read
    weights = weights_read(shape, rows) / jnp.maximum(rows, 1.0)
    if expert_fraction is not None:
        chosen = shape.expert_weights * shape.expert_share  # by one token
        share = jnp.where(active, expert_fraction, 0.0)
        flops = flops - 2.0 * chosen * (1 - share)
        touched = experts_touched(shape, active, share) * share / jnp.maximum(share.sum(), 1e-9)
        weights = (shape.weights - chosen) / jnp.maximum(rows, 1.0) + touched
    bytes_read = bytes_per_weight * weights + position * read
    seconds = jnp.maximum(flops / hardware.peak, bytes_read / hardware.bandwidth)
    held = position * shape.layers * shape.kv_heads * jnp.asarray(length, jnp.float32)
    flops, bytes_read, seconds = (jnp.where(active, x, 0.0) for x in (flops, bytes_read, seconds))
    return Cost(flops, bytes_read, held, seconds)


def prefill_seconds(
    shape: ModelShape,
    length: int,
    *,
    bytes_per_weight: int | float,
    bytes_per_cache: int | float,
    hardware: Hardware,
) -> float:
    """The cost of the prefill of a prompt of n tokens alone with dense attention, in roofline seconds.

        FLOPs = 2 W n + 4 d g · layers · KV heads · n (n + 1) / 2,   bytes = b_W · W(n) + 2 d b_KV · held

    Weights are counted once, and keys and values once, as written: a prompt is bound by its FLOPs on every
    machine of `HARDWARE`, so what chunks read again does not matter. Symbols as in `step_cost`.

    Args:
        shape: sizes of the model.
        length: n ≥ 0, tokens of the prompt.
        bytes_per_weight: b_W.
        bytes_per_cache: b_KV, per number of K or V.
        hardware: peak FLOP/s and memory bandwidth.

    >>> from .cache import ModelShape
    >>> shape = ModelShape(layers=1, heads=1, kv_heads=1, head_dim=2, vocabulary=2, hidden=2, weights=50)
    >>> chip = Hardware(peak=100.0, bandwidth=1e9)
    >>> prefill_seconds(shape, 2, bytes_per_weight=4, bytes_per_cache=4, hardware=chip)  # 200 + 24 FLOPs
    2.24
    """
    positions = shape.layers * shape.kv_heads * length * (length + 1) / 2
    flops = 2.0 * shape.weights * length + 4.0 * shape.head_dim * shape.heads / shape.kv_heads * positions
    held = 2.0 * shape.head_dim * bytes_per_cache * shape.layers * shape.kv_heads * length
    read = bytes_per_weight * float(weights_read(shape, float(length))) if length else 0.0
    return float(max(flops / hardware.peak, (read + held) / hardware.bandwidth))


def dense_positions(shape: ModelShape, length: jax.Array) -> jax.Array:
    """Positions that a dense step reads, summed over layers and KV heads; float32 `[rows]`."""
    return shape.layers * shape.kv_heads * jnp.asarray(length, jnp.float32)


def add_step(
    ledger: Ledger, before: jax.Array, after: jax.Array, active: jax.Array, cost: Cost | None = None
) -> Ledger:
    """Adds one step to the running sums.

    τ = Σ max(0, H₁[t−1] − H₁[t]); the first token of a sequence has no predecessor and adds nothing. τ is
    half the total variation plus a boundary term, so anything that alternates the entropy inflates it. It is
    computed on H₁, which no temperature changes, and should never be reported alone. Sums are float32: after
    n steps their relative error is at most n · 6e-8.

    Args:
        ledger: the sums so far.
        before: H₁ of the previous token, nats, `[rows]`.
        after: H₁ of this token, nats, `[rows]`.
        active: bool `[rows]`, the rows that emitted.
        cost: added for every row; None adds nothing.

    Source: Kiruluta 2026 (arXiv 2603.03310), entropic time.
    """
    change = jnp.where(active & (ledger.steps > 0), before - after, 0.0)
    ledger = ledger._replace(
        steps=ledger.steps + active.astype(jnp.int32),
        entropic_time=ledger.entropic_time + jnp.maximum(change, 0.0),
        variation=ledger.variation + jnp.abs(change),
        entropy=ledger.entropy + jnp.where(active, after, 0.0),
    )
    return ledger if cost is None else add_cost(ledger, cost)


def add_cost(ledger: Ledger, cost: Cost) -> Ledger:
    """Adds what a step costs to the running sums.

    Args:
        ledger: the sums so far.
        cost: added for every row.
    """
    return ledger._replace(
        flops=ledger.flops + cost.flops,
        bytes_read=ledger.bytes_read + cost.bytes_read,
        seconds=ledger.seconds + cost.seconds,
        kv_bytes=cost.kv_bytes,
    )


def efficiency(ledger: Ledger) -> jax.Array:
    """dτ/dC so far: entropic time per second of cost, in nats/s `[rows]`; 0 where nothing was spent.

    Not meaningful alone: a sequence whose entropy rises and falls over and over has a high ratio.
    Source: Kiruluta 2026 (arXiv 2603.03310), entropic efficiency.

    >>> float(efficiency(new_ledger(1)._replace(entropic_time=jnp.ones(1), seconds=jnp.full(1, 0.5)))[0])
    2.0
    """
    spent = ledger.seconds > 0
    return jnp.where(spent, ledger.entropic_time / jnp.where(spent, ledger.seconds, 1.0), 0.0)
