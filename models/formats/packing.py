"""Small unsigned integers packed into words of 32 bits, lowest bits first."""

import math

import numpy as np

WORD = 32


def unpack(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The integers in words, along an axis.

    Args:
        words: uint32 or int32, a matrix.
        bits: number of bits of an integer. Where they do not divide 32, integers reach over words.
        axis: along which neighbours share a word.

    Returns:
        int32, `32 / bits` times as long along the axis.

    >>> unpack(np.array([[0x76543210]], np.uint32), 4, axis=1).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    if WORD % bits:
        return unpack_stream(words, bits, axis)
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    wide = np.expand_dims(np.ascontiguousarray(words).view(np.uint32), axis + 1)
    shape = [1] * wide.ndim
    shape[axis + 1] = len(shifts)
    values = (wide >> shifts.reshape(shape)) & np.uint32((1 << bits) - 1)
    return values.astype(np.int32).reshape(
        [n * (len(shifts) if i == axis else 1) for i, n in enumerate(words.shape)]
    )


def unpack_stream(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The integers in words that some of them share with the next word.

    Args:
        words: uint32 or int32, a matrix; as many along the axis as whole integers fill.
        bits: number of bits of an integer.
        axis: along which neighbours follow each other.

    >>> unpack_stream(np.array([[0xFAC68800 & 0xFFFFFFFF, 0, 0]], np.uint32), 3, axis=1)[0, 3:11].tolist()
    [4, 0, 5, 1, 6, 2, 7, 3]
    """
    rows = np.ascontiguousarray(np.moveaxis(words, axis, 1)).view(np.uint32).astype("<u4")
    stream = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    count = stream.shape[1] // bits
    parts = stream[:, : count * bits].reshape(len(rows), count, bits)
    values = parts @ (1 << np.arange(bits, dtype=np.int32))
    return np.moveaxis(values.astype(np.int32), 1, axis)


def unpack_range(words: np.ndarray, bits: int, axis: int, part: slice) -> np.ndarray:
    """The integers `part` along an axis; only the words that hold them are read.

    Args:
        words: uint32 or int32, a matrix.
        bits: number of bits of an integer.
        axis: along which neighbours share a word.
        part: first integer and the one after the last.
    """
    size = math.lcm(WORD, bits) // WORD  # words that hold whole integers
    per_part = size * WORD // bits
    first = part.start // per_part
    covering = slice(first * size, -(-part.stop // per_part) * size)
    inside = slice(part.start - first * per_part, part.stop - first * per_part)
    values = unpack(words[covering] if axis == 0 else words[:, covering], bits, axis)
    return values[inside] if axis == 0 else values[:, inside]
