"""Tensors on disk to arrays in memory and back, one tensor at a time.

`tensor_names` says which tensors an array is made of. Files are memory-mapped and read in strips of rows, so
that loading needs the weights once, in the dtype asked for, and one tensor more.
"""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open

from entropic_jax.pallas import skinny_matmul

from .config import Config, ModelError, read_json, require_file
from .decoder import Params, structure
from .sharding import partition_spec
from .tensor_names import EMBEDDING, HEAD, ParameterSource, Piece, entries

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")  # old Llama files carry what follows from the config
STRIP = 64  # rows converted at a time; a whole matrix at once takes longer to transpose


class SafetensorsFiles:
    """The safetensors files of a model directory, memory-mapped. Raises ModelError for broken ones."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        self.file_of: dict[str, str] = {}  # tensor name to file name
        promised: dict[str, str] = {}
        if (directory / SINGLE).exists():
            files = [SINGLE]
        elif (directory / INDEX).exists():
            promised = read_json(directory / INDEX).get("weight_map", {})
            valid = isinstance(promised, dict) and all(isinstance(f, str) for f in promised.values())
            if not promised or not valid:
                raise ModelError(f"{directory / INDEX}: weight_map must be an object of tensor to file names")
            outside = [f for f in promised.values() if Path(f).name != f or not f.isprintable()]
            if outside:
                raise ModelError(
                    f"{directory / INDEX}: weight_map must name files in its directory; got {outside[0]!r}"
                )
            files = sorted(set(promised.values()))
        else:
            raise ModelError(f"{directory} must hold {SINGLE}, or several files and {INDEX}; got neither")
        for file in files:
            self._files[file] = open_safetensors(directory / file)
            self.file_of |= dict.fromkeys(self._files[file].keys(), file)
        for name, file in promised.items():
            if self.file_of.get(name) != file:
                raise ModelError(
                    f"{INDEX} says that {name} is in {directory / file}, which has no such tensor"
                )

    def __getitem__(self, name: str) -> Any:
        return self._files[self.file_of[name]].get_slice(name)

    def check_sizes(self, config: Config) -> None:
        """Raise ModelError for more layers or experts than there are tensors, before anything is built."""
        for name in ("num_hidden_layers", "n_shared_experts"):
            value, most = getattr(config, name), len(self.file_of)
            if value > most:
                raise ModelError(
                    f"{self.directory}/config.json: {name} must be at most {most}, the number of tensors; "
                    f"got {value}"
                )
        for name in ("vocab_size", "hidden_size"):
            shape = self.shape_of(EMBEDDING)
            value, held = getattr(config, name), shape[name == "hidden_size"] if len(shape) == 2 else None
            if held is not None and value != held:
                raise ModelError(
                    f"{self.directory / 'config.json'}: {name} must be {held}, as in {EMBEDDING}; got {value}"
                )

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; () if there is none of this name."""
        return tuple(self[name].get_shape()) if name in self.file_of else ()

    def check(self, expected: list[ParameterSource], config: Config) -> None:
        """Raise ModelError unless the files hold exactly these tensors, in these shapes and a known dtype."""
        shapes = {piece.name: piece.stored_shape for entry in expected for piece in entry.pieces}
        missing = [name for name in shapes if name not in self.file_of]
        if missing:
            raise ModelError(f"{self.directory} lacks {abbreviated(missing)}; config.json asks for them")
        tied = {HEAD} if config.tie_word_embeddings else set()
        unexpected = [n for n in self.file_of if n not in shapes and n not in tied and not HARMLESS.search(n)]
        if unexpected:
            size = f"{config.num_hidden_layers} layers of {config.architecture}"
            raise ModelError(f"{self.directory} holds {abbreviated(unexpected)}, which {size} do not have")
        for name, shape in shapes.items():
            tensor, file = self[name], self.directory / self.file_of[name]
            if tuple(tensor.get_shape()) != shape:
                raise ModelError(f"{file}: {name} must have shape {shape}; got {tuple(tensor.get_shape())}")
            if tensor.get_dtype() not in DTYPES:
                raise ModelError(f"{file}: {name} must be of {', '.join(DTYPES)}; got {tensor.get_dtype()}")
        if tied & self.file_of.keys() and not self.same(HEAD, EMBEDDING):
            raise ModelError(
                f"{self.directory}: with tie_word_embeddings, {HEAD} must be absent or equal {EMBEDDING}; "
                "got another tensor"
            )

    def same(self, first: str, second: str) -> bool:
        left, right = self[first], self[second]
        if left.get_shape() != right.get_shape():
            return False
        return all(np.array_equal(left[rows], right[rows]) for rows in strips(left.get_shape()[0]))


