"""Tensors on disk to arrays in memory and back, one tensor at a time.

One rule names the tensor of an array: its path in Params joined by dots under `model.`, where a `kernel` is
stored transposed as `weight`. Exceptions: the output projection has no `model.`, experts are one tensor each
on disk and stacked in memory, and a family may spell parts of a name differently (`Family.renames`).

Files are memory-mapped and read in strips of rows, so that loading needs the weights once, in the dtype asked
for, and one tensor more.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open

from entropic_jax.pallas import skinny_matmul

from .config import Config, ModelError, read_json
from .decoder import FAMILIES, Params, structure
from .sharding import partition_spec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")  # old Llama files carry what follows from the config
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
STRIP = 64  # rows converted at a time; a whole matrix at once takes longer to transpose


class ParameterSource(NamedTuple):
    """An array of Params and the tensors on disk that it is made of."""

    path: tuple[Any, ...]
    shape: tuple[int, ...]  # in memory
    names: tuple[str, ...]  # one, or one per expert
    transposed: bool

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of each tensor on disk."""
        shape = self.shape[1:] if len(self.shape) == 3 else self.shape
        return shape[::-1] if self.transposed else shape


def entries(config: Config) -> list[ParameterSource]:
    """What Params of a Config are made of, in order of reading."""
    renames = FAMILIES[config.architecture].renames
    leaves, _ = jax.tree_util.tree_flatten_with_path(structure(config)[1])
    result = []
    for keys, leaf in leaves:
        path = tuple(getattr(key, "idx", getattr(key, "key", None)) for key in keys)
        transposed = path[-1] == "kernel"
        parts = [str(part) for part in path[:-1]] + ["weight" if transposed else str(path[-1])]
        name = ".".join(parts if path[0] == "lm_head" else ["model", *parts])
        if name == HEAD and config.tie_word_embeddings:
            name = EMBEDDING
        names = (name,)
        if "experts" in path:
            names = tuple(name.replace(".experts.", f".experts.{e}.") for e in range(leaf.shape[0]))
        for ours, theirs in renames:
            names = tuple(n.replace(ours, theirs) for n in names)
        result.append(ParameterSource(path, leaf.shape, names, transposed))
    return result


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

    def check(self, expected: list[ParameterSource], config: Config) -> None:
        """Raise ModelError unless the files hold exactly these tensors, in these shapes and a known dtype."""
        shapes = {name: entry.stored_shape for entry in expected for name in entry.names}
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
    directory: Path,
    config: Config,
    dtype: np.dtype,
    advance: Callable[[int], None],
    as_stored: bool = False,
    mesh: Mesh | None = None,
) -> Params:
    """The parameters of a model directory.

    Args:
        directory: of the model.
        config: says which tensors there are.
        dtype: of the result.
        advance: called with the bytes of every tensor read.
        as_stored: whether a matrix that is bfloat16 on disk stays so where products widen it at no cost.
        mesh: over which every array is divided as soon as it is read; None for the default device.
    """
    tensors, expected = SafetensorsFiles(directory), entries(config)
    tensors.check(expected, config)
    arrays = []
    for entry in expected:
        narrow = as_stored and dtype == np.float32 and stays_narrow(entry, tensors)
        host = np.empty(entry.shape, jnp.bfloat16 if narrow else dtype)
        parts = host if len(entry.shape) == 3 else host[None]
        for name, part in zip(entry.names, parts, strict=True):
            copy(tensors[name], part, entry.transposed)
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
    matrix = entry.transposed and len(entry.shape) == 2
    return (
        matrix
        and tensors[entry.names[0]].get_dtype() == "BF16"
        and skinny_matmul.reads_as_stored(entry.shape, "bfloat16")
    )


def copy(tensor: Any, out: np.ndarray, transposed: bool) -> None:
    """Fill an array from a tensor on disk, strip by strip.

    Args:
        tensor: slice of a safetensors file.
        out: is filled.
        transposed: whether the tensor on disk is the transpose of `out`.
    """
    for rows in strips(tensor.get_shape()[0]):
        strip = tensor[rows].astype(out.dtype, copy=False)
        out[(slice(None), rows) if transposed else rows] = strip.T if transposed else strip


def strips(length: int) -> list[slice]:
    return [slice(start, min(start + STRIP, length)) for start in range(0, length, STRIP)]


def disk_tensors(params: Params, config: Config) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Tensor names, arrays (views where the device is the host) and whether to transpose, as on disk."""
    leaves = jax.tree.leaves(params)
    for entry, leaf in zip(entries(config), leaves, strict=True):
        if entry.path[0] == "lm_head" and config.tie_word_embeddings:
            continue
        host = np.asarray(leaf)
        parts = host if len(entry.shape) == 3 else host[None]
        for name, part in zip(entry.names, parts, strict=True):
            yield name, part, entry.transposed


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
    end = 0
    for name, array, transposed in disk_tensors(params, config):
        begin, end = end, end + array.size * dtype.itemsize
        shape = array.shape[::-1] if transposed else array.shape
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array, transposed in disk_tensors(params, config):
            source = array.T if transposed else array
            for rows in strips(source.shape[0]):
                file.write(np.ascontiguousarray(source[rows], dtype).tobytes())
    os.replace(partial, path)
