"""Skinny matrix products in plain JAX."""

import math
from typing import Any

import jax
import jax.numpy as jnp

BLOCK_COLUMNS = 64  # of a weight that lies block by block
TILE_INPUTS, TILE_COLUMNS = 32, 16  # of a weight that lies in tiles
QUAD = 4  # inputs that lie side by side in a weight in quads
SUM = jnp.float32  # dtype of sums of products
LARGEST, SMALLEST = 127, 1e-30  # magnitude of a number of 8 bits; and of rows that count as 0


def skinny_matmul(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...] = (),
    operand_dtype: str | None = None,
) -> tuple[jax.Array, ...]:
    """The contract is in the package's docstring."""
    weights = tuple(by_columns(weight) for weight in weights)
    if operand_dtype == "int8":
        return _of_8_bits(x, weights, scales)
    if operand_dtype is not None:
        return _rounded(x, weights, scales, operand_dtype)
    if scales and scales[0].ndim == 2:
        return tuple(multiply_packed(x, *pair) for pair in zip(weights, scales, strict=True))
    products = tuple(x @ weight.astype(x.dtype) for weight in weights)
    if not scales:
        return products
    return tuple(y * scale.astype(x.dtype) for y, scale in zip(products, scales, strict=True))


def in_blocks(weight: Any) -> Any:
    """A weight `[inputs, outputs]`, of JAX or NumPy, block by block, `[outputs / 64, inputs, 64]`.

    >>> in_blocks(jnp.ones((3, 128))).shape
    (2, 3, 64)
    """
    return weight.reshape(weight.shape[0], -1, BLOCK_COLUMNS).transpose(1, 0, 2)


