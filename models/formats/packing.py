"""Small unsigned integers packed into words of 32 bits, lowest bits first."""

import numpy as np

WORD = 32


def unpack(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The integers in words, along an axis.

    Args:
        words: uint32 or int32, a matrix.
        bits: number of bits of an integer; a divisor of 32.
        axis: along which neighbours share a word.

    Returns:
        int32, `32 / bits` times as long along the axis.

    >>> unpack(np.array([[0x76543210]], np.uint32), 4, axis=1).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    wide = np.expand_dims(np.ascontiguousarray(words).view(np.uint32), axis + 1)
    shape = [1] * wide.ndim
    shape[axis + 1] = len(shifts)
    values = (wide >> shifts.reshape(shape)) & np.uint32((1 << bits) - 1)
    return values.astype(np.int32).reshape(
        [n * (len(shifts) if i == axis else 1) for i, n in enumerate(words.shape)]
    )


def unpack_range(words: np.ndarray, bits: int, axis: int, part: slice) -> np.ndarray:
    """The integers `part` along an axis; only the words that hold them are read.

    Args:
        words: uint32 or int32, a matrix.
        bits: number of bits of an integer; a divisor of 32.
        axis: along which neighbours share a word.
        part: first integer and the one after the last.
    """
    per_word = WORD // bits
    first = part.start // per_word
    covering = slice(first, -(-part.stop // per_word))
    inside = slice(part.start - first * per_word, part.stop - first * per_word)
    values = unpack(words[covering] if axis == 0 else words[:, covering], bits, axis)
    return values[inside] if axis == 0 else values[:, inside]
