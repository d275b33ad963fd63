"""Skinny products of operands of bfloat16 on a CPU: rows are laid out once per call, and blocks are shared.

Threads take neighbouring blocks of columns until none are left. An instruction set multiplies rows by a
block: `cpu_matrix_units` (AMX) or `cpu_pairs` (AVX512-BF16). Many rows take several passes, see `cpu_blocks`.

Only a process that compiles imports this module, because it imports Numba.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ...cpu_runtime import matmul
from ...cpu_runtime.instructions import CACHE_LINE, ITEMSIZE
from ...cpu_runtime.kernel import (
    EXACT,
    allocate,
    free,
    njit,
    operand,
    parallel_for,
    result,
    stack_memory,
    symbol_address,
    thread_task,
    words,
    xla_handler,
)
from ...cpu_runtime.thread_pool import num_threads, take
from .cpu_blocks import block_places, pass_end, scale_columns

ROWS_PER_CHUNK = 8  # that a thread lays out at a time
OWN_ROWS, OWN_BYTES = 64, 2**23  # up to which every thread lays out the rows for itself
# The words of a job: XLA's call, the address of the rows and the bytes of each copy of them, 0 for one that
# all threads read; and what is left, which changes as blocks are taken.
FRAME, ROWS, COPY, COUNTER, JOB_WORDS = 0, 1, 2, 8, 16
STATE_BYTES = 128  # on the stack of a thread

job_memory = stack_memory(8 * JOB_WORDS)
state_memory = stack_memory(STATE_BYTES)


class InstructionSet(NamedTuple):
    """Functions compiled by Numba that multiply rows by a block of columns with some instructions."""

    bytes_of_rows: Any  # `bytes_of_rows(rows, inputs)`: of the rows as they are laid out
    store_rows: Any  # `store_rows(x, begin, end, inputs, target)`: lay out some rows of x, float32
    begin: Any  # `begin(state, rows)`: before a thread multiplies; `STATE_BYTES` at `state` belong to it
    end: Any  # `end(state)`: after it
    # `multiply(laid_out, rows, inputs, weight, weight_stride, width, out, columns, following)`: all rows, as
    # they are laid out, times the columns of a block; see `cpu_blocks.multiply_block`
    multiply: Any
    rows_of_pass: int = 0  # see `cpu_blocks.pass_end`


def build(
    name: str, dtype: str, scaled: bool, blocked: bool, instructions: InstructionSet
) -> Iterator[tuple[str, Any]]:
    """The builder of the product with weights of a dtype; see `code_cache`.

    Args:
        name: the symbol of the kernel.
        dtype: of the weights.
        scaled: whether their columns have scales.
        blocked: whether they lie block by block.
        instructions: what multiplies.
    """
    num_blocks = block_places(blocked)[0]
    multiply_blocks = _multiply_blocks(dtype, scaled, blocked, instructions)
    bytes_of_rows, store_rows, begin, end, *_ = instructions

    @njit(**EXACT)
    def lay_out_rows(job_address, number):
        """Some rows, for all threads."""
        job = words(job_address, JOB_WORDS)
        x, shape = operand(job[FRAME], 0)
        first = number * ROWS_PER_CHUNK
        store_rows(x, first, min(shape[0], first + ROWS_PER_CHUNK), shape[1], job[ROWS])

    @njit(**EXACT)
    def work(job_address, number):
        """The work of a thread. It lays out a few rows itself: to read them from another takes longer."""
        job = words(job_address, JOB_WORDS)
        if job[COUNTER] >= num_blocks(job[FRAME]):
            return
        x, shape = operand(job[FRAME], 0)
        laid_out = job[ROWS]
        if job[COPY] > 0:
            laid_out += number * job[COPY]
            store_rows(x, 0, shape[0], shape[1], laid_out)
        state = state_memory()
        begin(state, shape[0])
        multiply_blocks(job[FRAME], job_address + 8 * COUNTER, laid_out)
        end(state)

    yield f"{name}_rows", thread_task(lay_out_rows)
    yield f"{name}_work", thread_task(work)
    rows_address, work_address = symbol_address(f"{name}_rows"), symbol_address(f"{name}_work")

    @njit(**EXACT)
    def body(frame):
        rows, inputs = operand(frame, 0)[1][0], operand(frame, 0)[1][1]
        job_address = job_memory()
        job = words(job_address, JOB_WORDS)
        size, copies = bytes_of_rows(rows, inputs), num_threads()
        owned = rows <= OWN_ROWS and copies * size <= OWN_BYTES
        memory = allocate(CACHE_LINE + (copies * size if owned else size))
        job[FRAME], job[ROWS], job[COUNTER] = frame, (memory + CACHE_LINE - 1) & -CACHE_LINE, 0
        job[COPY] = size if owned else 0
        if not owned:
            parallel_for(rows_address(), job_address, (rows + ROWS_PER_CHUNK - 1) // ROWS_PER_CHUNK)
        parallel_for(work_address(), job_address, num_threads())
        free(memory)

    yield name, xla_handler(body)


def _multiply_blocks(dtype: str, scaled: bool, blocked: bool, instructions: InstructionSet) -> Any:
    """`multiply_blocks(frame, counter, laid_out)`: all rows times the blocks of columns that a thread gets.

    It takes neighbouring ones from the counter at an address until none are left. `laid_out` is the address
    of the rows; the arguments are those of `build`.
    """
    size, scale = ITEMSIZE[dtype], scale_columns()
    num_blocks, blocks_per_chunk, locate, _ = block_places(blocked)
    multiply, bytes_of_rows = instructions.multiply, instructions.bytes_of_rows
    end_of_pass = pass_end(instructions.rows_of_pass)

    @njit(**EXACT)
    def multiply_blocks(frame, counter, laid_out):
        count = num_blocks(frame)
        per_chunk = blocks_per_chunk(count)
        shape = operand(frame, 0)[1]
        rows, inputs = shape[0], shape[1]
        begin = take(counter, per_chunk)
        while begin < count:
            end, first = min(count, begin + per_chunk), 0
            while first < rows:
                last = end_of_pass(first, rows, inputs)
                source = laid_out + bytes_of_rows(first, inputs)
                for b in range(begin, end):
                    w, column = locate(frame, b)
                    weight, weight_shape = operand(frame, 1 + w)
                    width = weight_shape[0] * matmul.BLOCK if blocked else weight_shape[1]
                    stride = matmul.BLOCK if blocked else width
                    column_size = size * inputs if blocked else size
                    likely = b + 1 if b + 1 < end else min(count - 1, begin + num_threads() * per_chunk)
                    next_weight, next_column = locate(frame, likely)
                    following = operand(frame, 1 + next_weight)[0] + column_size * next_column
                    columns = min(matmul.BLOCK, width - column)
                    out = result(frame, w)[0] + 4 * (first * width + column)
                    weight += column_size * column
                    multiply(source, last - first, inputs, weight, stride, width, out, columns, following)
                    if scaled:
                        scale(frame, w, column, out, last - first, width, columns)
                first = last
            begin = take(counter, per_chunk)

    return multiply_blocks
