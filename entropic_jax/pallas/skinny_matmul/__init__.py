"""Skinny matrix products: a few rows times large weights (GEMV-like), where decoding spends most of its time.

On a CPU the same kernel multiplies any number of rows, so that prefill gives the bits that decoding gives.

`skinny_matmul(x, *weights)` multiplies the same rows by one or more weights. Every back end has this
contract:

Args:
    x: `[rows, inputs]`.
    weights: a tuple of `[inputs, outputs]`, all of one dtype: that of x, or a narrower one. A narrower weight
        is widened as it is read, and the product is that of the widened weight. Weights of uint8 are packed,
        `[inputs / 2, outputs]`: the low half of a byte is the number n of an even input, the high half that
        of the next one, and the weight is its scale times n − 8. All of them may instead lie block by block,
        `[outputs / 64, inputs, 64]`, unless they are packed; those of bfloat16 in tiles (`in_tiles`), those
        of int8 in quads (`in_quads`).
    scales: for weights of int8 or float8_e4m3fn a tuple of `[outputs]`, float32, by which the columns of the
        products are multiplied; for packed weights a tuple of `[inputs / group, outputs]`, bfloat16, a scale
        for each group of neighbouring inputs of a column. Empty for other weights.
    operand_dtype: None, or "bfloat16" for products of operands that are rounded to it, with sums in the dtype
        of x: what matrix units and AVX512-BF16 compute. Numbers of 8 bits are bfloat16 as they are; their
        scales multiply the sums. "int8" for products with weights of int8 of rows that are rounded to 8 bits,
        with a scale for each row, the largest of its magnitudes divided by 127; the sums are exact.

Returns:
    A tuple of `[rows, outputs]`, one for each weight, in the dtype of x. Each row of a result depends, bit
    for bit, on the same row of x alone, not on the number of rows.

Raises:
    NotImplementedError: a back end does not support the case; the message is the reason.

With more than `SKINNY_ROWS` rows arithmetic costs more than reading the weights. A machine with more
processors than CPU kernels have threads leaves such products to XLA.
"""

from typing import Any

import jax

from ..derivatives import with_derivatives_of
from ..dispatch import Operation
from . import cpu, reference
from .cpu import SKINNY_ROWS
from .reference import (
    BLOCK_COLUMNS,
    QUAD,
    TILE_INPUTS,
    by_columns,
    in_blocks,
    in_quads,
    in_tiles,
    is_in_quads,
    take_columns,
)

__all__ = [
    "SKINNY_ROWS",
    "by_columns",
    "in_blocks",
    "in_quads",
    "in_tiles",
    "is_in_quads",
    "multiplies",
    "reads_as_stored",
    "reads_blocked",
    "reads_quads",
    "reads_tiles",
    "rounds_operands",
    "skinny_matmul",
    "take_columns",
]

SKINNY_MATMUL = Operation("skinny_matmul", {"cpu": cpu.skinny_matmul, "xla": reference.skinny_matmul})


def reads_as_stored(dtype: Any) -> bool:
    """Whether a weight of this dtype is multiplied by float32 rows without a widened copy of it."""
    return "cpu" in SKINNY_MATMUL.candidates() and cpu.supports_weight(dtype)


def multiplies(rows: int) -> bool:
    """Whether a kernel of this machine multiplies so many rows, with the bits that one row has."""
    return "cpu" in SKINNY_MATMUL.candidates() and cpu.supports_rows(rows)


def reads_blocked(weight: jax.Array) -> bool:
    """Whether a kernel of this machine multiplies any number of rows by `in_blocks(weight)`."""
    if weight.ndim != 2 or weight.shape[1] % BLOCK_COLUMNS or weight.dtype.name == cpu.PACKED:
        return False
    return reads_as_stored(weight.dtype) and multiplies(SKINNY_ROWS + 1)


def reads_tiles(weight: jax.Array) -> bool:
    """Whether a kernel of this machine multiplies any number of rows by `in_tiles(weight)`."""
    whole_tiles = weight.ndim == 2 and weight.shape[0] % TILE_INPUTS == 0
    return reads_blocked(weight) and whole_tiles and cpu.splits_operands(weight.dtype.name)


def reads_quads(weight: jax.Array) -> bool:
    """Whether a kernel of this machine multiplies any number of rows of 8 bits by `in_quads(weight)`."""
    whole_quads = weight.ndim == 2 and weight.shape[0] % QUAD == 0 and weight.dtype.name == "int8"
    return whole_quads and reads_blocked(weight) and cpu.multiplies_8_bits()


def rounds_operands() -> bool:
    """Whether a kernel of this machine multiplies rows that are rounded to bfloat16."""
    return "cpu" in SKINNY_MATMUL.candidates() and cpu.rounds_operands()


def skinny_matmul(
    x: jax.Array,
    *weights: jax.Array,
    scales: tuple[jax.Array, ...] = (),
    operand_dtype: str | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, ...]:
    """Multiply rows by each of the weights.

    Args:
        x: `[..., inputs]`.
        weights: each `[inputs, outputs]`, of the dtype of x or a narrower one, or `[outputs / 64, inputs,
            64]`; or packed, uint8 `[inputs / 2, outputs]`.
        scales: the scales of each weight of int8, of float8_e4m3fn, or packed; see the package's docstring.
        operand_dtype: "bfloat16" to round x and the weights to it first, "int8" to round x to 8 bits; None
            multiplies them as they are.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        `[..., outputs]` for each weight, in the dtype of x. Gradients are those of the plain product.
    """
    rows = x.size // x.shape[-1]
    flat = x.reshape(rows, x.shape[-1])
    products = _skinny_matmul((backend, operand_dtype), flat, weights, scales)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in products)


def _reference(settings: tuple[str | None, str | None], *operands: Any) -> tuple[jax.Array, ...]:
    return reference.skinny_matmul(*operands, operand_dtype=settings[1])


def _served(settings: tuple[str | None, str | None], *operands: Any) -> tuple[jax.Array, ...]:
    return SKINNY_MATMUL(*operands, operand_dtype=settings[1], backend=settings[0])


_skinny_matmul = with_derivatives_of(_reference, _served)
