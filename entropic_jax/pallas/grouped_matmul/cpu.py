"""Grouped matrix products on a CPU: the threads share the columns of the groups that have rows.

Blocks of columns are multiplied as in `skinny_matmul`, so that narrow weights are widened in registers, and a
row has the same bits whatever else its group holds. XLA would copy the matrix of an expert out of the stack
first, and widen the copy in memory.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ... import cpu_runtime
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once
from ..skinny_matmul.cpu import (
    PACKED,
    SCALED,
    SKINNY_ROWS,
    WEIGHT_DTYPES,
    check_groups,
    supports_rows,
    supports_weight,
)
from ..skinny_matmul.reference import BLOCK_COLUMNS

__all__ = ["BLOCK_COLUMNS", "PACKED", "SKINNY_ROWS", "grouped_matmul", "supports_rows", "supports_weight"]

WEIGHTS = 3  # the first operand that is a weight: before it are the rows, where groups end, the first matrix


def grouped_matmul(
    x: jax.Array,
    sizes: jax.Array,
    weights: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    first: jax.Array,
) -> tuple[jax.Array, ...]:
    """Float32 rows times weights of one of `WEIGHT_DTYPES`. The contract is in the package's docstring."""
    if reason := cpu_runtime.unavailable_reason():
        raise NotImplementedError(reason)
    dtypes, layouts = {w.dtype.name for w in weights}, {w.ndim for w in weights}
    if x.dtype != jnp.float32 or len(dtypes) > 1 or not dtypes <= {*WEIGHT_DTYPES}:
        names = ", ".join(sorted(dtypes))
        accepted = ", ".join(WEIGHT_DTYPES)
        raise NotImplementedError(
            f"{x.dtype} times {names}: only float32 times one of {accepted} is supported"
        )
    (dtype,) = dtypes
    if len(layouts) > 1 or (layouts == {4} and dtype == PACKED):
        raise NotImplementedError("only all weights together lie block by block, and none that are packed")
    if x.shape[0] > SKINNY_ROWS * sizes.shape[0]:
        cpu_runtime.check_prefill(x.shape[0])
    if dtype == PACKED:
        check_groups(x.shape[1], scales)
    blocked = layouts == {4}
    columns = (w.shape[1] * BLOCK_COLUMNS if blocked else w.shape[2] for w in weights)
    shapes = tuple(jax.ShapeDtypeStruct((x.shape[0], count), x.dtype) for count in columns)
    call = jax.ffi.ffi_call(_register(dtype, blocked), shapes, vmap_method="sequential")
    return tuple(call(x, jnp.cumsum(sizes, dtype=jnp.int32), first[None], *weights, *scales))


@run_once
def _register(dtype: str, blocked: bool) -> str:
    """Register the product with weights of a dtype with XLA; returns its name there.

    Args:
        dtype: of the weights.
        blocked: whether they lie block by block.
    """
    name = f"entropic_grouped_matmul_{dtype}{'_blocks' * blocked}"
    register(name, lambda: _compile(name, dtype, blocked))
    return name


