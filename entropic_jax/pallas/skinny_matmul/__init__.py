"""Skinny matrix products: a few rows times large weights (GEMV-like), where decoding spends most of its time.

`skinny_matmul(x, *weights)` multiplies the same rows by one or more weights. Every back end has this
contract:

Args:
    x: `[rows, inputs]`.
    weights: a tuple of `[inputs, outputs]`, all of one dtype: that of x, or a narrower one. A narrower weight
        is widened as it is read, and the product is that of the widened weight.
    scales: a tuple of `[outputs]`, float32, by which the columns of the products are multiplied: those of
        weights of int8. Empty for other weights.

Returns:
    A tuple of `[rows, outputs]`, one for each weight, in the dtype of x. Each row of a result depends, bit
    for bit, on the same row of x alone, not on the number of rows.

Raises:
    NotImplementedError: a back end does not support the case; the message is the reason.

With more than `MAX_ROWS` rows arithmetic costs more than reading the weights, and the plain product is used.
"""

from typing import Any

import jax

from ..derivatives import with_derivatives_of
from ..dispatch import Operation
from . import cpu, reference

__all__ = ["MAX_ROWS", "reads_as_stored", "skinny_matmul"]

MAX_ROWS = 64
SKINNY_MATMUL = Operation("skinny_matmul", {"cpu": cpu.skinny_matmul, "xla": reference.skinny_matmul})


def reads_as_stored(dtype: Any) -> bool:
    """Whether a weight of this dtype is multiplied by float32 rows without a widened copy of it."""
    return "cpu" in SKINNY_MATMUL.candidates() and cpu.supports_weight(dtype)


def skinny_matmul(
    x: jax.Array,
    *weights: jax.Array,
    scales: tuple[jax.Array, ...] = (),
    backend: str | None = None,
) -> tuple[jax.Array, ...]:
    """Multiply rows by each of the weights.

    Args:
        x: `[..., inputs]`.
        weights: each `[inputs, outputs]`, of the dtype of x or a narrower one.
        scales: float32 `[outputs]` of each weight, which multiply the columns of its product; for int8.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        `[..., outputs]` for each weight, in the dtype of x. Gradients are those of the plain product.
    """
    rows = x.size // x.shape[-1]
    flat = x.reshape(rows, x.shape[-1])
    if rows <= MAX_ROWS:
        products = _skinny_matmul(backend, flat, weights, scales)
    else:
        products = reference.skinny_matmul(flat, weights, scales)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in products)


_skinny_matmul = with_derivatives_of(
    lambda _, *operands: reference.skinny_matmul(*operands),
    lambda backend, *operands: SKINNY_MATMUL(*operands, backend=backend),
)
