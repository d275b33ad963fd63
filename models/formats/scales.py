"""Scales of blocks of a matrix: how many there are, and the scale of every element."""

from typing import NamedTuple

import numpy as np


class ScaleGrid(NamedTuple):
    """A matrix [out, in] in blocks of `height` rows and `width` columns, each with one scale."""

    out: int
    inputs: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many blocks there are, down and across."""
        return -(-self.out // self.height), -(-self.inputs // self.width)

    @property
    def stored_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes in which files hold the scales: axes of length 1 may be absent."""
        down, across = self.shape
        return ((down, across), *([(down,)] if across == 1 else []), *([()] if down == across == 1 else []))

    def select(self, scales: np.ndarray, rows: slice) -> np.ndarray:
        """The scales of rows, `[rows, blocks across]`.

        Args:
            scales: the scales of all blocks.
            rows: first row and the one after the last.
        """
        return scales.reshape(self.shape)[np.arange(rows.start, rows.stop) // self.height]

    def spread(self, selected: np.ndarray) -> np.ndarray:
        """The scales of every element of rows, `[rows, in]`, or `[rows, 1]` where a row has one scale."""
        return (
            selected if selected.shape[1] == 1 else np.repeat(selected, self.width, axis=1)[:, : self.inputs]
        )


def per_tensor(out: int, inputs: int) -> ScaleGrid:
    return ScaleGrid(out, inputs, out, inputs)


def per_row(out: int, inputs: int) -> ScaleGrid:
    return ScaleGrid(out, inputs, 1, inputs)


def per_group(out: int, inputs: int, size: int) -> ScaleGrid:
    """Groups of `size` neighbours in a row; −1: all of a row.

    Args:
        out: rows.
        inputs: columns.
        size: the size of a group.
    """
    return ScaleGrid(out, inputs, 1, inputs if size == -1 else size)
