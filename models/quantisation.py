"""Weight quantisation: matrices of fewer bits with scales, which are widened as they are multiplied.

    int8      w[i, c] ≈ s[c] q[i, c],   s[c] = max |w[:, c]| / 127,   q = round(w / s)
    fp8       the same in E4M3, s[c] = max |w[:, c]| / 448
    int4      w[i, c] ≈ s[g, c] q[i, c],   −8 ≤ q ≤ 7,   for each group g of 32 inputs
    int4-128  the same with groups of 128

The scale of a group is the one of `CANDIDATES` that leaves the smallest squared error. The embedding becomes
int8 with a scale per token, and so does the output projection except under fp8, which makes it E4M3. Norms,
biases and routers keep their dtype, and so do activations and the KV cache. Products read the narrow weights
as they are (`pallas.skinny_matmul`, and `pallas.grouped_matmul` those of experts).
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .config import ModelError
from .embedding import EMBEDDING_MODULE, Embedding
from .experts import StackedLinear
from .layers import Linear
from .router import Router

LARGEST, LARGEST_FP8 = 127, 448
FP8 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class WeightScheme:
    """How the matrices of a quantised model are stored."""

    dtype: Any  # of a kernel; uint8: two numbers of 4 bits in a byte
    group: int | None = None  # inputs that share a scale; None: all of a column


INT8 = WeightScheme(jnp.int8)
SCHEMES = {
    "int8": INT8,
    "int4": WeightScheme(jnp.uint8, 32),
    "int4-128": WeightScheme(jnp.uint8, 128),
    "fp8": WeightScheme(FP8),
}
QUANTIZATIONS = tuple(SCHEMES)
HEAD = "lm_head"  # the output projection, which is never narrower than 8 bits
# Matrices that are not only multiplied by rows, and one of a single column.
KEPT = ("kv_b_proj", "shared_expert_gate")
# Scales of a group as multiples of its largest element / 8, with either sign.
CANDIDATES = tuple(sign * factor for factor in np.linspace(0.6, 1.2, 25) for sign in (1.0, -1.0))


def stored_dtype(path: tuple[Any, ...], leaf: Any, dtype: Any) -> Any:
    """The dtype of an array of a model that is loaded in a dtype.

    Args:
        path: the path of the array in the shapes of a model's parameters, quantised or not.
        leaf: its shape.
        dtype: the dtype of the weights that are not quantised.
    """
    of_kernel = path[-1].key == "scale" and path[0].key != EMBEDDING_MODULE
    return leaf.dtype if of_kernel or leaf.dtype != jnp.float32 else dtype


def check_quantization(quantization: str | None) -> str | None:
    """The name of a quantisation, or None. Raises ModelError for another."""
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ModelError(f"quantization must be {', '.join(QUANTIZATIONS)} or None; got {quantization!r}")
    return quantization


class Int8Kernel(NamedTuple):
    """A matrix [in, out] that is int8 on disk, and the scale of its columns; a leaf while Params are read."""

    kernel: jax.Array
    scale: jax.Array


AnyModule = TypeVar("AnyModule", bound=nnx.Module)


def quantise_module(module: AnyModule, quantization: str) -> AnyModule:
    """The module with the parameters of quantised matrices: narrow kernels, and their scales.

    Args:
        module: not quantised.
        quantization: one of `QUANTIZATIONS`.

    Raises:
        ModelError: groups do not divide the inputs of a matrix.
    """
    for path, part in list(nnx.iter_modules(module)):
        matrix = isinstance(part, (Linear, StackedLinear)) and not isinstance(part, Router)
        if matrix and path[-1] not in KEPT:
            scheme = SCHEMES[quantization]
            scheme = INT8 if path[-1] == HEAD and scheme.group is not None else scheme
            *experts, inputs, outputs = part.kernel[...].shape
            part.kernel = nnx.Param(jnp.zeros((*experts, inputs, outputs), scheme.dtype))
            part.scale = nnx.Param(jnp.ones((*experts, outputs)))
            if scheme.group is not None:
                check_groups(inputs, scheme.group, path[-1], quantization)
                part.kernel = nnx.Param(jnp.zeros((*experts, inputs // 2, outputs), scheme.dtype))
                part.scale = nnx.Param(jnp.ones((*experts, inputs // scheme.group, outputs), jnp.bfloat16))
        elif isinstance(part, Embedding):
            rows, hidden = part.weight[...].shape
            part.weight = nnx.Param(jnp.zeros((rows, hidden), jnp.int8))
            part.scale = nnx.Param(jnp.ones(rows))
    return module


def check_groups(inputs: int, group: int, name: Any, quantization: str) -> None:
    """Raise ModelError unless groups divide the inputs of a matrix.

    Args:
        inputs: the number of inputs of the matrix.
        group: the number of inputs of a group.
        name: the name of the matrix.
        quantization: the quantization that has these groups.
    """
    if inputs % group:
        raise ModelError(
            f"quantization must be int8, fp8 or None for a model whose {name} has {inputs} inputs, which is "
            f"not a multiple of {group}; got {quantization!r}"
        )


def quantise(params: Any, shapes: Any) -> Any:
    """The parameters with quantised matrices.

    Args:
        params: the model's parameters, not quantised but for matrices that were int8 on disk.
        shapes: the shapes of the quantised model's parameters: where these have a scale, a matrix becomes
            what they say.
    """
    if isinstance(shapes, tuple):
        return tuple(quantise(x, shape) for x, shape in zip(params, shapes, strict=True))
    if not isinstance(shapes, dict):
        return params
    if "scale" not in shapes:
        return {name: quantise(params[name], shape) for name, shape in shapes.items()}
    if "weight" in shapes:
        table = params["weight"]
        weight, scale = quantise_table(table if table.shape == shapes["weight"].shape else table.T)
        return {"scale": scale, "weight": weight}
    kernel, shape = params["kernel"], shapes["kernel"]
    if isinstance(kernel, Int8Kernel):
        return {**params, "kernel": kernel.kernel, "scale": kernel.scale}
    group = kernel.shape[-2] // shapes["scale"].shape[-2] if shape.dtype == jnp.uint8 else None
    if kernel.ndim == 2:
        kernel, scale = quantise_matrix(kernel, shape.dtype, group)
    else:
        divided = len(kernel.sharding.device_set) > 1
        kernel, scale = quantise_experts(kernel, shape.dtype, group, divided)
    return {**params, "kernel": kernel, "scale": scale}


def quantise_matrix(kernel: jax.Array, dtype: Any, group: int | None) -> tuple[jax.Array, jax.Array]:
    """A matrix `[inputs, outputs]` in a narrow dtype, and its scales.

    Args:
        kernel: the matrix.
        dtype: the narrow dtype: int8, float8_e4m3fn, or uint8 for numbers of 4 bits.
        group: inputs that share a scale, of numbers of 4 bits.
    """
    if group is not None:
        return quantise_groups(kernel, group)
    return quantise_fp8(kernel) if dtype == FP8 else quantise_kernel(kernel)


@partial(jax.jit, static_argnames=("dtype", "group", "divided"))
def quantise_experts(
    kernel: jax.Array, dtype: Any, group: int | None, divided: bool
) -> tuple[jax.Array, jax.Array]:
    """Matrices of experts, `[experts, inputs, outputs]`, as by `quantise_matrix`.

    Args:
        kernel: the matrices.
        dtype: as for `quantise_matrix`.
        group: as for `quantise_matrix`.
        divided: whether several devices have them, which all compute at once. One device takes one matrix
            after the other, so that its wide numbers are those of one.
    """
    rule = partial(quantise_matrix, dtype=dtype, group=group)
    return jax.vmap(rule)(kernel) if divided else jax.lax.map(rule, kernel)


def int8_kernels(shapes: Any) -> frozenset[tuple[Any, ...]]:
    """The paths of the matrices that become int8, by the shapes of a quantised model's parameters."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(shapes)
    paths = (
        tuple(getattr(key, "idx", getattr(key, "key", None)) for key in keys)
        for keys, leaf in leaves
        if leaf.dtype == jnp.int8 and leaf.ndim == 2
    )
    return frozenset(path for path in paths if path[-1] == "kernel")