def in_tiles(weight: Any) -> Any:
    """A weight `[inputs, outputs]` in tiles of matrix units, `[outputs / 64, inputs / 32, 2048]`.

    A block of 64 columns is two halves, one after the other. In a step of 32 inputs a half has two tiles of
    16 columns each, and in a tile the two inputs of a pair lie side by side.

    >>> in_tiles(jnp.ones((64, 128))).shape
    (2, 2, 2048)

    Args:
        weight: the array, of JAX or NumPy.
    """
    steps, blocks = weight.shape[0] // TILE_INPUTS, weight.shape[1] // BLOCK_COLUMNS
    parts = weight.reshape(steps, TILE_INPUTS // 2, 2, blocks, 2, 2, TILE_COLUMNS)
    return parts.transpose(3, 4, 0, 5, 1, 6, 2).reshape(blocks, steps, -1)


def in_quads(weight: Any) -> Any:
    """A weight `[inputs, outputs]` in quads, `[outputs / 64, inputs / 4, 256]`.

    Of a block of 64 columns, four inputs of a column lie side by side, and then those of the next column.

    >>> in_quads(jnp.ones((8, 128))).shape
    (2, 2, 256)

    Args:
        weight: the array, of JAX or NumPy.
    """
    parts = weight.reshape(weight.shape[0] // QUAD, QUAD, -1, BLOCK_COLUMNS)
    return parts.transpose(2, 0, 3, 1).reshape(parts.shape[2], parts.shape[0], -1)


def is_in_quads(weight: Any) -> bool:
    """Whether a weight lies in quads."""
    return weight.ndim == 3 and weight.shape[2] == QUAD * BLOCK_COLUMNS


def by_columns(weight: jax.Array) -> jax.Array:
    """A weight as `[inputs, outputs]`, if it lies in blocks, in tiles or in quads; any other as it is."""
    if weight.ndim < 3:
        return weight
    blocks, steps, width = weight.shape
    if width == BLOCK_COLUMNS:
        return weight.transpose(1, 0, 2).reshape(steps, -1)
    if is_in_quads(weight):
        quads = weight.reshape(blocks, steps, BLOCK_COLUMNS, QUAD)
        return quads.transpose(1, 3, 0, 2).reshape(QUAD * steps, -1)
    parts = weight.reshape(blocks, 2, steps, 2, TILE_INPUTS // 2, TILE_COLUMNS, 2)
    return parts.transpose(2, 4, 6, 0, 1, 3, 5).reshape(TILE_INPUTS * steps, -1)


def column_view(weight: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    """A weight such that a column is a slice of it, and into what its axes divide the number of a column.

    Args:
        weight: `[inputs, outputs]`, or block by block, in tiles or in quads.

    Returns:
        The weight with more axes, and the length of each that counts columns; 0 for one that counts inputs.
    """
    if weight.ndim == 2:
        return weight, (0, weight.shape[1])
    blocks, steps, width = weight.shape
    if width == BLOCK_COLUMNS:
        return weight, (blocks, 0, width)
    if is_in_quads(weight):
        return weight.reshape(blocks, steps, BLOCK_COLUMNS, QUAD), (blocks, 0, BLOCK_COLUMNS, 0)
    # Blocks, halves, steps of inputs, tiles of a half, pairs of inputs, columns of a tile, inputs of a pair.
    parts = weight.reshape(blocks, 2, steps, 2, TILE_INPUTS // 2, TILE_COLUMNS, 2)
    return parts, (blocks, 2, 0, 2, 0, TILE_COLUMNS, 0)


def take_columns(weight: jax.Array, numbers: jax.Array) -> jax.Array:
    """Columns of a weight; a number outside of it has the nearest column.

    Args:
        weight: as `column_view` takes it.
        numbers: int32 `[...]`, those of the columns.

    Returns:
        `[..., inputs]`, in the dtype of the weight.
    """
    view, parts = column_view(weight)
    axes = [axis for axis, part in enumerate(parts) if part]
    flat = jnp.clip(numbers.reshape(-1), 0, math.prod(parts[axis] for axis in axes) - 1)
    places = jnp.unravel_index(flat, tuple(parts[axis] for axis in axes))
    columns = jnp.moveaxis(view, axes, range(len(axes)))[places]
    return columns.reshape(*numbers.shape, -1)


def _rounded(
    x: jax.Array, weights: tuple[jax.Array, ...], scales: tuple[jax.Array, ...], operand_dtype: str
) -> tuple[jax.Array, ...]:
    """Products of operands that are rounded first; packed weights are unpacked, and then rounded."""
    if scales and scales[0].ndim == 2:
        weights, scales = tuple(unpack(w, s) for w, s in zip(weights, scales, strict=True)), ()
    left = x.astype(operand_dtype)
    products = tuple(
        jnp.matmul(left, weight.astype(operand_dtype), preferred_element_type=x.dtype) for weight in weights
    )
    return tuple(y * s.astype(x.dtype) for y, s in zip(products, scales, strict=True)) if scales else products


def _of_8_bits(
    x: jax.Array, weights: tuple[jax.Array, ...], scales: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Products of rows that are rounded to 8 bits with weights of int8; the sums are exact.

    Raises:
        ValueError: for weights of another dtype.
    """
    for weight in weights:
        if weight.dtype != jnp.int8:
            raise ValueError(f"weights must be int8 for operand_dtype='int8'; got {weight.dtype}")
    largest = jnp.abs(x).max(-1, keepdims=True).astype(jnp.float32)
    inverse = jnp.where(largest > SMALLEST, LARGEST / largest, 0.0)
    scaled = x.astype(jnp.float32) * inverse
    numbers = jnp.where(jnp.abs(scaled) <= LARGEST + 1, jnp.round(scaled), 0.0).astype(jnp.int8)
    products = (jnp.matmul(numbers, weight, preferred_element_type=jnp.int32) for weight in weights)
    rows = (product.astype(jnp.float32) * (largest / LARGEST) for product in products)
    return tuple((y * scale).astype(x.dtype) for y, scale in zip(rows, scales, strict=True))


def multiply_packed(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Rows times a packed weight, in the dtype of the rows: even inputs, and odd ones.

    So no number changes its place, and XLA for TPUs widens a weight without writing it to memory.

    Args:
        x: `[rows, inputs]`.
        weight: uint8 `[inputs / 2, outputs]`.
        scale: `[inputs / group, outputs]`.
    """
    products = (
        jnp.matmul(x[:, parity::2], half_of(weight, scale, parity, x.dtype), preferred_element_type=SUM)
        for parity in range(2)
    )
    return sum(products, start=jnp.zeros((), SUM)).astype(x.dtype)


def half_of(weight: jax.Array, scale: jax.Array, parity: int, dtype: Any) -> jax.Array:
    """The rows of a packed weight for its even inputs, or for its odd ones, `[inputs / 2, outputs]`.

    Args:
        weight: as for `multiply_packed`.
        scale: as for `multiply_packed`.
        parity: 0 for even inputs, 1 for odd ones.
        dtype: the dtype of the result.
    """
    numbers = (weight >> 4 if parity else weight & 15).astype(jnp.int8) - 8
    grouped = numbers.astype(dtype).reshape(scale.shape[0], -1, scale.shape[1])
    return (grouped * scale[:, None].astype(dtype)).reshape(weight.shape)


def unpack(weight: jax.Array, scale: jax.Array) -> jax.Array:
    """A packed weight as float32 `[inputs, outputs]`.

    Args:
        weight: uint8 `[inputs / 2, outputs]`, two numbers of 4 bits in a byte.
        scale: `[inputs / group, outputs]`.
    """
    numbers = jnp.stack([weight & 15, weight >> 4], axis=1).astype(jnp.float32) - 8
    grouped = numbers.reshape(scale.shape[0], -1, scale.shape[1]) * scale[:, None].astype(jnp.float32)
    return grouped.reshape(-1, scale.shape[1])
