"""Storing one key and value per row on a CPU, in place, with the summaries of the pages they go to.

As XLA operations these are six small updates per row and layer, whose dispatch costs more than their work.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..native import library
from ..native.once import once
from .cpu import declines


def write(tiles, summaries, k, v, page, slot):
    """See the package; float32."""
    declines(*(x.dtype for x in (*tiles, *summaries, k, v)))
    pools = (*tiles, *summaries)
    name = _register(k.shape[1], k.shape[2], tiles[0].shape[2])
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools)
    aliases = {i: i for i in range(len(pools))}
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential", input_output_aliases=aliases)
    written = call(*pools, k, v, page, slot)
    return written[:2], written[2:]


@once
def _register(kv_heads: int, head_dim: int, page_size: int) -> str:
    name = f"entropic_write_{kv_heads}_{head_dim}_{page_size}"
    library.register(name, lambda: _compile(name, kv_heads, head_dim, page_size))
    return name


def _compile(name: str, kv_heads: int, head_dim: int, page_size: int) -> Iterator[tuple[str, Any]]:
    from numba import carray, njit

    from ..native.call import handler, operand, pointer, result

    @njit(nogil=True)
    def body(frame):
        data, shape = operand(frame, 6)
        rows = shape[0]
        key = carray(pointer(data), (rows, kv_heads, head_dim), np.float32)
        value = carray(pointer(operand(frame, 7)[0]), (rows, kv_heads, head_dim), np.float32)
        page = carray(pointer(operand(frame, 8)[0]), (rows,), np.int32)
        slot = carray(pointer(operand(frame, 9)[0]), (rows,), np.int32)
        data, pool_shape = result(frame, 0)
        pool = pool_shape[0]
        keys = carray(pointer(data), (pool, kv_heads, page_size, head_dim), np.float32)
        values = carray(pointer(result(frame, 1)[0]), (pool, kv_heads, page_size, head_dim), np.float32)
        low = carray(pointer(result(frame, 2)[0]), (pool, kv_heads, head_dim), np.float32)
        high = carray(pointer(result(frame, 3)[0]), (pool, kv_heads, head_dim), np.float32)
        total = carray(pointer(result(frame, 4)[0]), (pool, kv_heads, head_dim), np.float32)
        norm = carray(pointer(result(frame, 5)[0]), (pool, kv_heads), np.float32)
        for row in range(rows):
            p, s = page[row], slot[row]
            for head in range(kv_heads):
                square = np.float32(0)
                for d in range(head_dim):
                    x, y = key[row, head, d], value[row, head, d]
                    keys[p, head, s, d], values[p, head, s, d] = x, y
                    square += y * y
                    if s == 0:
                        low[p, head, d], high[p, head, d], total[p, head, d] = x, x, x
                    else:
                        low[p, head, d] = min(low[p, head, d], x)
                        high[p, head, d] = max(high[p, head, d], x)
                        total[p, head, d] += x
                largest = np.sqrt(square)
                norm[p, head] = largest if s == 0 else max(norm[p, head], largest)

    yield name, handler(body)
