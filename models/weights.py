"""Tensors on disk to arrays in memory and back, one tensor at a time.

`tensor_names` says which tensors an array is made of. Files are memory-mapped and read in strips of rows, so
that loading needs the weights once, in the dtype asked for, and one tensor more.
"""

import json
import math
import os
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from entropic_jax.pallas import skinny_matmul

from .config import Config
from .decoder import Params, structure
from .formats.stored import DTYPES, StoredTensor
from .quantisation import Int8Kernel
from .sharding import model_devices, partition_spec
from .stored_tensors import StoredTensors, Tensor, strips
from .tensor_names import ParameterSource, Piece, entries

ALIGNMENT = 64  # bytes, of arrays that a device need not copy
AHEAD = 8  # arrays that the system reads before they are copied
SHARED = 1 << 22  # bytes of an array from which several threads copy it
RELEASED = 1 << 23  # bytes that are copied before the pages of a file are given back
THREADS = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "weights")


def read(
    tensors: StoredTensors,
    config: Config,
    dtype: np.dtype,
    advance: Callable[[int], None],
    as_stored: bool = False,
    mesh: Mesh | None = None,
    int8_kernels: Container[tuple[Any, ...]] = (),
) -> Params:
    """The parameters of a model directory.

    Args:
        tensors: the tensors of the directory.
        config: says which tensors there are.
        dtype: the dtype of the result.
        advance: called with the bytes of every tensor read.
        as_stored: whether a matrix that is bfloat16 on disk stays so where products widen it at no cost.
        mesh: over which every array is divided as soon as it is read; None for the default device.
        int8_kernels: paths of matrices that become an `Int8Kernel` if they are stored as one.
    """
    expected = entries(config)
    tensors.check(expected, config)
    arrays: list[jax.Array | Int8Kernel] = []
    fetch(expected[:AHEAD], tensors)
    for number, entry in enumerate(expected):
        fetch(expected[number + AHEAD : number + AHEAD + 1], tensors)
        int8 = tensors.int8_rows(entry) if entry.path in int8_kernels else None
        if int8 is not None:
            arrays.append(read_int8(entry, *int8, mesh))
        else:
            narrow = as_stored and dtype == np.float32 and stays_narrow(entry, tensors)
            arrays.append(read_array(entry, tensors, jnp.dtype(jnp.bfloat16) if narrow else dtype, mesh))
        for piece in entry.pieces:
            tensors[piece.name].release()
        advance(math.prod(entry.shape) * dtype.itemsize)
    return jax.tree.unflatten(jax.tree.structure(structure(config)[1]), arrays)


def fetch(expected: list[ParameterSource], tensors: StoredTensors) -> None:
    """Have the system begin to read the tensors of arrays."""
    for entry in expected:
        for piece in entry.pieces:
            if isinstance(tensor := tensors[piece.name], StoredTensor):
                tensor.fetch()


def read_array(
    entry: ParameterSource, tensors: StoredTensors, dtype: np.dtype, mesh: Mesh | None
) -> jax.Array:
    """An array of Params.

    Args:
        entry: which it is.
        tensors: the tensors of the directory.
        dtype: the dtype of the array.
        mesh: over which it is divided; None for the default device.
    """
    host = aligned_empty(entry.shape, dtype)
    parts = host if len(entry.pieces) > 1 else host.reshape(entry.shape[-2:] or (1,))[None]
    for piece, part in zip(entry.pieces, parts, strict=True):
        copy(tensors[piece.name], part, piece)
    return place(host, entry.path, mesh)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that a CPU device takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def place(host: np.ndarray, path: tuple[Any, ...], mesh: Mesh | None) -> jax.Array:
    """An array on its devices.

    Args:
        host: its numbers.
        path: its path in Params.
        mesh: over which it is divided; None for the default device.
    """
    if mesh is None:
        return jax.block_until_ready(jax.device_put(host))
    spec = partition_spec(path, host.ndim) if model_devices(mesh) > 1 else PartitionSpec()
    return jax.block_until_ready(jax.device_put(host, NamedSharding(mesh, spec)))


def read_int8(
    entry: ParameterSource, matrix: StoredTensor, scales: np.ndarray, mesh: Mesh | None
) -> Int8Kernel:
    """A matrix that stays int8.

    Args:
        entry: which array it is.
        matrix: int8 on disk, [out, in].
        scales: float32, of its rows.
        mesh: over which it is divided; None for the default device.
    """
    host, piece = np.empty(entry.shape, np.int8), entry.pieces[0]
    copy(matrix, host, piece)
    scale = np.ascontiguousarray(scales[piece.outputs])
    return Int8Kernel(place(host, entry.path, mesh), place(scale, (*entry.path[:-1], "scale"), mesh))


