"""Mixture of experts: a router selects a few feed-forward blocks (experts) for each token.

Only the weights of selected experts are read. Pairs (token, expert) are sorted by expert. On a CPU they are
processed in blocks of pairs of one expert, elsewhere by XLA's grouped matrix product. Both multiply every
pair by the same expert, so they agree up to rounding.

On a mesh whose devices hold different experts, each computes the pairs of its own for all tokens, and the sum
over the devices adds them up. The other pairs are sorted to the end, where no expert reads them.

The grouped product is not used on CPUs because there it multiplies every pair by every expert. Gathering the
selected kernels into one array is not used because the gather alone takes longer than the blocks.
"""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from entropic_jax.mesh import EXPERT, TENSOR, first_of_shard, shards_along, sum_over_shards

from .activations import FUNCTIONS, clamped_swiglu
from .block_spec import ExpertsSpec, RouterSpec
from .config import ModelError
from .layers import MLP, Linear

LARGEST_BLOCK = 128  # pairs; a larger one gains nothing on a CPU


class ExpertReader(Protocol):
    """Decides how many of the experts that a router chooses are read, layer after layer."""

    def __call__(self, probability: jax.Array, most: int, /) -> jax.Array:
        """The number that each token reads, int32 `[tokens]`, from 1 to `most`.

        Args:
            probability: the probabilities of the router, over all experts, float32 `[tokens, experts]`.
            most: the number that the router chooses.
        """


