"""Tensors as they are stored in a file: memory-mapped, with a name, a shape and a dtype."""

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..config import ModelError, abbreviate
from .file_rows import mapping_of, read_rows

# Dtypes by the codes of safetensors. 8-bit floats are read as bytes and looked up in tables.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INTEGERS = {"BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16"} | {
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
}
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
FLOAT8_VALUES = {
    code: np.arange(256, dtype=np.uint8).view(jnp.dtype(name)).astype(np.float32)
    for code, name in FLOAT8.items()
}


LONGEST_NAME = 255  # characters of a tensor's name


def require_names(path: Path, names: Iterable[object]) -> None:
    """Raise ModelError unless the names of tensors in a file can be shown in messages.

    Args:
        path: the path of the file.
        names: the names.
    """
    for name in names:
        if (
            not isinstance(name, str)
            or not (name.isascii() and name.isprintable())
            or len(name) > LONGEST_NAME
        ):
            raise ModelError(
                f"{path}: names of tensors must be at most {LONGEST_NAME} printable ASCII characters; "
                f"got {abbreviate(ascii(name)[1:-1])}"
            )


class StoredTensor:
    """A tensor in a file; an index reads a part of it.

    Args:
        array: memory-mapped.
        dtype: its code, such as "BF16".
        file: the file that holds the tensor.
    """

    def __init__(self, array: np.ndarray, dtype: str, file: Path) -> None:
        self.array, self.dtype, self.file = array, dtype, file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.array[index]

    def block(self, index: Any) -> np.ndarray:
        """A part in one piece, which holds until this thread asks for the next; see `read_rows`."""
        return read_rows(self.array[index], self.file)

    def release(self) -> None:
        """See `release_pages`."""
        release_pages(self.array)


class TensorInMemory(StoredTensor):
    """A tensor that has been read."""

    def block(self, index: Any) -> np.ndarray:
        return self.array[index]

    def release(self) -> None:
        """Its memory is that of a parameter."""


def release_pages(array: np.ndarray) -> None:
    """Let the system reclaim what was read of the file that an array is mapped from.

    Otherwise the pages of a file count as memory of the process until others need it.
    """
    base = mapping_of(array)
    if base is not None and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def numpy_dtype(code: str) -> np.dtype:
    """The NumPy dtype in which a tensor of this code is read."""
    name = DTYPES.get(code) or INTEGERS.get(code)
    return np.dtype(np.uint8) if name is None else jnp.dtype(name)


def as_float32(tensor: StoredTensor, index: Any = ...) -> np.ndarray:
    """A part of a tensor of floats of any width, or of exponents E8M0, in float32."""
    part = tensor[index]
    if tensor.dtype in FLOAT8_VALUES:
        return FLOAT8_VALUES[tensor.dtype][part]
    return part.astype(np.float32)
