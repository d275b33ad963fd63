"""Write of one key and one value per row on a CPU, in place, with the page summaries.

As XLA operations these are six small updates per row and layer, whose dispatch costs more than their work.
With many rows, as in prefill, threads share the heads; a head's rows are written in order, since several may
go to one page.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ...cpu_runtime import check_supported
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once
from .cpu import pool_dtype
from .quantised import LARGEST

ROWS_OF_THREADS = 32  # from which threads share the heads
KEYS = (6, 8)  # the number of the operand with the keys, behind the leaves of pools without scales and with


def write(
    tiles: Any, summaries: Any, k: jax.Array, v: jax.Array, page: jax.Array, slot: jax.Array
) -> tuple[Any, Any]:
    """Float32 vectors into pages of float32, bfloat16 or int8. See the package for the contract."""
    check_supported(*(x.dtype for x in (*summaries, k, v)))
    dtype = pool_dtype(*tiles)
    pools, tree = jax.tree.flatten((tuple(tiles), tuple(summaries)))
    name = _register(k.shape[1], k.shape[2], tiles[0].shape[2], dtype)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools)
    aliases = {i: i for i in range(len(pools))}
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential", input_output_aliases=aliases)
    return tree.unflatten(call(*pools, k, v, page, slot))


@run_once
def _register(kv_heads: int, head_dim: int, page_size: int, dtype: str) -> str:
    name = f"entropic_write_{kv_heads}_{head_dim}_{page_size}_{dtype}"
    register(name, lambda: _compile(name, kv_heads, head_dim, page_size, dtype))
    return name


def _compile(
    name: str, kv_heads: int, head_dim: int, page_size: int, dtype: str
) -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.kernel import (
        compiled,
        operand,
        parallel_for,
        symbol_address,
        thread_task,
        xla_handler,
    )

    write_head = _write_head(kv_heads, head_dim, page_size, dtype)
    yield f"{name}_head", thread_task(write_head)
    head_address = symbol_address(f"{name}_head")
    keys_at = KEYS[dtype == "int8"]

    @compiled
    def body(frame):
        rows = operand(frame, keys_at)[1][0]
        if rows < ROWS_OF_THREADS:
            for head in range(kv_heads):
                write_head(frame, head)
        else:
            parallel_for(head_address(), frame, kv_heads)

    yield name, xla_handler(body)


def _store(head_dim: int, dtype: str) -> Any:
    from ...cpu_runtime.kernel import EXACT, njit

    is_bfloat16, is_int8 = dtype == "bfloat16", dtype == "int8"
    largest, inverse = np.float32(LARGEST["int8"]), np.float32(1 / LARGEST["int8"])

    @njit(**EXACT)
    def store(vector, bits, tile, scale):
        """Store a vector, whose bits are `bits`, in a tile, and replace it by what the tile is read as."""
        if is_int8:
            extent = np.float32(0)
            for d in range(head_dim):
                if extent == extent and not abs(vector[d]) <= extent:  # keeps NaN
                    extent = abs(vector[d])
            scale[0] = extent * inverse if extent != 0 else np.float32(1)
        for d in range(head_dim):
            if is_int8:
                tile[d] = np.int8(min(max(np.rint(vector[d] / scale[0]), -largest), largest))
                vector[d] = np.float32(tile[d]) * scale[0]
            elif is_bfloat16:  # rounds to nearest, ties to even
                odd = (bits[d] >> np.uint32(16)) & np.uint32(1)
                half = (bits[d] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
                half = half if vector[d] == vector[d] else np.uint32(0x7FC0)
                tile[d] = np.uint16(half)
                bits[d] = half << np.uint32(16)
            else:
                tile[d] = vector[d]

    return store


def _write_head(kv_heads: int, head_dim: int, page_size: int, dtype: str) -> Any:
    """Compile the task of a thread: one head of all rows, one after the other."""
    from ...cpu_runtime.kernel import (
        EXACT,
        array,
        floats,
        njit,
        operand,
        operand_floats,
        operand_integers,
        result,
        result_floats,
        stack_memory,
    )

    scratch = stack_memory(8 * head_dim)
    store = _store(head_dim, dtype)
    stored = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[dtype]
    # The operands are the leaves of the pools as a pytree: the scales of a pool follow its tiles.
    values_at, summaries_at = (2, 4) if dtype == "int8" else (1, 2)
    pools = KEYS[dtype == "int8"]

    @njit(**EXACT)
    def write_head(frame, head):
        rows = operand(frame, pools)[1][0]
        key = operand_floats(frame, pools, (rows, kv_heads, head_dim))
        value = operand_floats(frame, pools + 1, (rows, kv_heads, head_dim))
        page = operand_integers(frame, pools + 2, (rows,))
        slot = operand_integers(frame, pools + 3, (rows,))
        data, pool_shape = result(frame, 0)
        shape = (pool_shape[0], kv_heads, page_size, head_dim)
        keys, values = array(data, shape, stored), array(result(frame, values_at)[0], shape, stored)
        # Without scales these views are of other memory, and are not used.
        key_scale = result_floats(frame, 1, shape[:3])
        value_scale = result_floats(frame, values_at + 1, shape[:3])
        low = result_floats(frame, summaries_at, (shape[0], kv_heads, head_dim))
        high = result_floats(frame, summaries_at + 1, (shape[0], kv_heads, head_dim))
        total = result_floats(frame, summaries_at + 2, (shape[0], kv_heads, head_dim))
        norm = result_floats(frame, summaries_at + 3, (shape[0], kv_heads))
        memory = scratch()
        vectors, bits = floats(memory, (2, head_dim)), array(memory, (2, head_dim), np.uint32)
        x, y = vectors[0], vectors[1]
        for row in range(rows):
            p, s = page[row], slot[row]
            for d in range(head_dim):
                x[d], y[d] = key[row, head, d], value[row, head, d]
            store(x, bits[0], keys[p, head, s], key_scale[p, head, s:])
            store(y, bits[1], values[p, head, s], value_scale[p, head, s:])
            square = np.float32(0)
            for d in range(head_dim):
                square += y[d] * y[d]
                if s == 0:
                    low[p, head, d], high[p, head, d], total[p, head, d] = x[d], x[d], x[d]
                else:
                    low[p, head, d] = min(low[p, head, d], x[d])
                    high[p, head, d] = max(high[p, head, d], x[d])
                    total[p, head, d] += x[d]
            value_norm = np.sqrt(square)
            norm[p, head] = value_norm if s == 0 else max(norm[p, head], value_norm)

    return write_head