class StackedLinear(nnx.Module):
    """One matrix per expert, `kernel` [experts, in, out].

    Args:
        experts: how many.
        inputs: width of the input.
        outputs: width of the output.
        bias: whether each has one, `bias` [experts, out].
    """

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool = False) -> None:
        self.kernel = nnx.Param(jnp.zeros((experts, inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros((experts, outputs))) if bias else None


class Experts(nnx.Module):
    """The gated feed-forward blocks of all experts.

    Args:
        hidden: width of input and output.
        spec: how many, their inner width, activation and biases.
    """

    def __init__(self, hidden: int, spec: ExpertsSpec) -> None:
        sizes = (spec.experts, hidden, spec.inner, spec.bias)
        self.gate_proj, self.up_proj = StackedLinear(*sizes), StackedLinear(*sizes)
        self.down_proj = StackedLinear(spec.experts, spec.inner, hidden, spec.bias)
        self.activation, self.clamp = spec.activation, spec.clamp
        self.weighted_inputs = spec.weighted_inputs

    def __call__(
        self, x: jax.Array, expert_ids: jax.Array, weights: jax.Array, all_read: bool = True
    ) -> jax.Array:
        """Σ over a token's experts of weight · expert(x), or of expert(weight · x).

        Args:
            x: `[tokens, hidden]`.
            expert_ids: int32 `[tokens, experts_per_token]`.
            weights: router weights, `[tokens, experts_per_token]`.
            all_read: whether every number is that of an expert; a number past the last reads none.

        Returns:
            `[tokens, hidden]`.
        """
        layers = self.gate_proj, self.up_proj, self.down_proj
        kernels = [layer.kernel[...] for layer in layers]
        biases = [layer.bias[...].astype(x.dtype) for layer in layers if layer.bias is not None]
        if (
            biases and shards_along(TENSOR) > 1
        ):  # the devices that share an expert add up its outputs, so one of them adds the bias
            biases[-1] = jnp.where(first_of_shard(1, TENSOR) == 0, biases[-1], 0)
        expert_ids = local_numbers(expert_ids, kernels[0].shape[0])
        product = partial(gate_product, activation=self.activation, clamp=self.clamp)
        rule = {"product": product, "weighted_inputs": self.weighted_inputs, "all_read": all_read}
        ways = (partial(way, **rule) for way in (in_blocks, grouped))
        return jax.lax.platform_dependent(
            x, expert_ids, weights, *kernels, *biases, **dict(zip(("cpu", "default"), ways, strict=True))
        )


def gate_product(
    gate: jax.Array, up: jax.Array, activation: str = "silu", clamp: tuple[float, float] | None = None
) -> jax.Array:
    """The product of an expert's two inner projections.

    Args:
        gate: `[tokens, inner]`.
        up: `[tokens, inner]`.
        activation: the activation of the gate.
        clamp: (α, limit) of the clamped SwiGLU, which takes the place of the activation.
    """
    return FUNCTIONS[activation](gate) * up if clamp is None else clamped_swiglu(gate, up, *clamp)


class Router(Linear):
    """Chooses the experts of each token, and their weights.

    Args:
        hidden: width of the input.
        experts: how many.
        per_token: the number of experts that each token is routed to.
        spec: how they are scored.
    """

    def __init__(self, hidden: int, experts: int, per_token: int, spec: RouterSpec) -> None:
        super().__init__(hidden, experts, spec.bias)
        self.e_score_correction_bias = nnx.Param(jnp.zeros(experts)) if spec.correction else None
        self.per_token, self.spec = per_token, spec

    def __call__(self, x: jax.Array, reader: ExpertReader | None = None) -> tuple[jax.Array, jax.Array]:
        """Weights and numbers of the experts of tokens `[tokens, hidden]`; each `[tokens, per_token]`.

        An expert that the reader leaves out has weight 0 and a number past the last. Where the weights of a
        token's experts sum to one, those of the experts that are read do.
        """
        spec, logits = self.spec, super().__call__(x).astype(jnp.float32)
        score = jax.nn.sigmoid if spec.scores == "sigmoid" else partial(jax.nn.softmax, axis=-1)
        if spec.by_logit:
            chosen, expert_ids = jax.lax.top_k(logits, self.per_token)
            if reader is not None:
                chosen, expert_ids = self.read_by(reader, logits, chosen, expert_ids, -jnp.inf)
            return score(chosen), expert_ids
        scores = score(logits)
        if self.e_score_correction_bias is None and spec.groups == 1:
            weights, expert_ids = jax.lax.top_k(scores, self.per_token)
        else:
            _, expert_ids = jax.lax.top_k(self.eligible(scores), self.per_token)
            weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
        if reader is not None:
            weights, expert_ids = self.read_by(reader, logits, weights, expert_ids, 0.0)
        if spec.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return (weights if spec.scale == 1.0 else weights * spec.scale), expert_ids

    def read_by(
        self, reader: ExpertReader, logits: jax.Array, chosen: jax.Array, expert_ids: jax.Array, unread: float
    ) -> tuple[jax.Array, jax.Array]:
        """Scores and numbers of a token's experts, the best first, without those that are not read.

        Args:
            reader: decides how many are read.
            logits: `[tokens, experts]`.
            chosen: the scores of those that are chosen, `[tokens, per_token]`.
            expert_ids: their numbers.
            unread: the score of an expert that is not read.
        """
        experts = logits.shape[-1]
        if self.spec.scores == "sigmoid":
            scores = jax.nn.sigmoid(logits)
            probability = scores / scores.sum(axis=-1, keepdims=True)
        else:
            probability = jax.nn.softmax(logits, axis=-1)
        read = jnp.arange(self.per_token) < reader(probability, self.per_token)[:, None]
        return jnp.where(read, chosen, unread), jnp.where(read, expert_ids, experts)

    def eligible(self, scores: jax.Array) -> jax.Array:
        """Scores by which experts are chosen: corrected, and −inf outside a token's best groups."""
        spec = self.spec
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias[...].astype(jnp.float32)
        if spec.groups == 1:
            return scores
        by_group = scores.reshape(scores.shape[0], spec.groups, -1)
        best = jax.lax.top_k(by_group, min(spec.group_score, by_group.shape[-1]))[0].sum(-1)
        _, groups = jax.lax.top_k(best, spec.groups_per_token)
        kept = jax.nn.one_hot(groups, spec.groups, dtype=bool).any(1)
        return jnp.where(kept[:, :, None], by_group, -jnp.inf).reshape(scores.shape)


class SparseMLP(nnx.Module):
    """Router and experts in the place of a feed-forward block.

    Args:
        hidden: width of input and output.
        spec: sizes of the experts, the router, the expert that all tokens share.
    """

    def __init__(self, hidden: int, spec: ExpertsSpec) -> None:
        if not (spec.inner > 0 and 0 < spec.per_token <= spec.experts):
            raise ModelError(
                "num_experts_per_tok, num_local_experts and moe_intermediate_size must be at least 1; "
                f"got {spec.per_token}, {spec.experts} and {spec.inner}"
            )
        self.gate = Router(hidden, spec.experts, spec.per_token, spec.router)
        self.experts = Experts(hidden, spec)
        self.shared_expert = MLP(hidden, spec.shared) if spec.shared is not None else None
        self.shared_expert_gate = Linear(hidden, 1) if spec.shared_gate else None
        self.expert_reader: ExpertReader | None = None  # of a pass; None reads `per_token` experts

    def __call__(self, x: jax.Array) -> jax.Array:
        flat, reader = x.reshape(-1, x.shape[-1]), self.expert_reader
        weights, expert_ids = self.gate(flat, reader)
        rows = flat.astype(self.experts.gate_proj.kernel.dtype)
        out = self.experts(rows, expert_ids, weights.astype(rows.dtype), reader is None).astype(x.dtype)
        out = sum_over_shards(out).reshape(x.shape)
        if self.shared_expert is None:
            return out
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = jax.nn.sigmoid(self.shared_expert_gate(x)) * shared
        return out + shared


def local_numbers(expert_ids: jax.Array, experts: int) -> jax.Array:
    """Numbers of experts among those that this device holds; those that it does not are past the end.

    Args:
        expert_ids: among all experts.
        experts: the number of experts that each device holds.
    """
    if shards_along(EXPERT) == 1:
        return expert_ids
    local = expert_ids - first_of_shard(experts, EXPERT)
    return jnp.where((local >= 0) & (local < experts), local, experts)


def grouped(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *biases: jax.Array,
    product: Any = gate_product,
    weighted_inputs: bool = False,
    all_read: bool = True,
) -> jax.Array:
    """All pairs of an expert in one product, by `jax.lax.ragged_dot`; differentiable.

    Args:
        x: token rows `[tokens, hidden]`.
        expert_ids: int32 `[tokens, experts per token]`.
        weights: `[tokens, experts per token]`.
        gate: `[experts, hidden, inner]`.
        up: `[experts, hidden, inner]`.
        down: `[experts, inner, hidden]`.
        *biases: the biases of the three, `[experts, inner]` or `[experts, hidden]`, where they have any.
        product: the product of the two inner projections; see `gate_product`.
        weighted_inputs: whether weights multiply the experts' inputs instead.
        all_read: whether every number is that of an expert; a number past the last reads none.
    """
    rows, sizes, order = _sort_by_expert(x, expert_ids, gate.shape[0])
    if weighted_inputs:
        rows, weights = rows * weights.reshape(-1)[order, None], jnp.ones_like(weights)
    added = [jnp.take(bias, expert_ids.reshape(-1)[order], 0, mode="clip") for bias in biases] or [None] * 3
    plus = lambda y, bias: y if bias is None else y + bias
    gated, raised = (
        plus(jax.lax.ragged_dot(rows, w, sizes), b) for w, b in zip((gate, up), added[:2], strict=True)
    )
    out = plus(jax.lax.ragged_dot(product(gated, raised), down, sizes), added[2])
    return _combine(out, order, weights, sizes, all_read)


def in_blocks(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *biases: jax.Array,
    product: Any = gate_product,
    weighted_inputs: bool = False,
    all_read: bool = True,
) -> jax.Array:
    """Blocks of at most `LARGEST_BLOCK` pairs of one expert, one after the other.

    The number of blocks depends on the routing, so this has no reverse-mode derivative.

    Args:
        x: token rows `[tokens, hidden]`.
        expert_ids: int32 `[tokens, experts per token]`.
        weights: `[tokens, experts per token]`.
        gate: `[experts, hidden, inner]`.
        up: `[experts, hidden, inner]`.
        down: `[experts, inner, hidden]`.
        *biases: the biases of the three, `[experts, inner]` or `[experts, hidden]`, where they have any.
        product: the product of the two inner projections; see `gate_product`.
        weighted_inputs: whether weights multiply the experts' inputs instead.
        all_read: whether every number is that of an expert; a number past the last reads none.
    """
    experts = gate.shape[0]
    rows, sizes, order = _sort_by_expert(x, expert_ids, experts)
    if weighted_inputs:
        rows, weights = rows * weights.reshape(-1)[order, None], jnp.ones_like(weights)
    mean = -(-expert_ids.size // (experts * shards_along(EXPERT)))
    block = min(1 << (mean - 1).bit_length(), LARGEST_BLOCK)
    rows = jnp.pad(rows, ((0, block), (0, 0)))
    blocks = -(-sizes // block)
    ends, starts = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes

    def advance(number: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= number, dtype=jnp.int32)
        start = starts[expert] + (number - ends[expert] + blocks[expert]) * block
        part = jax.lax.dynamic_slice_in_dim(rows, start, block)
        gate_, up_, down_ = (jax.lax.dynamic_index_in_dim(w, expert, 0, False) for w in (gate, up, down))
        added = [jax.lax.dynamic_index_in_dim(b, expert, 0, False) for b in biases]
        gated, raised = part @ gate_, part @ up_
        if added:
            gated, raised = gated + added[0], raised + added[1]
        part = product(gated, raised) @ down_
        part = part + added[2] if added else part
        # Rows past the end of the expert's pairs are overwritten by the next expert's first block.
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, 0)

    out = jax.lax.fori_loop(0, ends[-1], advance, jnp.zeros_like(rows))
    return _combine(out[: expert_ids.size], order, weights, sizes, all_read)


def _sort_by_expert(
    x: jax.Array, expert_ids: jax.Array, experts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Token rows `[pairs, hidden]` sorted by expert, the number of pairs per expert, and the permutation."""
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    return x[order // expert_ids.shape[1]], sizes, order


def _combine(
    rows: jax.Array, order: jax.Array, weights: jax.Array, sizes: jax.Array, all_read: bool
) -> jax.Array:
    """Undoes the sort and sums over each token's experts in a fixed order, so the result is deterministic.

    Args:
        rows: outputs of the pairs `[pairs, hidden]`, sorted by expert.
        order: the permutation that sorted them.
        weights: `[tokens, experts per token]`, of the outputs.
        sizes: number of pairs of each of this device's experts.
        all_read: whether every pair has an expert.
    """
    # Rows of pairs without an expert, or with that of another device, hold anything.
    if shards_along(EXPERT) > 1 or not all_read:
        rows = jnp.where(jnp.arange(rows.shape[0])[:, None] < sizes.sum(), rows, 0)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return jnp.einsum("tch,tc->th", rows[place].reshape(*weights.shape, -1), weights)
