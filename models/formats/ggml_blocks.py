"""Blocks of quantised numbers as ggml stores them, and the floats that they stand for.

A row is a sequence of blocks of 32 or 256 numbers. A block holds small integers and one or two half-precision
scales; blocks of 256 ("K") also have a 6-bit or 8-bit scale for every 32 or 16 numbers.

Source: ggml, `ggml-common.h` (struct `block_*`) and `docs/gguf.md`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class BlockType(NamedTuple):
    """A type of tensors in a GGUF file."""

    name: str
    numbers: int  # in a block
    size: int  # of a block, bytes
    decode: Callable[[np.ndarray], np.ndarray]  # bytes [blocks, size] to float32 [blocks, numbers]


def halves(blocks: np.ndarray, begin: int, count: int = 1) -> np.ndarray:
    """Half-precision floats of every block, float32 `[blocks, count]`.

    Args:
        blocks: bytes.
        begin: where the first one begins in a block.
        count: how many.
    """
    part = np.ascontiguousarray(blocks[:, begin : begin + 2 * count])
    return part.view(np.dtype("<f2")).astype(np.float32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """All low halves of bytes `[…, n]`, then all high halves: `[…, 2n]`."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def plain(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: np.ascontiguousarray(blocks).view(np.dtype(dtype)).astype(np.float32)


def bfloat16(blocks: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(blocks).view(np.dtype("<u2")).astype(np.uint32) << 16).view(np.float32)


def q8_0(blocks: np.ndarray) -> np.ndarray:
    return halves(blocks, 0) * blocks[:, 2:].view(np.int8)


def q4_0(blocks: np.ndarray) -> np.ndarray:
    return halves(blocks, 0) * (nibbles(blocks[:, 2:]).astype(np.int8) - 8)


def q4_1(blocks: np.ndarray) -> np.ndarray:
    return halves(blocks, 0) * nibbles(blocks[:, 4:]) + halves(blocks, 2)


def fifth_bits(packed: np.ndarray) -> np.ndarray:
    """32 bits of every block, in place 4, `[blocks, 32]`."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def q5_0(blocks: np.ndarray) -> np.ndarray:
    values = nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return halves(blocks, 0) * (values.astype(np.int8) - 16)


def q5_1(blocks: np.ndarray) -> np.ndarray:
    values = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return halves(blocks, 0) * values + halves(blocks, 2)


def scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes, each float32 `[blocks, 8, 1]`."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    return scales[..., None].astype(np.float32), minima[..., None].astype(np.float32)


def with_minima(blocks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values of the integers of Q4_K and Q5_K, `[blocks, 8, 32]`."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    d, lowest = halves(blocks, 0)[..., None], halves(blocks, 2)[..., None]
    return (d * scales * values - lowest * minima).reshape(len(blocks), -1)


def q4_k(blocks: np.ndarray) -> np.ndarray:
    return with_minima(blocks, nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def q5_k(blocks: np.ndarray) -> np.ndarray:
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return with_minima(blocks, low | (high << 4))


def q6_k(blocks: np.ndarray) -> np.ndarray:
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    values = (low | (high << 4)).astype(np.int8) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * halves(blocks, 208)
    return (values.reshape(-1, 16, 16) * scales[..., None]).reshape(len(blocks), -1)


def quarters(packed: np.ndarray) -> np.ndarray:
    """2-bit integers of 64 bytes, in two halves of four planes of 32, `[blocks, 256]`."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return ((packed.reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(len(packed), -1)


def q2_k(blocks: np.ndarray) -> np.ndarray:
    scales = (blocks[:, :16] & 15) * halves(blocks, 80)
    minima = (blocks[:, :16] >> 4) * halves(blocks, 82)
    values = quarters(blocks[:, 16:80]).reshape(-1, 16, 16)
    return (scales[..., None] * values - minima[..., None]).reshape(len(blocks), -1)


def q3_k(blocks: np.ndarray) -> np.ndarray:
    packed = blocks[:, 96:108]
    high = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    scales = (nibbles(packed[:, :8]) | (high.reshape(-1, 16) << 4)).astype(np.int8) - 32
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    values = quarters(blocks[:, 32:96]) | (third.reshape(-1, 256) << 2)
    values = (values.astype(np.int8) - 4).reshape(-1, 16, 16)
    return ((halves(blocks, 108) * scales)[..., None] * values).reshape(len(blocks), -1)


# The 16 values of the "non-linear" 4-bit integers.
CURVE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return halves(blocks, 0) * CURVE[nibbles(blocks[:, 2:])]


def iq4_xs(blocks: np.ndarray) -> np.ndarray:
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=-1).reshape(-1, 8)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.dtype("<u2"))
    high = (high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (low | (high << 4)).astype(np.float32) - 32
    values = CURVE[nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    return ((halves(blocks, 0) * scales)[..., None] * values).reshape(len(blocks), -1)


BLOCK_TYPES = {  # by their number in a file
    0: BlockType("F32", 1, 4, plain("<f4")),
    1: BlockType("F16", 1, 2, plain("<f2")),
    2: BlockType("Q4_0", 32, 18, q4_0),
    3: BlockType("Q4_1", 32, 20, q4_1),
    6: BlockType("Q5_0", 32, 22, q5_0),
    7: BlockType("Q5_1", 32, 24, q5_1),
    8: BlockType("Q8_0", 32, 34, q8_0),
    10: BlockType("Q2_K", 256, 84, q2_k),
    11: BlockType("Q3_K", 256, 110, q3_k),
    12: BlockType("Q4_K", 256, 144, q4_k),
    13: BlockType("Q5_K", 256, 176, q5_k),
    14: BlockType("Q6_K", 256, 210, q6_k),
    20: BlockType("IQ4_NL", 32, 18, iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, iq4_xs),
    30: BlockType("BF16", 1, 2, bfloat16),
}
