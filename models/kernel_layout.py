"""Layout of matrices: block by block, as the CPU's products read them.

A product reads one block of columns after the other. In a matrix `[inputs, outputs]` the rows of a block lie
far apart, in wide matrices each on a page of memory of its own; `[outputs / 64, inputs, 64]` has them one
behind the other. On processors with matrix units a block of bfloat16 lies as their tiles. The numbers and the
order in which they are added are the same, so results are equal to the bit. Matrices lie in quads where
rows are rounded to 8 bits.
"""

from typing import Any

import jax
import numpy as np

from entropic_jax.pallas import grouped_matmul, skinny_matmul

from .embedding import EMBEDDING_MODULE
from .host_memory import aligned_empty, bits

# Matrices that only `layers.multiply` reads; those of one dict may be multiplied together.
MULTIPLIED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc", "lm_head")


def block_kernels(params: Any, in_quads: bool = False) -> bool:
    """Put matrices in blocks where a kernel of this machine reads them so, in place: one at a time is copied.

    Those of one layer's attention, or of its feed-forward part, are all in blocks or none is.

    Args:
        params: nested dicts and tuples of arrays, on one device.
        in_quads: whether they are of int8, to lie in quads.

    Returns:
        Whether there is such a matrix.
    """
    if isinstance(params, tuple):
        return sum(block_kernels(part, in_quads) for part in params) > 0
    if not isinstance(params, dict):
        return False
    multiplied = [part for name in MULTIPLIED if "kernel" in (part := _as_dict(params.get(name)))]
    blocked = bool(multiplied) and all(_reads_blocked(part["kernel"]) for part in multiplied)
    if blocked:
        table = _as_dict(params.get(EMBEDDING_MODULE))
        for part in multiplied:
            _put_in_blocks(part, table, in_quads)
    return blocked + sum(block_kernels(part, in_quads) for part in params.values()) > 0


def _reads_blocked(kernel: jax.Array) -> bool:
    product = skinny_matmul if kernel.ndim == 2 else grouped_matmul
    return product.reads_blocked(kernel)


def _as_dict(part: Any) -> dict[str, Any]:
    return part if isinstance(part, dict) else {}


def _put_in_blocks(part: dict[str, Any], table: dict[str, Any], in_quads: bool) -> None:
    """Put the kernel of a layer in blocks, in the embedding as well where that is the same array."""
    before = part["kernel"]
    part["kernel"] = _in_blocks(before, in_quads)
    if table.get("weight") is before:
        table["weight"] = part["kernel"]


def _in_blocks(kernel: jax.Array, in_quads: bool) -> jax.Array:
    """Lays a matrix out in blocks; by NumPy, because XLA would compile a program for every shape."""
    lay_out = skinny_matmul.in_tiles if skinny_matmul.reads_tiles(kernel) else skinny_matmul.in_blocks
    lay_out = skinny_matmul.in_quads if in_quads else lay_out
    lay_out = lay_out if kernel.ndim == 2 else grouped_matmul.in_blocks
    laid_out = lay_out(bits(np.asarray(kernel)))
    host = aligned_empty(laid_out.shape, np.dtype(kernel.dtype))
    bits(host)[...] = laid_out
    return jax.device_put(host, kernel.sharding)