@jax.jit
def quantise_kernel(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A matrix `[inputs, outputs]` as int8, and the scale of its columns, float32 `[outputs]`.

    A column of zeros has the scale 1. The largest error of an element is half of its column's scale.

    >>> q, s = quantise_kernel(jnp.array([[2.0, 0.0], [-1.0, 0.0]]))
    >>> q.tolist(), s.tolist()[1]
    ([[127, 0], [-64, 0]], 1.0)
    """
    wide = kernel.astype(jnp.float32)
    scale = largest_scale(wide, 0, LARGEST)
    return jnp.round(wide / scale).astype(jnp.int8), scale


@jax.jit
def quantise_fp8(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A matrix `[inputs, outputs]` in E4M3, and the scale of its columns, float32 `[outputs]`."""
    wide = kernel.astype(jnp.float32)
    scale = largest_scale(wide, 0, LARGEST_FP8)
    return jnp.clip(wide / scale, -LARGEST_FP8, LARGEST_FP8).astype(FP8), scale


@jax.jit
def quantise_table(table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A table `[tokens, hidden]` as int8, and the scale of its rows `[tokens]`, in the table's dtype."""
    wide = table.astype(jnp.float32)
    scale = largest_scale(wide, 1, LARGEST).astype(table.dtype)
    numbers = jnp.round(wide / scale.astype(jnp.float32)[:, None])
    return jnp.clip(numbers, -LARGEST, LARGEST).astype(jnp.int8), scale


def largest_scale(wide: jax.Array, axis: int, largest: int) -> jax.Array:
    """The scale that makes the largest magnitude along an axis `largest`; 1 where all are 0.

    Args:
        wide: float32 `[inputs, outputs]`.
        axis: over which a scale is shared.
        largest: the largest magnitude of the narrow dtype.
    """
    magnitude = jnp.max(jnp.abs(wide), axis=axis)
    return jnp.where(magnitude > 0, magnitude / largest, 1.0)


@partial(jax.jit, static_argnames="group")
def quantise_groups(kernel: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """A matrix as packed numbers of 4 bits with a scale for each group of inputs.

    Args:
        kernel: `[inputs, outputs]`.
        group: inputs that share a scale; it divides those of the kernel, and is even.

    Returns:
        uint8 `[inputs / 2, outputs]` and bfloat16 `[inputs / group, outputs]`, as `pallas.skinny_matmul`
        reads them. A group of zeros has the scale 1.
    """
    inputs, outputs = kernel.shape
    grouped = kernel.astype(jnp.float32).reshape(inputs // group, group, outputs)
    largest = jnp.take_along_axis(grouped, jnp.argmax(jnp.abs(grouped), axis=1, keepdims=True), axis=1)

    def rounded(scale: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(grouped / scale), -8, 7)

    def better(
        best: tuple[jax.Array, jax.Array], factor: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        error, scale = best
        candidate = (largest * (factor / 8)).astype(jnp.bfloat16).astype(jnp.float32)
        candidate = jnp.where(candidate == 0, 1.0, candidate)
        changed = jnp.sum((rounded(candidate) * candidate - grouped) ** 2, axis=1, keepdims=True)
        return (jnp.minimum(error, changed), jnp.where(changed < error, candidate, scale)), None

    start = jnp.full_like(largest, jnp.inf), jnp.ones_like(largest)
    (_, scale), _ = jax.lax.scan(better, start, jnp.asarray(CANDIDATES, jnp.float32))
    numbers = (rounded(scale) + 8).astype(jnp.uint8).reshape(inputs // 2, 2, outputs)
    return numbers[:, 0] | (numbers[:, 1] << 4), scale[:, 0].astype(jnp.bfloat16)