def open_safetensors(path: Path) -> Any:
    if path.exists():
        require_file(path)
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing, and {INDEX} names it") from None
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise ModelError(
            f"{path} must be a complete safetensors file; got {size} bytes that cannot be read ({error})"
        ) from None


def abbreviated(names: list[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def read(
    tensors: SafetensorsFiles,
    config: Config,
    dtype: np.dtype,
    advance: Callable[[int], None],
    as_stored: bool = False,
    mesh: Mesh | None = None,
) -> Params:
    """The parameters of a model directory.

    Args:
        tensors: the files of the directory.
        config: says which tensors there are.
        dtype: of the result.
        advance: called with the bytes of every tensor read.
        as_stored: whether a matrix that is bfloat16 on disk stays so where products widen it at no cost.
        mesh: over which every array is divided as soon as it is read; None for the default device.
    """
    expected = entries(config)
    tensors.check(expected, config)
    arrays = []
    for entry in expected:
        narrow = as_stored and dtype == np.float32 and stays_narrow(entry, tensors)
        host = np.empty(entry.shape, jnp.bfloat16 if narrow else dtype)
        parts = host if len(entry.pieces) > 1 else host.reshape(entry.shape[-2:] or (1,))[None]
        for piece, part in zip(entry.pieces, parts, strict=True):
            copy(tensors[piece.name], part, piece)
        if mesh is None:
            array = jnp.asarray(host)
        else:
            spec = partition_spec(entry.path, host.ndim)
            array = jax.device_put(host, NamedSharding(mesh, spec))
        arrays.append(jax.block_until_ready(array))
        advance(host.size * dtype.itemsize)
    return jax.tree.unflatten(jax.tree.structure(structure(config)[1]), arrays)


def stays_narrow(entry: ParameterSource, tensors: SafetensorsFiles) -> bool:
    """Whether an array is a matrix of bfloat16 on disk that float32 rows are multiplied by as it is."""
    return (
        entry.is_kernel
        and len(entry.shape) == 2
        and tensors[entry.pieces[0].name].get_dtype() == "BF16"
        and skinny_matmul.reads_as_stored("bfloat16")
    )


def copy(tensor: Any, out: np.ndarray, piece: Piece) -> None:
    """Fill an array from a part of a tensor on disk, strip by strip.

    Args:
        tensor: slice of a safetensors file.
        out: is filled.
        piece: which part it is.
    """
    lead = () if piece.expert is None else (piece.expert,)
    if not piece.stored_shape:
        out[...] = tensor[...].astype(out.dtype, copy=False)
        return
    if not piece.transposed and len(piece.stored_shape) - len(lead) > 1:
        for rows in strips(out.shape[0]):
            out[rows] = tensor[(*lead, rows)][..., piece.outputs].astype(out.dtype, copy=False)
        return
    first, _, step = piece.outputs.indices(piece.stored_shape[len(lead)])
    for rows in strips(out.shape[-1]):
        on_disk = slice(first + rows.start * step, first + (rows.stop - 1) * step + 1)
        strip = tensor[(*lead, on_disk)][::step].astype(out.dtype, copy=False)
        out[..., rows] = strip.T if piece.transposed else strip


def strips(length: int) -> list[slice]:
    return [slice(start, min(start + STRIP, length)) for start in range(0, length, STRIP)]


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
        path: of the file.
        params: to be written.
        config: says which tensors there are.
        dtype: of the tensors on disk.
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
