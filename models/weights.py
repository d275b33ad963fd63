"""Tensors on disk to arrays in memory and back, one tensor at a time.

`tensor_names` says which tensors an array is made of. Several threads read blocks of rows, so that the disk
works while other blocks are converted and transposed. Loading needs the weights once, in the dtype asked for,
and two tensors more where a device or a mesh copies them.
"""

import json
import math
import os
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from entropic_jax.pallas import grouped_matmul, skinny_matmul

from .config import Config
from .decoder import Params, structure
from .embedding import EMBEDDING_MODULE, HEAD_MODULE, has_one_table, may_have_one_table
from .formats.stored import DTYPES, StoredTensor, TensorInMemory
from .host_memory import aligned_empty, bits, touch, transpose
from .quantisation import Int8Kernel
from .sharding import copy_kv_heads, local_region, model_devices, partition_spec, with_kv_head_copies
from .stored_tensors import STRIP, StoredTensors, Tensor, strips
from .tensor_names import EMBEDDING, ParameterSource, Piece, entries

BLOCK = 1 << 20  # bytes of a block of rows that a thread reads
WAITING_THREADS = 1  # that wait for the disk while one for each processor converts
MOST_THREADS = 8


def read(
    tensors: StoredTensors,
    config: Config,
    dtype: np.dtype,
    advance: Callable[[int], None],
    as_stored: bool = False,
    mesh: Mesh | None = None,
    int8_kernels: Container[tuple[Any, ...]] = (),
    matrix_dtype: np.dtype | None = None,
    page_shards: int | None = None,
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
        matrix_dtype: the dtype of the embedding and of matrices, if it is another one.
        page_shards: devices that divide a KV head, as for `sharding.check_page_shards`.
    """
    expected = entries(config)
    tensors.check(expected, config)
    table, head = (next(e for e in expected if e.path[0] == name) for name in (EMBEDDING_MODULE, HEAD_MODULE))
    divided = structure(with_kv_head_copies(config, model_devices(mesh), page_shards))[1]
    arrays: dict[tuple[Any, ...], jax.Array | Int8Kernel] = {}
    in_memory: dict[str, TensorInMemory] = {}
    num_threads = min(MOST_THREADS, WAITING_THREADS + (os.cpu_count() or 1))
    with ThreadPoolExecutor(num_threads, "weights") as threads:

        def dtype_of(entry: ParameterSource) -> np.dtype:
            if matrix_dtype is not None and (entry.is_kernel or entry.path[0] == EMBEDDING_MODULE):
                return matrix_dtype
            narrow = as_stored and dtype == np.float32 and stays_narrow(entry, tensors)
            return jnp.dtype(jnp.bfloat16) if narrow else dtype

        def begin(entry: ParameterSource) -> PendingArray:
            shape = shape_at(divided, entry.path)  # with copies of KV heads, for which all heads are read
            region = local_region(entry.path, entry.shape, mesh if shape == entry.shape else None)
            size = tuple(part.stop - part.start for part in region)
            stacked = len(entry.pieces) > 1
            pieces = entry.pieces[region[0]] if stacked else entry.pieces
            pieces = tuple(piece.within(region[-2:] if not stacked else region[1:]) for piece in pieces)
            int8 = tensors.int8_rows(entry) if entry.path in int8_kernels else None
            if int8 is not None:
                host = aligned_empty(size, np.dtype(np.int8))
                touched = touch(host, threads)
                blocks = fill_blocks(int8[0], host, pieces[0], threads, touched)
                return PendingArray(entry, shape, region, host, blocks, int8[1][pieces[0].outputs])
            host = aligned_empty(size, dtype_of(entry))
            touched = touch(host, threads)
            parts = host if stacked else host.reshape(size[-2:] or (1,))[None]
            sources = [in_memory.get(piece.name, tensors[piece.name]) for piece in pieces]
            each = zip(sources, parts, pieces, strict=True)
            blocks = [block for parts in each for block in fill_blocks(*parts, threads, touched)]
            return PendingArray(entry, shape, region, host, blocks)

        is_int8 = head.path in int8_kernels and tensors.int8_rows(head) is not None
        alike = mesh is None and not is_int8 and dtype_of(table) == dtype_of(head)
        one_table = alike and may_have_one_table(config, dtype_of(head).itemsize)
        begun: PendingArray | None = None
        for entry in [*(e for e in expected if not (one_table and e is table)), None]:
            following = None if entry is None else begin(entry)
            if begun is not None:
                arrays[begun.entry.path] = begun.finish(mesh, config)
                advance(math.prod(begun.entry.shape) * (matrix_dtype or dtype).itemsize)
                in_full = begun.host.shape == begun.entry.shape
                if config.tie_word_embeddings and in_full and begun.entry.pieces[0].name == EMBEDDING:
                    in_memory[EMBEDDING] = TensorInMemory(begun.host, "", tensors.directory)
            begun = following
    leaves = [arrays[head.path if one_table and e is table else e.path] for e in expected]
    return jax.tree.unflatten(jax.tree.structure(structure(config)[1]), leaves)


class PendingArray(NamedTuple):
    """An array of Params that threads are filling."""

    entry: ParameterSource
    shape: tuple[int, ...]  # on the devices, with the copies of KV heads that these need
    region: tuple[slice, ...]  # of the array on disk, which `host` holds
    host: np.ndarray
    blocks: list[Future[None]]
    scales: np.ndarray | None = None  # of an int8 matrix

    def finish(self, mesh: Mesh | None, config: Config) -> jax.Array | Int8Kernel:
        """The array on its devices, with the copies of KV heads that these need."""
        for block in self.blocks:
            block.result()
        host, scales, region, path = self.host, self.scales, self.region, self.entry.path
        if self.shape != self.entry.shape:
            host = copy_kv_heads(host, self.shape, config.num_key_value_heads)
            region = tuple(slice(0, size) for size in self.shape)
        array = place(host, path, mesh, self.shape, region)
        if scales is None:
            return array
        scales = np.ascontiguousarray(scales)
        if self.shape != self.entry.shape:
            scales = copy_kv_heads(scales, self.shape[-1:], config.num_key_value_heads)
        return Int8Kernel(array, place(scales, (*path[:-1], "scale"), mesh, self.shape[-1:], region[-1:]))


def shape_at(tree: Any, path: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape of the array at a path of Params."""
    for key in path:
        tree = tree[key]
    return tree.shape


def place(
    host: np.ndarray,
    path: tuple[Any, ...],
    mesh: Mesh | None,
    shape: tuple[int, ...],
    region: tuple[slice, ...],
) -> jax.Array:
    """An array on its devices.

    Args:
        host: the numbers of a part of the array that has all that this process's devices need.
        path: its path in Params.
        mesh: over which it is divided; None for the default device.
        shape: the shape of the array.
        region: the part, as one slice per axis.
    """
    if mesh is None:
        return jax.block_until_ready(jax.device_put(host))
    spec = partition_spec(path, host.ndim) if model_devices(mesh) > 1 else PartitionSpec()

    def shard(index: Any) -> np.ndarray:
        bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
        return host[tuple(slice(b[0] - r.start, b[1] - r.start) for b, r in zip(bounds, region, strict=True))]

    # Each process puts its part on its devices.
    return jax.block_until_ready(jax.make_array_from_callback(shape, NamedSharding(mesh, spec), shard))


def stays_narrow(entry: ParameterSource, tensors: StoredTensors) -> bool:
    """Whether an array is a matrix of bfloat16 on disk that float32 rows are multiplied by as it is."""
    product = skinny_matmul if len(entry.shape) == 2 else grouped_matmul
    stored = tensors[entry.pieces[0].name].dtype == "BF16"
    return entry.is_kernel and stored and product.reads_as_stored("bfloat16")


def fill_blocks(
    tensor: Tensor,
    out: np.ndarray,
    piece: Piece,
    threads: ThreadPoolExecutor,
    touched: Sequence[Future[None]] = (),
) -> list[Future[None]]:
    """Have threads fill an array from a part of a tensor on disk, a block of rows at a time.

    Args:
        tensor: on disk.
        out: is filled.
        piece: the part of the tensor that fills `out`.
        threads: the threads that fill `out`.
        touched: results of the same threads after which it may be written to.
    """
    lead = () if piece.expert is None else (piece.expert,)
    as_is = not piece.transposed and len(piece.stored_shape) - len(lead) > 1
    first, _, step = piece.outputs.indices((*piece.stored_shape[len(lead) :], 1)[0])
    first_input = piece.inputs.start or 0
    in_file = isinstance(tensor, StoredTensor) and piece.transposed
    columns, chosen = ((piece.inputs,), slice(None)) if in_file else ((), piece.inputs)
    block_of = tensor.block if isinstance(tensor, StoredTensor) else tensor.__getitem__

    def fill(rows: slice) -> None:
        if not piece.stored_shape:
            wait(touched)
            out[...] = tensor[...].astype(out.dtype, copy=False)
        elif as_is:
            on_disk = slice(first_input + rows.start, first_input + rows.stop)
            block = block_of((*lead, on_disk))[..., piece.outputs].astype(out.dtype, copy=False)
            wait(touched)
            bits(out)[rows] = bits(block)
        else:
            on_disk = slice(first + rows.start * step, first + (rows.stop - 1) * step + 1)
            block = block_of((*lead, on_disk, *columns))[::step][..., chosen]
            block = bits(block.astype(out.dtype, copy=False))
            wait(touched)
            if piece.transposed:
                transpose(block, bits(out)[:, rows])
            else:
                bits(out)[rows] = block
        tensor.release()

    length = out.shape[0] if as_is else out.shape[-1]
    size = max(STRIP, BLOCK * length // max(1, out.nbytes) // STRIP * STRIP)
    blocks = [slice(start, min(start + size, length)) for start in range(0, length, size)]
    return [threads.submit(fill, rows) for rows in blocks]


class TensorPart(NamedTuple):
    """A part of a tensor on disk, and where in Params it is."""

    piece: Piece
    leaf: Any  # the array of Params
    number: int  # of the piece among the pieces of the array
    num_parts: int  # pieces of the array

    def matrix(self) -> np.ndarray:
        """The matrix as on disk; a view where the device is the host."""
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
        one_table = entry.path[0] == EMBEDDING_MODULE and has_one_table(params, config)
        for number, piece in enumerate(entry.pieces):
            piece = piece._replace(transposed=piece.transposed or one_table)
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
        params: the parameters to write.
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
