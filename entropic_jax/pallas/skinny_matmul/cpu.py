"""Skinny matrix products on a CPU: the threads share the columns, and every weight is read once.

XLA hands each product to threads of its own and waits for them, however small it is, and multiplies bfloat16
at a fraction of the memory's bandwidth. Here bfloat16 is widened in registers: weights that were published in
bfloat16 take half of the time of float32, with the same result. Matrix units (AMX) multiply them by rows of
float32 in parts, with the precision of float32; they and AVX512-BF16 multiply rows that are rounded.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ... import cpu_runtime
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.matrix_units import matrix_units_missing, quads_missing, rounded_products_missing
from ...cpu_runtime.run_once import run_once
from .reference import BLOCK_COLUMNS, QUAD

SKINNY_ROWS = 64  # up to which a product costs little more than reading the weights
PACKED = "uint8"  # two numbers of 4 bits
GROUP_STEP = 32  # inputs; groups are multiples of it
WEIGHT_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", PACKED)
SCALED = ("int8", "float8_e4m3fn")  # by column
ROUNDED = "bfloat16"  # operands of the matrix units, and of AVX512-BF16
ROUNDED_WEIGHTS = ("bfloat16", *SCALED)  # whose numbers bfloat16 holds
LAYOUTS = {BLOCK_COLUMNS: "blocks", QUAD * BLOCK_COLUMNS: "quads"}  # by the last axis; else tiles
MAX_QUAD_INPUTS = 2**16  # whose products an int32 can sum


def supports_weight(dtype: Any) -> bool:
    """Whether `skinny_matmul` accepts float32 rows and weights of this dtype."""
    return cpu_runtime.unavailable_reason() is None and jnp.dtype(dtype).name in WEIGHT_DTYPES


def supports_rows(rows: int) -> bool:
    """Whether `skinny_matmul` accepts so many rows."""
    try:
        _check_rows(rows)
    except NotImplementedError:
        return False
    return cpu_runtime.unavailable_reason() is None


def _check_rows(rows: int) -> None:
    """Raise NotImplementedError for more rows than the kernel multiplies."""
    if rows > SKINNY_ROWS:
        cpu_runtime.check_prefill(rows)


def rounds_operands() -> bool:
    """Whether `skinny_matmul` accepts `operand_dtype="bfloat16"`."""
    return cpu_runtime.unavailable_reason() is None and rounded_products_missing() is None


def multiplies_8_bits() -> bool:
    """Whether `skinny_matmul` accepts `operand_dtype="int8"`."""
    return cpu_runtime.unavailable_reason() is None and quads_missing() is None


def skinny_matmul(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...] = (),
    operand_dtype: str | None = None,
) -> tuple[jax.Array, ...]:
    """Float32 rows times weights of one of `WEIGHT_DTYPES`, or of `ROUNDED_WEIGHTS` with rounded rows.

    The contract is in the package's docstring.
    """
    if operand_dtype == "int8":
        return _multiply_8_bits(x, weights, scales)
    reason = cpu_runtime.unavailable_reason() or (operand_dtype and rounded_products_missing())
    if reason:
        raise NotImplementedError(reason)
    accepted = WEIGHT_DTYPES if operand_dtype is None else ROUNDED_WEIGHTS
    dtypes = {weight.dtype.name for weight in weights}
    if x.dtype != jnp.float32 or len(dtypes) > 1 or not dtypes <= {*accepted}:
        names = ", ".join(sorted(dtypes))
        raise NotImplementedError(
            f"{x.dtype} times {names}: only float32 times one of {', '.join(accepted)} is supported"
        )
    _check_rows(x.shape[0])
    layouts = {_layout(weight) for weight in weights}
    if layouts == {"quads"}:
        raise NotImplementedError("only rows of 8 bits are multiplied by weights in quads")
    if layouts != {"columns"} and (len(layouts) > 1 or dtypes == {PACKED}):
        raise NotImplementedError("only all weights together lie block by block, and none that are packed")
    if dtypes == {PACKED}:
        check_groups(x.shape[1], scales)
    (dtype,) = dtypes
    operands = "rounded" if operand_dtype is not None else "split" if splits_operands(dtype) else "float32"
    has_units = matrix_units_missing() is None
    if layouts == {"tiles"} and (operands == "float32" or dtype != ROUNDED or not has_units):
        raise NotImplementedError(f"tiles of {dtype}: only matrix units read tiles, of {ROUNDED}")
    if operands == "rounded" and not has_units and x.shape[1] % 2:
        raise NotImplementedError(f"{x.shape[1]} inputs: only an even number is supported by AVX512-BF16")
    return _call(_register(dtype, operands, *layouts), x, weights, scales)


def _multiply_8_bits(
    x: jax.Array, weights: tuple[jax.Array, ...], scales: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Float32 rows, rounded to 8 bits, times weights of int8 in quads."""
    if reason := cpu_runtime.unavailable_reason() or quads_missing():
        raise NotImplementedError(reason)
    kinds = {(weight.dtype.name, _layout(weight)) for weight in weights}
    if x.dtype != jnp.float32 or kinds != {("int8", "quads")}:
        raise NotImplementedError(f"{x.dtype} times {kinds}: only float32 times int8 in quads is supported")
    if x.shape[1] > MAX_QUAD_INPUTS:
        raise NotImplementedError(f"{x.shape[1]} inputs: at most {MAX_QUAD_INPUTS} are supported")
    _check_rows(x.shape[0])
    return _call(_register("int8", "int8", "quads"), x, weights, scales)