def _compile(name: str, dtype: str, blocked: bool) -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.kernel import (
        EXACT,
        compiled,
        njit,
        operand,
        operand_integers,
        parallel_kernel,
        result,
    )
    from ...cpu_runtime.matmul import BLOCK
    from ..skinny_matmul.cpu_blocks import pass_end

    end_of_pass = pass_end()
    multiply = _packed_product() if dtype == PACKED else _product(dtype)
    blocks_of_group, used_groups, find = _groups(blocked)
    chunks_per_group, blocks_per_chunk = _chunks(blocks_of_group, used_groups)
    locate = _locate(dtype, blocked)

    @njit(**EXACT)
    def chunk(frame, number):
        """The rows of a group times some neighbouring blocks of its columns."""
        count, per_group, per_chunk = blocks_of_group(frame), chunks_per_group(frame), blocks_per_chunk(frame)
        group, start, stop = find(frame, number // per_group)
        matrix = group + operand_integers(frame, 2, (1,))[0]
        x, shape = operand(frame, 0)
        rows, inputs = shape[0], shape[1]
        stop = min(stop, rows)
        begin = (number % per_group) * per_chunk
        end = min(count, begin + per_chunk)
        first = start
        while first < stop:
            last = first + end_of_pass(0, stop - first, inputs)
            for b in range(begin, end):
                w, column, width, weight = locate(frame, b, matrix)
                following = locate(frame, min(b + 1, count - 1), matrix)[3]
                stride = BLOCK if blocked else width
                out = result(frame, w)[0] + 4 * (first * width + column)
                source = x + 4 * first * inputs
                n = last - first
                multiply(frame, w, matrix, column, source, n, inputs, weight, stride, width, out, following)
            first = last

    @compiled
    def num_chunks(frame):
        return used_groups(frame) * chunks_per_group(frame)

    yield from parallel_kernel(name, chunk, num_chunks)


def _groups(blocked: bool) -> tuple[Any, Any, Any]:
    """Functions of a call: `blocks_of_group(frame)`, `used_groups(frame)`, `find(frame, number)`.

    The blocks of columns of all weights of a group; how many groups have rows; the group with a number among
    these, its first row, and where it ends.
    """
    from ...cpu_runtime.kernel import EXACT, njit, operand, operand_integers, words
    from ...cpu_runtime.matmul import BLOCK

    @njit(**EXACT)
    def blocks_of_group(frame):
        count = 0
        for w in range(words(frame, 15)[12]):
            shape = operand(frame, WEIGHTS + w)[1]
            count += shape[1] if blocked else (shape[2] + BLOCK - 1) // BLOCK
        return count

    @njit(**EXACT)
    def used_groups(frame):
        groups = operand(frame, 1)[1][0]
        ends = operand_integers(frame, 1, (groups,))
        count, start = 0, 0
        for group in range(groups):
            count += ends[group] > start
            start = max(start, ends[group])
        return count

    @njit(**EXACT)
    def find(frame, number):
        groups = operand(frame, 1)[1][0]
        ends = operand_integers(frame, 1, (groups,))
        start = 0
        for group in range(groups):
            end = ends[group]
            if end > start:
                if number == 0:
                    return group, start, end
                number -= 1
                start = end
        return 0, 0, 0

    return blocks_of_group, used_groups, find


def _chunks(blocks_of_group: Any, used_groups: Any) -> tuple[Any, Any]:
    """`chunks_per_group(frame)`, and `blocks_per_chunk(frame)`: what a thread gets at a time.

    Args:
        blocks_of_group: see `_groups`.
        used_groups: see `_groups`.
    """
    from ...cpu_runtime.kernel import EXACT, njit
    from ...cpu_runtime.thread_pool import num_threads
    from ..skinny_matmul.cpu_blocks import CHUNKS_PER_THREAD, LONGEST_CHUNK

    @njit(**EXACT)
    def blocks_per_chunk(frame):
        count = used_groups(frame) * blocks_of_group(frame)
        return max(1, min(LONGEST_CHUNK, count // (CHUNKS_PER_THREAD * num_threads())))

    @njit(**EXACT)
    def chunks_per_group(frame):
        per_chunk = blocks_per_chunk(frame)
        return (blocks_of_group(frame) + per_chunk - 1) // per_chunk

    return chunks_per_group, blocks_per_chunk


def _locate(dtype: str, blocked: bool) -> Any:
    """`locate(frame, number, matrix)`: the weight of a block, its column, all columns, and its address.

    Args:
        dtype: of the weights.
        blocked: whether they lie block by block.
    """
    from ...cpu_runtime.instructions import ITEMSIZE
    from ...cpu_runtime.kernel import EXACT, njit, operand
    from ...cpu_runtime.matmul import BLOCK

    size = 1 if dtype == PACKED else ITEMSIZE[dtype]

    @njit(**EXACT)
    def locate(frame, number, matrix):
        w = 0
        while True:
            weight, shape = operand(frame, WEIGHTS + w)
            count = shape[1] if blocked else (shape[2] + BLOCK - 1) // BLOCK
            if number < count:
                inputs = shape[2] if blocked else shape[1]
                width = count * BLOCK if blocked else shape[2]
                column = number * BLOCK
                weight += size * inputs * matrix * width
                return w, column, width, weight + size * column * (inputs if blocked else 1)
            number -= count
            w += 1

    return locate


def _product(dtype: str) -> Any:
    """`product(frame, w, matrix, column, x, rows, inputs, weight, stride, width, out, following)`.

    Rows by a block of a matrix. The arguments from x on are those of `cpu_blocks.multiply_block`; w, matrix
    and column say which block it is.
    """
    from ...cpu_runtime.kernel import EXACT, floats, njit, operand, words
    from ...cpu_runtime.matmul import BLOCK
    from ..skinny_matmul.cpu_blocks import multiply_block, multiply_part

    full_block, part_of_block = multiply_block(dtype), multiply_part(dtype)
    scaled = dtype in SCALED

    @njit(**EXACT)
    def product(frame, w, matrix, column, x, rows, inputs, weight, stride, width, out, following):
        columns = min(BLOCK, width - column)
        if columns < BLOCK:
            part_of_block(x, rows, inputs, weight, width, out, columns)
        else:
            full_block(x, rows, inputs, weight, stride, width, out, following)
        if scaled:
            scales = operand(frame, WEIGHTS + words(frame, 15)[12] + w)[0]
            scale = floats(scales + 4 * (matrix * width + column), (columns,))
            for r in range(rows):
                row = floats(out + 4 * r * width, (columns,))
                for c in range(columns):
                    row[c] *= scale[c]

    return product


def _packed_product() -> Any:
    """The product of `_product` with packed weights, whose scales are operands behind all weights."""
    from ...cpu_runtime.kernel import EXACT, njit, operand, words
    from ...cpu_runtime.matmul import BLOCK
    from ..skinny_matmul.cpu_int4 import multiply_block, multiply_part

    full_block, part_of_block = multiply_block(), multiply_part()

    @njit(**EXACT)
    def packed_product(frame, w, matrix, column, x, rows, inputs, weight, stride, width, out, following):
        scales, shape = operand(frame, WEIGHTS + words(frame, 15)[12] + w)
        scale, group = scales + 2 * (matrix * shape[1] * width + column), inputs // shape[1]
        if width - column < BLOCK:
            part_of_block(x, rows, inputs, weight, width, out, width - column, scale, group)
        else:
            full_block(x, rows, inputs, weight, width, out, following, scale, group)

    return packed_product
