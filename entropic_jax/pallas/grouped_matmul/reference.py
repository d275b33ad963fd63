"""Grouped matrix products in plain JAX.

A loop over blocks of rows of one group reads the matrices of groups that have rows, one at a time, wherever
they lie; XLA's CPU backend widens stacks of bfloat16 as a whole first. XLA's grouped product
(`jax.lax.ragged_dot`) is one kernel on TPUs, and differentiable everywhere; on GPUs and CPUs it multiplies
every row by every matrix.
"""

from functools import partial

import jax
import jax.numpy as jnp

from ..skinny_matmul.reference import by_columns, unpack

LARGEST_BLOCK = 128  # rows; a larger one gains nothing on a CPU


def grouped_matmul(
    x: jax.Array,
    sizes: jax.Array,
    weights: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    first: jax.Array,
) -> tuple[jax.Array, ...]:
    """The contract is in the package's docstring."""
    if scales or any(weight.ndim > 3 for weight in weights):
        return in_blocks(x, sizes, weights, scales, first)
    return jax.lax.platform_dependent(x, sizes, weights, scales, first, tpu=ragged, default=in_blocks)


def in_blocks(
    x: jax.Array,
    sizes: jax.Array,
    weights: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    first: jax.Array,
) -> tuple[jax.Array, ...]:
    """Blocks of at most `LARGEST_BLOCK` rows of one group, one after the other.

    The number of blocks depends on the sizes, so this has no reverse-mode derivative.

    Args:
        x: as for `grouped_matmul`.
        sizes: as for `grouped_matmul`.
        weights: as for `grouped_matmul`.
        scales: as for `grouped_matmul`.
        first: as for `grouped_matmul`.
    """
    groups = sizes.shape[0]
    block = min(1 << (-(-x.shape[0] // groups) - 1).bit_length(), LARGEST_BLOCK)
    rows = jnp.pad(x, ((0, block), (0, 0)))
    blocks = -(-sizes // block)
    ends, starts = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes

    def advance(number: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        group = jnp.sum(ends <= number, dtype=jnp.int32)
        start = starts[group] + (number - ends[group] + blocks[group]) * block
        part = jax.lax.dynamic_slice_in_dim(rows, start, block)
        products = [part @ matrix for matrix in matrices(weights, scales, first + group, x.dtype)]
        # Rows past the end of the group's are overwritten by the next group's first block.
        store = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return tuple(store(*pair) for pair in zip(results, products, strict=True))

    columns = [w.shape[1] * w.shape[3] if w.ndim == 4 else w.shape[2] for w in weights]
    begin = tuple(jnp.zeros((rows.shape[0], count), x.dtype) for count in columns)
    return tuple(result[: x.shape[0]] for result in jax.lax.fori_loop(0, ends[-1], advance, begin))


def matrices(
    weights: tuple[jax.Array, ...], scales: tuple[jax.Array, ...], number: jax.Array, dtype: jnp.dtype
) -> list[jax.Array]:
    """A matrix of each stack, widened to a dtype, with its scales.

    Args:
        weights: as for `grouped_matmul`.
        scales: as for `grouped_matmul`.
        number: the number of the matrix in its stack.
        dtype: the dtype of the result.
    """
    taken = [by_columns(jax.lax.dynamic_index_in_dim(weight, number, 0, False)) for weight in weights]
    if not scales:
        return [matrix.astype(dtype) for matrix in taken]
    of_matrix = [jax.lax.dynamic_index_in_dim(scale, number, 0, False) for scale in scales]
    return [with_scale(*pair).astype(dtype) for pair in zip(taken, of_matrix, strict=True)]


def with_scale(matrix: jax.Array, scale: jax.Array) -> jax.Array:
    """A quantised matrix as float32 `[inputs, outputs]`.

    Args:
        matrix: int8 or float8_e4m3fn `[inputs, outputs]`, or uint8 `[inputs / 2, outputs]`.
        scale: `[outputs]`, or for packed numbers `[inputs / group, outputs]`.
    """
    return unpack(matrix, scale) if scale.ndim == 2 else matrix.astype(jnp.float32) * scale


def ragged(
    x: jax.Array,
    sizes: jax.Array,
    weights: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    first: jax.Array,
) -> tuple[jax.Array, ...]:
    """Product by `jax.lax.ragged_dot`, with a widened copy of the matrices of all groups; differentiable.

    Args:
        x: as for `grouped_matmul`.
        sizes: as for `grouped_matmul`.
        weights: as for `grouped_matmul`.
        scales: as for `grouped_matmul`.
        first: as for `grouped_matmul`.
    """
    groups = sizes.shape[0]
    taken = [jax.lax.dynamic_slice_in_dim(weight, first, groups) for weight in weights]
    taken = [jax.vmap(by_columns)(weight) if weight.ndim == 4 else weight for weight in taken]
    if scales:
        of_groups = [jax.lax.dynamic_slice_in_dim(scale, first, groups) for scale in scales]
        taken = [jax.vmap(with_scale)(*pair) for pair in zip(taken, of_groups, strict=True)]
    return tuple(jax.lax.ragged_dot(x, weight.astype(x.dtype), sizes) for weight in taken)
