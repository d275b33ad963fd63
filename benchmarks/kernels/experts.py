"""The experts of a mixture: sorting, three grouped products, and the sum over a token's experts."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax.models.experts import Projections, expert_sum
from entropic_jax.models.quantisation import quantise_kernel
from entropic_jax.pallas import grouped_matmul

from .timing import interleaved_seconds, on_cpu

MOST_RAGGED = 64  # pairs; on CPUs and GPUs XLA's grouped product multiplies each of them by every expert
STEPS = 4  # of other tokens, so that the experts of the last step are not those that a cache holds


class Shape(NamedTuple):
    """Sizes of a layer's experts; weights are random."""

    tokens: int
    experts: int
    per_token: int
    hidden: int
    inner: int
    dtype: str  # of the weights


def shapes(quick: bool) -> list[Shape]:
    """Half of the experts of a layer of Qwen3 30B-A3B: for steps of one row and of several, and a prompt."""
    if quick:
        return [Shape(3, 4, 2, 64, 64, dtype) for dtype in ("float32", "int8")]
    sizes = (64, 8, 2048, 768)
    return [Shape(n, *sizes, dtype) for dtype in ("float32", "bfloat16", "int8") for n in (1, 8, 64, 512)]


def measure(quick: bool, repeat: int) -> Iterator[dict[str, Any]]:
    """Entries of each back end, and of `jax.lax.ragged_dot`; they take turns."""
    for shape in shapes(quick):
        yield from measure_shape(shape, repeat)


def measure_shape(shape: Shape, repeat: int) -> Iterator[dict[str, Any]]:
    """The entries of one shape."""
    projections = random_experts(shape)
    rng = np.random.default_rng(0)
    chosen = [
        [rng.permutation(shape.experts)[: shape.per_token] for _ in range(shape.tokens)] for _ in range(STEPS)
    ]
    x = jnp.asarray(rng.standard_normal((shape.tokens, shape.hidden)), rows_dtype(shape))
    weights = jnp.full((shape.tokens, shape.per_token), 1 / shape.per_token, x.dtype)
    ids = [jnp.asarray(np.stack(step), jnp.int32) for step in chosen]
    read = float(np.mean([len(np.unique(step)) for step in chosen])) / shape.experts
    pairs = jax.ShapeDtypeStruct((shape.tokens * shape.per_token, shape.hidden), x.dtype)
    sizes, first = jnp.zeros(shape.experts, jnp.int32), jnp.int32(0)
    operands = (pairs, sizes, projections.kernels[:2], projections.scales[:2], first)
    reasons = grouped_matmul.GROUPED_MATMUL.decline_reasons(*operands)
    names = [name for name, reason in reasons.items() if reason is None]
    steps = lambda function, experts: partial(_steps, jax.jit(function), x, ids, weights, experts)
    programs: dict[str, Any] = {name: steps(partial(_experts, name), projections) for name in names}
    if all(map(grouped_matmul.reads_blocked, projections.kernels)):  # as engines load them
        blocked = projections._replace(kernels=tuple(map(grouped_matmul.in_blocks, projections.kernels)))
        programs = {"cpu, block by block": steps(partial(_experts, "cpu"), blocked), **programs}
    if shape.tokens * shape.per_token <= MOST_RAGGED and not projections.scales:
        programs["jax.lax.ragged_dot"] = steps(_by_ragged_dot, projections)
    for name, measured in interleaved_seconds(programs, repeat).items():
        size = read * sum(kernel.nbytes for kernel in projections.kernels)
        seconds = [total / STEPS for total in measured]
        yield {"shape": shape._asdict(), "engine": name, "bytes": size, "seconds": seconds}


def _steps(
    step: Callable[..., jax.Array],
    x: jax.Array,
    ids: list[jax.Array],
    weights: jax.Array,
    experts: Projections,
) -> list[jax.Array]:
    """The results of several steps.

    Args:
        step: a compiled step.
        x: the tokens, the same in each step.
        ids: the experts that each step chooses.
        weights: the weights of the experts.
        experts: their matrices.
    """
    return [step(x, chosen, weights, experts) for chosen in ids]


def rows_dtype(shape: Shape) -> str:
    """The dtype of activations: on a CPU float32."""
    return "float32" if on_cpu() or shape.dtype == "float32" else "bfloat16"


def random_experts(shape: Shape) -> Projections:
    """Experts with random weights."""
    sizes = [(shape.hidden, shape.inner)] * 2 + [(shape.inner, shape.hidden)]
    keys = jax.random.split(jax.random.key(0), 3)
    dtype = "bfloat16" if shape.dtype == "int8" else shape.dtype
    draw = lambda key, size: jax.random.normal(key, (shape.experts, *size), dtype) / 32
    kernels = tuple(map(draw, keys, sizes))
    if shape.dtype != "int8":
        return Projections(kernels)
    narrow = [jax.lax.map(quantise_kernel, kernel) for kernel in kernels]
    return Projections(tuple(q for q, _ in narrow), tuple(scale for _, scale in narrow))


def _experts(backend: str, x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Projections) -> Any:
    return expert_sum(x, ids, weights, experts, backend=backend)


def _by_ragged_dot(x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Projections) -> jax.Array:
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.zeros(experts.kernels[0].shape[0], jnp.int32).at[ids.reshape(-1)].add(1)
    gate, up, down = (kernel.astype(x.dtype) for kernel in experts.kernels)
    rows = x[order // ids.shape[1]]
    inner = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    out = jax.lax.ragged_dot(inner, down, sizes) * weights.reshape(-1)[order, None]
    return jnp.zeros_like(x).at[order // ids.shape[1]].add(out)
