"""Mixture of experts: a router chooses a few feed-forward blocks for each token.

Only the chosen experts' weights are read. Pairs (token, chosen expert) are sorted by expert; on a CPU they
are then taken in blocks of pairs of one expert, elsewhere by XLA's grouped product. Both give every pair the
same product with the same expert, so they agree up to rounding.

Why not the grouped product everywhere: on a CPU it multiplies every pair by every expert. Why not gather the
chosen kernels into one array: there the gather alone takes longer than the blocks do.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from .config import ModelError
from .layers import Linear

LARGEST_BLOCK = 128  # pairs; a larger one gains nothing on a CPU


class StackedLinear(nnx.Module):
    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        self.kernel = nnx.Param(jnp.zeros((experts, inputs, outputs)))


class Experts(nnx.Module):
    """Gated feed-forward blocks side by side, `kernel` [experts, in, out]."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        self.gate_proj = StackedLinear(experts, hidden, inner)
        self.up_proj = StackedLinear(experts, hidden, inner)
        self.down_proj = StackedLinear(experts, inner, hidden)

    def __call__(self, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """Σ over a token's choices of weight · expert(x); x `[tokens, hidden]`, else `[tokens, choices]`."""
        kernels = self.gate_proj.kernel[...], self.up_proj.kernel[...], self.down_proj.kernel[...]
        return jax.lax.platform_dependent(x, chosen, weights, *kernels, cpu=in_blocks, default=grouped)


class SparseMLP(nnx.Module):
    """Router and experts in place of one feed-forward block."""

    def __init__(self, hidden: int, inner: int, experts: int, choices: int, normalise: bool) -> None:
        if not (inner > 0 and 0 < choices <= experts):
            raise ModelError(
                f"{choices} of {experts} experts of inner size {inner}; accepted: at least one of each "
                "(num_experts_per_tok, num_local_experts, moe_intermediate_size)"
            )
        self.gate = Linear(hidden, experts)
        self.experts = Experts(experts, hidden, inner)
        self.choices, self.normalise = choices, normalise

    def __call__(self, x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        probabilities = jax.nn.softmax(self.gate(flat).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, self.choices)
        if self.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return self.experts(flat, chosen, weights.astype(x.dtype)).reshape(x.shape)


def grouped(x, chosen, weights, gate, up, down) -> jax.Array:
    """All pairs of an expert in one product, by `jax.lax.ragged_dot`; differentiable."""
    rows, sizes, order = sort_by_expert(x, chosen, gate.shape[0])
    inner = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    return combine(jax.lax.ragged_dot(inner, down, sizes), order, weights)


def in_blocks(x, chosen, weights, gate, up, down) -> jax.Array:
    """Blocks of at most `LARGEST_BLOCK` pairs of one expert, one after the other.

    The number of blocks depends on the choices, so this has no reverse-mode derivative.
    """
    experts = gate.shape[0]
    rows, sizes, order = sort_by_expert(x, chosen, experts)
    mean = -(-chosen.size // experts)
    block = min(1 << (mean - 1).bit_length(), LARGEST_BLOCK)
    rows = jnp.pad(rows, ((0, block), (0, 0)))
    blocks = -(-sizes // block)
    ends, starts = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes

    def advance(number: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= number, dtype=jnp.int32)
        start = starts[expert] + (number - ends[expert] + blocks[expert]) * block
        part = jax.lax.dynamic_slice_in_dim(rows, start, block)
        gate_, up_, down_ = (jax.lax.dynamic_index_in_dim(w, expert, 0, False) for w in (gate, up, down))
        part = (jax.nn.silu(part @ gate_) * (part @ up_)) @ down_
        # What runs over the end of the expert's pairs is overwritten by the next expert's first block.
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, 0)

    out = jax.lax.fori_loop(0, ends[-1], advance, jnp.zeros_like(rows))
    return combine(out[: chosen.size], order, weights)


def sort_by_expert(x: jax.Array, chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Token rows `[pairs, hidden]` in order of their expert, pairs per expert, and that order."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    return x[order // chosen.shape[1]], sizes, order


def combine(rows: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """Undo the sort and sum each token's choices, in their order, so the result is deterministic."""
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return jnp.einsum("tch,tc->th", rows[place].reshape(*weights.shape, -1), weights)
