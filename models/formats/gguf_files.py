"""GGUF files of llama.cpp: their metadata, and tensors of which rows are dequantised as they are read.

Source: ggml, `docs/gguf.md`.
"""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelError, require_file
from .ggml_blocks import BLOCK_TYPES, BlockType
from .stored import release_pages, require_names

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = dict(enumerate("<u1 <i1 <u2 <i2 <u4 <i4 <f4 ?".split())) | {10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
LONGEST_ARRAY, MOST_ENTRIES, MOST_AXES = 4_000_000, 1_000_000, 4


class GGUFTensor:
    """A tensor in a GGUF file; reading rows dequantises them.

    Args:
        data: the bytes of its rows, `[rows, bytes]`.
        shape: the shape of the tensor.
        kind: the type of its blocks.
        file: the file that holds the tensor.
    """

    dtype = "F32"

    def __init__(self, data: np.ndarray, shape: tuple[int, ...], kind: BlockType, file: Path) -> None:
        self.data, self.shape, self.kind, self.file = data, shape, kind, file

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Elements of a vector, or rows of a matrix, selected by a slice or by numbers."""
        with np.errstate(over="ignore", invalid="ignore"):  # of scales that are damaged
            if len(self.shape) < 2:
                return self.kind.decode(self.data.reshape(-1, self.kind.size)).reshape(self.shape)[rows]
            selected = self.data[rows]
            return self.kind.decode(selected.reshape(-1, self.kind.size)).reshape(len(selected), -1)

    def part(self, number: int) -> "GGUFTensor":
        """One matrix of a stack."""
        return GGUFTensor(self.data[number], self.shape[1:], self.kind, self.file)

    def as_row(self) -> "GGUFTensor":
        """A vector as a matrix of one row."""
        return GGUFTensor(self.data[None], (1, *self.shape), self.kind, self.file)

    def release(self) -> None:
        """See `release_pages`."""
        release_pages(self.data)


class Cursor:
    """A position in the metadata of a GGUF file; values past its end raise ValueError."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.place = data, 0

    def take(self, size: int) -> bytes:
        part = self.data[self.place : self.place + size]
        if size > len(part):
            raise ValueError("it ends within its metadata")
        self.place += size
        return part.tobytes()

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A number, a string, or a list of them."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.numbers(kind, 1)[0]
        kind, count = self.number("I"), self.number("Q")
        if count > LONGEST_ARRAY:
            raise ValueError(f"an array must have at most {LONGEST_ARRAY} entries; got {count}")
        return [self.text() for _ in range(count)] if kind == STRING else self.numbers(kind, count)

    def numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in NUMBERS:
            raise ValueError(f"a value must be of a known type; got {kind}")
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


class GGUFFile:
    """The metadata and tensors of a GGUF file. Raises ModelError for one that is damaged."""

    def __init__(self, path: Path) -> None:
        require_file(path)
        self.path = path
        try:
            data = np.memmap(path, np.uint8, "r")
            cursor = Cursor(data)
            version = cursor.number("I") if cursor.take(4) == MAGIC else 0
            if version not in VERSIONS:
                raise ValueError(f"its version must be {' or '.join(map(str, VERSIONS))}; got {version}")
            num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
            if max(num_tensors, num_values) > MOST_ENTRIES:
                raise ValueError(f"it must have at most {MOST_ENTRIES} tensors and values")
            self.metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_values)}
            infos = dict(self.read_info(cursor) for _ in range(num_tensors))
            alignment = self.metadata.get("general.alignment", 32)
            if not isinstance(alignment, int) or alignment < 1:
                raise ValueError(f"general.alignment must be a positive integer; got {alignment!r}")
            begin = -(-cursor.place // alignment) * alignment
            self.tensors = {name: self.tensor(data[begin:], name, *info) for name, info in infos.items()}
        except ModelError:
            raise
        except (ValueError, OSError, struct.error) as error:
            raise ModelError(f"{path} must be a GGUF file that can be read: {error}") from None

    def read_info(self, cursor: Cursor) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """The name of a tensor, and its shape, type and offset."""
        name, axes = cursor.text(), cursor.number("I")
        require_names(self.path, (name,))
        if axes > MOST_AXES:
            raise ValueError(f"{name} must have at most {MOST_AXES} axes; got {axes}")
        lengths = [cursor.number("Q") for _ in range(axes)]
        return name, (tuple(reversed(lengths)), cursor.number("I"), cursor.number("Q"))

    def tensor(
        self, data: np.ndarray, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GGUFTensor:
        """A tensor in the file.

        Args:
            data: the bytes behind the metadata.
            name: the name of the tensor.
            shape: the shape of the tensor.
            kind: number of its type.
            offset: the offset of its first byte.
        """
        if kind not in BLOCK_TYPES:
            names = ", ".join(known.name for known in BLOCK_TYPES.values())
            raise ValueError(f"{name} must be of type {names}; got type {kind}")
        block, width = BLOCK_TYPES[kind], shape[-1] if shape else 1
        if width % block.numbers:
            raise ValueError(f"rows of {name} must be multiples of {block.numbers}; got {width}")
        row, rows = width // block.numbers * block.size, math.prod(shape[:-1])
        stored = data[offset : offset + rows * row]
        if len(stored) != rows * row or 0 in shape:
            raise ValueError(f"{name} must have {rows} rows of {row} bytes; got {len(stored)} bytes")
        return GGUFTensor(stored.reshape(*shape[:-1], row), shape, block, self.path)