def stays_narrow(entry: ParameterSource, tensors: StoredTensors) -> bool:
    """Whether an array is a matrix of bfloat16 on disk that float32 rows are multiplied by as it is."""
    return (
        entry.is_kernel
        and len(entry.shape) == 2
        and tensors[entry.pieces[0].name].dtype == "BF16"
        and skinny_matmul.reads_as_stored("bfloat16")
    )


def copy(tensor: Tensor, out: np.ndarray, piece: Piece) -> None:
    """Fill an array from a part of a tensor on disk, strip by strip.

    Args:
        tensor: on disk.
        out: is filled.
        piece: which part it is.
    """
    lead = () if piece.expert is None else (piece.expert,)
    if not piece.stored_shape:
        out[...] = tensor[...].astype(out.dtype, copy=False)
        return
    as_is = not piece.transposed and len(piece.stored_shape) - len(lead) > 1
    first, _, step = piece.outputs.indices(piece.stored_shape[len(lead)])

    def fill(rows: slice) -> None:
        if as_is:
            strip = tensor[(*lead, rows)][..., piece.outputs].astype(out.dtype, copy=False)
            bits(out)[rows] = bits(strip)
            return
        on_disk = slice(first + rows.start * step, first + (rows.stop - 1) * step + 1)
        strip = tensor[(*lead, on_disk)][::step].astype(out.dtype, copy=False)
        bits(out)[..., rows] = bits(strip).T if piece.transposed else bits(strip)

    parts = strips(out.shape[0] if as_is else out.shape[-1])
    if out.nbytes < SHARED:
        for rows in parts:
            fill(rows)
        return
    width = max(1, len(parts) * RELEASED // out.nbytes)
    for begin in range(0, len(parts), width):
        list(THREADS.map(fill, parts[begin : begin + width]))
        tensor.release()


def bits(array: np.ndarray) -> np.ndarray:
    """A view that NumPy copies fast: its own integers in place of bfloat16."""
    return array.view(np.uint16) if array.dtype == jnp.bfloat16 else array


class TensorPart(NamedTuple):
    """A part of a tensor on disk, and where in Params it is."""

    piece: Piece
    leaf: Any  # the array of Params
    number: int  # of the piece among the pieces of the array
    num_parts: int  # pieces of the array

    def matrix(self) -> np.ndarray:
        """As on disk; a view where the device is the host."""
        host = np.asarray(self.leaf)
        part = host[self.number] if self.num_parts > 1 else host.reshape(host.shape[-2:])
        return part.T if self.piece.transposed else part


def disk_tensors(params: Params, config: Config) -> dict[str, list[TensorPart]]:
    """The parts of every tensor on disk, by its name."""
    tensors: dict[str, list[TensorPart]] = {}
    leaves = jax.tree.leaves(params)
    for entry, leaf in zip(entries(config), leaves, strict=True):
        if entry.path == ("lm_head", "kernel") and config.tie_word_embeddings:
            continue
        for number, piece in enumerate(entry.pieces):
            part = TensorPart(piece, leaf, number, len(entry.pieces))
            tensors.setdefault(piece.name, []).append(part)
    return tensors


def assembled(parts: list[TensorPart], dtype: np.dtype) -> np.ndarray:
    """A tensor as it is on disk: a view where it is one array of Params, else a copy of its parts."""
    if len(parts) == 1 and parts[0].piece.expert is None:
        return parts[0].matrix()
    result = np.empty(parts[0].piece.stored_shape, dtype)
    for part in parts:
        piece = part.piece
        target = result if piece.expert is None else result[piece.expert]
        place = piece.outputs if piece.transposed or target.ndim == 1 else (slice(None), piece.outputs)
        target[place] = part.matrix().astype(dtype, copy=False).reshape(target[place].shape)
    return result


def write(path: Path, params: Params, config: Config, dtype: np.dtype) -> None:
    """One safetensors file, a tensor at a time; it appears under its name only when it is complete.

    Args:
        path: the path of the file.
        params: to be written.
        config: says which tensors there are.
        dtype: the dtype of the tensors on disk.
    """
    code = {name: code for code, name in DTYPES.items()}[dtype.name]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    tensors, end = disk_tensors(params, config), 0
    for name, parts in tensors.items():
        shape = parts[0].piece.stored_shape
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for parts in tensors.values():
            source = np.atleast_1d(assembled(parts, dtype))
            for rows in strips(source.shape[0]):
                file.write(np.ascontiguousarray(source[rows], dtype).tobytes())
    os.replace(partial, path)
