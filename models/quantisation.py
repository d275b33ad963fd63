"""Weight quantisation: matrices of int8 with a scale per column, which are widened as they are multiplied.

    w[i, c] ≈ s[c] q[i, c],   s[c] = max |w[:, c]| / 127,   q = round(w / s)

Embeddings, norms, biases, routers and experts keep their dtype, and so do activations and the KV cache.
Products of a few rows read a quarter of the bytes of float32 (`pallas.skinny_matmul`).
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from .config import ModelError
from .experts import Router
from .layers import Linear

QUANTIZATIONS = ("int8",)
LARGEST = 127
# Matrices that are not only multiplied by rows, and one of a single column.
KEPT = ("kv_b_proj", "shared_expert_gate")


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


def quantise_module(module: AnyModule) -> AnyModule:
    """The module with the parameters of quantised matrices: a kernel of int8, and its scale."""
    for path, part in list(nnx.iter_modules(module)):
        if isinstance(part, Linear) and not isinstance(part, Router) and path[-1] not in KEPT:
            shape = part.kernel[...].shape
            part.kernel = nnx.Param(jnp.zeros(shape, jnp.int8))
            part.scale = nnx.Param(jnp.ones(shape[-1]))
    return module


def quantise(params: Any, shapes: Any) -> Any:
    """The parameters with quantised matrices.

    Args:
        params: the model's parameters, not quantised but for matrices that were int8 on disk.
        shapes: the shapes of the quantised model's parameters: where these have a scale, a matrix becomes
            int8.
    """
    if isinstance(shapes, tuple):
        return tuple(quantise(x, shape) for x, shape in zip(params, shapes, strict=True))
    if not isinstance(shapes, dict):
        return params
    if "scale" not in shapes:
        return {name: quantise(params[name], shape) for name, shape in shapes.items()}
    kernel = params["kernel"]
    kernel, scale = kernel if isinstance(kernel, Int8Kernel) else quantise_kernel(kernel)
    return {**params, "kernel": kernel, "scale": scale}


def quantised_kernels(shapes: Any) -> frozenset[tuple[Any, ...]]:
    """The paths of the matrices that become int8, by the shapes of a quantised model's parameters."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(shapes)
    paths = (tuple(getattr(key, "idx", getattr(key, "key", None)) for key in keys) for keys, _ in leaves)
    return frozenset((*path[:-1], "kernel") for path in paths if path[-1] == "scale")


@jax.jit
def quantise_kernel(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A matrix `[inputs, outputs]` as int8, and the scale of its columns, float32 `[outputs]`.

    A column of zeros has the scale 1. The largest error of an element is half of its column's scale.

    >>> q, s = quantise_kernel(jnp.array([[2.0, 0.0], [-1.0, 0.0]]))
    >>> q.tolist(), s.tolist()[1]
    ([[127, 0], [-64, 0]], 1.0)
    """
    wide = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=0)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return jnp.round(wide / scale).astype(jnp.int8), scale
