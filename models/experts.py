"""Mixture of experts: a router selects a few feed-forward blocks (experts) for each token.

Only the weights of selected experts are read. Pairs (token, expert) are sorted by expert. On a CPU they are
processed in blocks of pairs of one expert, elsewhere by XLA's grouped matrix product. Both multiply every
pair by the same expert, so they agree up to rounding.

The grouped product is not used on CPUs because there it multiplies every pair by every expert. Gathering the
selected kernels into one array is not used because the gather alone takes longer than the blocks.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from entropic_jax.mesh import sum_over_shards

from .config import ModelError
from .layers import Linear

LARGEST_BLOCK = 128  # pairs; a larger one gains nothing on a CPU


class StackedLinear(nnx.Module):
    """One matrix per expert, `kernel` [experts, in, out].

    Args:
        experts: how many.
        inputs: width of the input.
        outputs: width of the output.
    """

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        self.kernel = nnx.Param(jnp.zeros((experts, inputs, outputs)))


class Experts(nnx.Module):
    """The gated feed-forward blocks of all experts.

    Args:
        experts: how many.
        hidden: width of input and output.
        inner: width between the two products.
    """

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        self.gate_proj = StackedLinear(experts, hidden, inner)
        self.up_proj = StackedLinear(experts, hidden, inner)
        self.down_proj = StackedLinear(experts, inner, hidden)

    def __call__(self, x: jax.Array, expert_ids: jax.Array, weights: jax.Array) -> jax.Array:
        """Σ over a token's experts of weight · expert(x).

        Args:
            x: `[tokens, hidden]`.
            expert_ids: int32 `[tokens, experts_per_token]`.
            weights: router weights, `[tokens, experts_per_token]`.

        Returns:
            `[tokens, hidden]`.
        """
        kernels = self.gate_proj.kernel[...], self.up_proj.kernel[...], self.down_proj.kernel[...]
        return jax.lax.platform_dependent(x, expert_ids, weights, *kernels, cpu=in_blocks, default=grouped)


class SparseMLP(nnx.Module):
    """Router and experts in the place of a feed-forward block.

    Args:
        hidden: width of input and output.
        inner: width of an expert between its two products.
        experts: how many.
        experts_per_token: that each token is routed to.
        normalise: whether the weights of a token's experts sum to 1.
    """

    def __init__(
        self, hidden: int, inner: int, experts: int, experts_per_token: int, normalise: bool
    ) -> None:
        if not (inner > 0 and 0 < experts_per_token <= experts):
            raise ModelError(
                "num_experts_per_tok, num_local_experts and moe_intermediate_size must be at least 1; "
                f"got {experts_per_token}, {experts} and {inner}"
            )
        self.gate = Linear(hidden, experts)
        self.experts = Experts(experts, hidden, inner)
        self.experts_per_token, self.normalise = experts_per_token, normalise

    def __call__(self, x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        probabilities = jax.nn.softmax(self.gate(flat).astype(jnp.float32), axis=-1)
        weights, expert_ids = jax.lax.top_k(probabilities, self.experts_per_token)
        if self.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        out = sum_over_shards(self.experts(flat, expert_ids, weights.astype(x.dtype)))
        return out.reshape(x.shape)


def grouped(
    x: jax.Array, expert_ids: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """All pairs of an expert in one product, by `jax.lax.ragged_dot`; differentiable.

    Args:
        x: token rows `[tokens, hidden]`.
        expert_ids: int32 `[tokens, experts per token]`.
        weights: `[tokens, experts per token]`, of the experts' outputs.
        gate: `[experts, hidden, inner]`.
        up: `[experts, hidden, inner]`.
        down: `[experts, inner, hidden]`.
    """
    rows, sizes, order = _sort_by_expert(x, expert_ids, gate.shape[0])
    inner = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    return _combine(jax.lax.ragged_dot(inner, down, sizes), order, weights)


def in_blocks(
    x: jax.Array, expert_ids: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Blocks of at most `LARGEST_BLOCK` pairs of one expert, one after the other.

    The number of blocks depends on the routing, so this has no reverse-mode derivative.

    Args:
        x: token rows `[tokens, hidden]`.
        expert_ids: int32 `[tokens, experts per token]`.
        weights: `[tokens, experts per token]`, of the experts' outputs.
        gate: `[experts, hidden, inner]`.
        up: `[experts, hidden, inner]`.
        down: `[experts, inner, hidden]`.
    """
    experts = gate.shape[0]
    rows, sizes, order = _sort_by_expert(x, expert_ids, experts)
    mean = -(-expert_ids.size // experts)
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
        # Rows past the end of the expert's pairs are overwritten by the next expert's first block.
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, 0)

    out = jax.lax.fori_loop(0, ends[-1], advance, jnp.zeros_like(rows))
    return _combine(out[: expert_ids.size], order, weights)


def _sort_by_expert(
    x: jax.Array, expert_ids: jax.Array, experts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Token rows `[pairs, hidden]` sorted by expert, the number of pairs per expert, and the permutation."""
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    return x[order // expert_ids.shape[1]], sizes, order


def _combine(rows: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """Undoes the sort and sums over each token's experts in a fixed order, so the result is deterministic."""
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return jnp.einsum("tch,tc->th", rows[place].reshape(*weights.shape, -1), weights)
