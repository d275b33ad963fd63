"""Grouped matrix products: rows that are sorted by group, each group times a matrix of its own.

The experts of a mixture are such groups: the rows are the pairs (token, expert). `grouped_matmul(x, sizes,
*weights)` multiplies the same rows by one or more stacks of matrices. Every back end has this contract:

Args:
    x: `[rows, inputs]`: the rows of group 0, then those of group 1, and so on.
    sizes: int32 `[groups]`, the number of rows of each group. Together they are at most `rows`.
    weights: a tuple of `[matrices, inputs, outputs]`, all of one dtype: that of x, or a narrower one. A
        narrower weight is widened as it is read. Weights of uint8 are packed, `[matrices, inputs / 2,
        outputs]`, as those of `skinny_matmul`. All of them may instead lie block by block, `[matrices,
        outputs / 64, inputs, 64]`, unless they are packed.
    scales: for weights of int8 or float8_e4m3fn a tuple of `[matrices, outputs]`, float32; for packed weights
        a tuple of `[matrices, inputs / group, outputs]`, bfloat16. Empty for other weights.
    first: int32, the matrix of group 0. Group g is multiplied by matrix `first + g`, so that a program which
        scans over layers reads a layer's experts out of those of all layers.

Returns:
    A tuple of `[rows, outputs]`, one for each weight, in the dtype of x. Rows behind the last group may hold
    anything. The matrix of a group without rows is not read; XLA's own grouped product, which serves on TPUs
    where the kernel declines, may copy it. With the back end `cpu`, each row of a result depends, bit for
    bit, on the same row of x and on its matrix alone.

Raises:
    NotImplementedError: a back end does not support the case; the message is the reason.

Source: Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts (2022; arXiv 2211.15841),
section 5.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..derivatives import with_derivatives_of
from ..dispatch import Operation, for_platform, interpreted
from . import cpu, reference

__all__ = ["grouped_matmul", "in_blocks", "reads_as_stored", "reads_blocked"]

_TPU, _GPU = f"{__name__}.tpu", f"{__name__}.gpu"
GROUPED_MATMUL = Operation(
    "grouped_matmul",
    {
        "tpu": for_platform("tpu", _TPU, "grouped_matmul"),
        "gpu": for_platform("gpu", _GPU, "grouped_matmul"),
        "cpu": cpu.grouped_matmul,
        "xla": reference.grouped_matmul,
        "interpret": interpreted(_TPU, "grouped_matmul"),
    },
)


def reads_as_stored(dtype: Any) -> bool:
    """Whether rows of float32 are multiplied by weights of this dtype without a widened copy of them."""
    return "cpu" in GROUPED_MATMUL.candidates() and cpu.supports_weight(dtype)


def reads_blocked(weight: jax.Array) -> bool:
    """Whether a kernel of this machine reads this stack of matrices block by block."""
    whole_blocks = weight.ndim == 3 and weight.shape[2] % cpu.BLOCK_COLUMNS == 0
    if not whole_blocks or weight.dtype.name == cpu.PACKED or not cpu.supports_rows(cpu.SKINNY_ROWS + 1):
        return False
    return reads_as_stored(weight.dtype)


def in_blocks(weight: Any) -> Any:
    """Matrices `[matrices, inputs, outputs]`, of JAX or NumPy, each block by block.

    >>> in_blocks(jnp.ones((2, 3, 128))).shape
    (2, 2, 3, 64)
    """
    matrices, inputs, _ = weight.shape
    return weight.reshape(matrices, inputs, -1, cpu.BLOCK_COLUMNS).transpose(0, 2, 1, 3)


def grouped_matmul(
    x: jax.Array,
    sizes: jax.Array,
    *weights: jax.Array,
    scales: tuple[jax.Array, ...] = (),
    first: jax.Array | int = 0,
    backend: str | None = None,
) -> tuple[jax.Array, ...]:
    """Multiply the rows of each group by a matrix of each stack.

    Args:
        x: `[rows, inputs]`, sorted by group.
        sizes: int32 `[groups]`, rows of each group.
        weights: each `[matrices, inputs, outputs]`; see the package's docstring for narrower ones.
        scales: the scales of each weight of int8, of float8_e4m3fn, or packed.
        first: the matrix of the first group.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        `[rows, outputs]` for each weight, in the dtype of x. Gradients are those of the plain product,
        without second derivatives.
    """
    return _grouped_matmul(backend, x, sizes, weights, scales, jnp.asarray(first, jnp.int32))


_grouped_matmul = with_derivatives_of(
    lambda _, *operands: reference.ragged(*operands),
    lambda backend, *operands: GROUPED_MATMUL(*operands, backend=backend),
)