def _call(
    name: str, x: jax.Array, weights: tuple[jax.Array, ...], scales: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The products by a kernel.

    Args:
        name: of the kernel.
        x: as for `skinny_matmul`.
        weights: as for `skinny_matmul`.
        scales: as for `skinny_matmul`.
    """
    columns = (w.shape[1] if w.ndim == 2 else w.shape[0] * BLOCK_COLUMNS for w in weights)
    shapes = tuple(jax.ShapeDtypeStruct((x.shape[0], count), x.dtype) for count in columns)
    return tuple(jax.ffi.ffi_call(name, shapes, vmap_method="sequential")(x, *weights, *scales))


def check_groups(inputs: int, scales: tuple[jax.Array, ...]) -> None:
    """Raise NotImplementedError unless packed weights have scales that the kernel reads.

    Args:
        inputs: the number of inputs of a matrix.
        scales: `[..., inputs / group, outputs]` of each weight.
    """
    for scale in scales:
        group, rest = divmod(inputs, scale.shape[-2])
        if scale.dtype != jnp.bfloat16 or rest or group % GROUP_STEP:
            raise NotImplementedError(
                f"scales {scale.dtype}{list(scale.shape)} of {inputs} inputs: only bfloat16 with groups of a "
                f"multiple of {GROUP_STEP} inputs is supported"
            )


def splits_operands(dtype: str) -> bool:
    """Whether float32 rows are multiplied by weights of a dtype on matrix units, in parts of bfloat16."""
    if dtype != ROUNDED or cpu_runtime.unavailable_reason() is not None:
        return False
    return matrix_units_missing() is None


def _layout(weight: jax.Array) -> str:
    """How a weight lies: "columns", "blocks", "tiles" or "quads"."""
    return "columns" if weight.ndim == 2 else LAYOUTS.get(weight.shape[2], "tiles")


@run_once
def _register(dtype: str, operands: str, layout: str) -> str:
    """Register the product with weights of a dtype with XLA; returns its name there.

    Args:
        dtype: of the weights.
        operands: "float32" as they are, "rounded" to bfloat16, "split" into parts of it, or "int8".
        layout: see `_layout`.
    """
    suffixes = [suffix for suffix in (layout, operands) if suffix not in ("columns", "float32")]
    name = "_".join(["entropic_skinny_matmul", dtype, *suffixes])
    if operands == "float32":
        register(name, lambda: _compile(name, dtype, layout == "blocks"))
    else:
        register(name, lambda: _compile_rounded(name, dtype, layout, operands))
    return name


def _compile_rounded(name: str, dtype: str, layout: str, operands: str) -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.row_tiles import SPLIT
    from . import cpu_matrix_units, cpu_pairs, cpu_quads
    from .cpu_rounded import build

    if operands == "int8":
        instructions = cpu_quads.instructions()
    elif matrix_units_missing() is None:
        parts = SPLIT if operands == "split" else 1
        instructions = cpu_matrix_units.instructions(dtype, layout, parts)
    else:
        instructions = cpu_pairs.instructions(dtype, layout != "columns")
    yield from build(name, dtype, dtype in SCALED, layout != "columns", instructions)


def _compile(name: str, dtype: str, blocked: bool) -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.instructions import ITEMSIZE
    from ...cpu_runtime.kernel import (
        EXACT,
        njit,
        operand,
        parallel_for,
        result,
        symbol_address,
        thread_task,
        xla_handler,
    )
    from ...cpu_runtime.matmul import BLOCK
    from .cpu_blocks import block_places, pass_end

    num_blocks, blocks_per_chunk, locate, next_block = block_places(blocked)
    end_of_pass = pass_end()
    multiply = _packed_product() if dtype == PACKED else _product(dtype)
    size = 1 if dtype == PACKED else ITEMSIZE[dtype]

    @njit(**EXACT)
    def chunk(frame, number):
        """All rows times some neighbouring blocks of columns."""
        count = num_blocks(frame)
        per_chunk = blocks_per_chunk(count)
        x, shape = operand(frame, 0)
        rows, inputs = shape[0], shape[1]
        end = min(count, (number + 1) * per_chunk)
        first = 0
        while first < rows:
            last = end_of_pass(first, rows, inputs)
            for b in range(number * per_chunk, end):
                w, column = locate(frame, b)
                weight, weight_shape = operand(frame, 1 + w)
                width = weight_shape[0] * BLOCK if blocked else weight_shape[1]
                stride = BLOCK if blocked else width
                column_size = size * inputs if blocked else size
                weight += column_size * column
                out = result(frame, w)[0] + 4 * (first * width + column)
                next_weight, next_column = locate(frame, next_block(b, end, number, per_chunk))
                following = operand(frame, 1 + next_weight)[0] + column_size * next_column
                source, n = x + 4 * first * inputs, last - first
                multiply(frame, w, column, source, n, inputs, weight, stride, width, out, following)
            first = last

    yield f"{name}_chunk", thread_task(chunk)
    chunk_address = symbol_address(f"{name}_chunk")

    @njit(**EXACT)
    def body(frame):
        count = num_blocks(frame)
        per_chunk = blocks_per_chunk(count)
        parallel_for(chunk_address(), frame, (count + per_chunk - 1) // per_chunk)

    yield name, xla_handler(body)


def _product(dtype: str) -> Any:
    """`product(frame, w, column, x, rows, inputs, weight, stride, width, out, following)`: rows by a block.

    The arguments from x on are those of `cpu_blocks.multiply_block`; w and column say which block it is.
    """
    from ...cpu_runtime.kernel import EXACT, njit
    from ...cpu_runtime.matmul import BLOCK
    from .cpu_blocks import multiply_block, multiply_part, scale_columns

    full_block, part_of_block = multiply_block(dtype), multiply_part(dtype)
    scaled, scale = dtype in SCALED, scale_columns()

    @njit(**EXACT)
    def product(frame, w, column, x, rows, inputs, weight, stride, width, out, following):
        if width - column < BLOCK:
            part_of_block(x, rows, inputs, weight, width, out, width - column)
        else:
            full_block(x, rows, inputs, weight, stride, width, out, following)
        if scaled:
            scale(frame, w, column, out, rows, width, min(BLOCK, width - column))

    return product


def _packed_product() -> Any:
    """The product of `_product` with packed weights, whose scales are operands behind all weights."""
    from ...cpu_runtime.kernel import EXACT, njit, operand, words
    from ...cpu_runtime.matmul import BLOCK
    from .cpu_int4 import multiply_block, multiply_part

    full_block, part_of_block = multiply_block(), multiply_part()

    @njit(**EXACT)
    def packed_product(frame, w, column, x, rows, inputs, weight, stride, width, out, following):
        scales, shape = operand(frame, 1 + words(frame, 15)[12] + w)
        scale, group = scales + 2 * column, inputs // shape[0]
        if width - column < BLOCK:
            part_of_block(x, rows, inputs, weight, width, out, width - column, scale, group)
        else:
            full_block(x, rows, inputs, weight, width, out, following, scale, group)

    return packed_product
