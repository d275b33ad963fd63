"""Skinny products with AVX512-BF16: rows are rounded, and the tiles of `cpu_blocks` take pairs of inputs.

A number of a row is loaded with its neighbour, as one word of 32 bits: a row of pairs is read like a row of
half as many numbers of float32. A weight becomes pairs in registers.

Only a process that compiles imports this module, because it imports Numba.
"""

from typing import Any

from ...cpu_runtime import matmul, pairs
from ...cpu_runtime.instructions import CACHE_LINE
from ...cpu_runtime.kernel import EXACT, njit
from .cpu_blocks import multiply_block, multiply_part
from .cpu_rounded import InstructionSet


def instructions(dtype: str, blocked: bool) -> InstructionSet:
    """The products of an even number of inputs.

    Args:
        dtype: of the weights.
        blocked: whether they lie block by block.
    """
    return InstructionSet(_bytes_of_rows, pairs.store_rows(), _begin, _end, _multiply(dtype, blocked))


@njit(**EXACT)
def _bytes_of_rows(rows, inputs):
    return (2 * rows * inputs + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@njit(**EXACT)
def _begin(state, rows):
    pass


@njit(**EXACT)
def _end(state):
    pass


def _multiply(dtype: str, blocked: bool) -> Any:
    """`InstructionSet.multiply` for weights of a dtype; see `instructions`."""
    block = matmul.BLOCK
    full_block = multiply_block(dtype, True)
    if blocked:

        @njit(**EXACT)
        def multiply(rounded, rows, inputs, weight, weight_stride, width, out, columns, following):
            full_block(rounded, rows, inputs // 2, weight, weight_stride, width, out, following)

        return multiply
    part_of_block = multiply_part(dtype, True)

    @njit(**EXACT)
    def multiply_columns(rounded, rows, inputs, weight, weight_stride, width, out, columns, following):
        if columns < block:
            part_of_block(rounded, rows, inputs // 2, weight, width, out, columns)
        else:
            full_block(rounded, rows, inputs // 2, weight, weight_stride, width, out, following)

    return multiply_columns
