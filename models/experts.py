"""Mixture of experts: a router selects a few feed-forward blocks (experts) for each token.

Pairs (token, expert) are sorted by expert, and each projection is one product of all pairs, each with the
matrix of its expert (`pallas.grouped_matmul`), which reads the experts that were selected.

On a mesh whose devices hold different experts, each computes the pairs of its own for all tokens, and the sum
over the devices adds them up. The other pairs are sorted to the end, where no expert reads them.
"""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from entropic_jax.mesh import EXPERT, TENSOR, first_of_shard, shards_along, sum_over_shards
from entropic_jax.pallas.grouped_matmul import grouped_matmul
from entropic_jax.pallas.silu_and_mul import silu_and_mul

from .activations import FUNCTIONS, clamped_swiglu
from .block_spec import ExpertsSpec
from .config import ModelError
from .layers import MLP, Linear
from .router import ExpertReader, Router


class StackedLinear(nnx.Module):
    """One matrix per expert, `kernel` [experts, in, out]; a quantised one has a `scale`, see `quantisation`.

    Args:
        experts: how many.
        inputs: width of the input.
        outputs: width of the output.
        bias: whether each has one, `bias` [experts, out].
    """

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool = False) -> None:
        self.kernel = nnx.Param(jnp.zeros((experts, inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros((experts, outputs))) if bias else None
        self.scale: nnx.Param | None = nnx.data(None)


class Projections(NamedTuple):
    """The matrices of the experts: those of the gate, those that are gated, those that lead back."""

    kernels: tuple[jax.Array, ...]  # each [matrices, in, out]
    scales: tuple[jax.Array, ...] = ()  # of quantised kernels
    biases: tuple[jax.Array, ...] = ()  # each [experts, out]
    first: jax.Array | int = 0  # matrix of the first expert
    experts: int | None = None  # how many; None for one per matrix


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
        # In a program that scans over layers, matrices are those of all repeats of a layer, of which this is
        # one.
        self.repeat: jax.Array | int | None = nnx.data(None)
        self.repeats = 1

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
        kernels = tuple(layer.kernel[...] for layer in layers)
        biases = tuple(layer.bias[...].astype(x.dtype) for layer in layers if layer.bias is not None)
        if biases and shards_along(TENSOR) > 1:
            # The devices that share an expert add up its outputs, so one of them adds the bias.
            biases = (*biases[:2], jnp.where(first_of_shard(1, TENSOR) == 0, biases[2], 0))
        scales = tuple(layer.scale[...] for layer in layers if layer.scale is not None)
        experts = kernels[0].shape[0] // self.repeats
        first = 0 if self.repeat is None else self.repeat * experts
        return expert_sum(
            x,
            local_numbers(expert_ids, experts),
            weights,
            Projections(kernels, scales, biases, first, experts),
            ExpertRule(self.activation, self.clamp, self.weighted_inputs, all_read),
        )


class ExpertRule(NamedTuple):
    """The operations of an expert besides its products."""

    activation: str = "silu"  # of the gate
    clamp: tuple[float, float] | None = None  # (α, limit) of the clamped SwiGLU, in the place of it
    weighted_inputs: bool = False  # whether weights multiply the experts' inputs instead of their outputs
    all_read: bool = True  # whether every number is that of an expert; a number past the last reads none


def expert_sum(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    projections: Projections,
    rule: ExpertRule | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Σ over a token's experts of weight · expert(x), `[tokens, hidden]`.

    Args:
        x: `[tokens, hidden]`.
        expert_ids: int32 `[tokens, experts per token]`, among the experts of this device.
        weights: `[tokens, experts per token]`.
        projections: the matrices of the experts.
        rule: what else an expert computes; None for that of a Llama.
        backend: the name of the back end of the products; None takes the first that supports the case.
    """
    kernels, scales, biases, first, experts = projections
    experts, rule = kernels[0].shape[0] if experts is None else experts, rule or ExpertRule()
    rows, sizes, order = _sort_by_expert(x, expert_ids, experts)
    weights = weights.astype(x.dtype)
    if rule.weighted_inputs:
        rows, weights = rows * weights.reshape(-1)[order, None], jnp.ones_like(weights)
    added = [jnp.take(bias, expert_ids.reshape(-1)[order], 0, mode="clip") for bias in biases]
    inner = grouped_matmul(rows, sizes, *kernels[:2], scales=scales[:2], first=first, backend=backend)
    if added:
        inner = inner[0] + added[0], inner[1] + added[1]
    gated = gate_product(inner[0], inner[1], rule.activation, rule.clamp)
    (out,) = grouped_matmul(gated, sizes, kernels[2], scales=scales[2:], first=first, backend=backend)
    return _combine(out + added[2] if added else out, order, weights, sizes, rule.all_read)


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
    if clamp is not None:
        return clamped_swiglu(gate, up, *clamp)
    return silu_and_mul(gate, up) if activation == "silu" else FUNCTIONS[activation](gate) * up


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
        out = sum_over_shards(self.experts(flat, expert_ids, weights, reader is None)).reshape(x.shape)
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
    place = place.reshape(weights.shape)
    # Not a product, whose order of summation would depend on the number of tokens.
    parts = (rows[place[:, c]] * weights[:, c, None] for c in range(weights.shape[1]))
    return reduce(jnp.add, parts)
