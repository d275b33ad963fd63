"""Safetensors files, memory-mapped."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ..config import ModelError, require_file
from .stored import StoredTensor, numpy_dtype, require_names

LARGEST_HEADER = 16_000_000  # bytes: 100 000 tensors


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file. Raises ModelError for a file that is missing or damaged."""
    require_file(path)
    try:
        check_header_size(path)
        with safe_open(path, framework="numpy"):  # checks the header and the sizes
            header, begin = read_header(path)
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise ModelError(
            f"{path} must be a complete safetensors file; got {size} bytes that cannot be read ({error})"
        ) from None
    require_names(path, header)
    data = np.memmap(path, np.uint8, "r")[begin:]
    return {name: tensor_of(entry, data, path) for name, entry in header.items()}


def check_header_size(path: Path) -> None:
    """Raise ValueError for a header that takes seconds to parse."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if LARGEST_HEADER < length < path.stat().st_size:
        raise ValueError(f"its header must be at most {LARGEST_HEADER} bytes; got {length}")


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The entry of every tensor, and where in the file the data begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


def tensor_of(entry: dict[str, Any], data: np.ndarray, path: Path) -> StoredTensor:
    """The tensor that an entry of the header describes.

    Args:
        entry: dtype, shape and offsets.
        data: the bytes behind the header.
        path: the path of the file.
    """
    begin, end = entry["data_offsets"]
    array = data[begin:end].view(numpy_dtype(entry["dtype"]))
    shape = entry["shape"]
    return StoredTensor(array.reshape(shape if array.size == math.prod(shape) else -1), entry["dtype"], path)
