"""Converted checkpoints: the arrays of a model as its programs take them, read again without conversion.

A directory holds config.json, the files of the tokenizer, an orbax checkpoint in the folder `weights`, and
`converted.json`, which says what the arrays are and is written last. Every process writes the shards of its
own devices, and reads those that its devices need, on the same mesh or on another.

Vectors are stored in float32, so that each kind of device has them in the dtype that it computes with.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from entropic_jax.mesh.devices import default_device
from entropic_jax.pallas import skinny_matmul

from .checkpoint import named
from .config import LARGEST_JSON, Config, ModelError, abbreviate, read_json
from .decoder import Params, structure
from .embedding import may_have_one_table
from .formats import FIELDS
from .formats.model_files import CONVERTED, CONVERTED_WEIGHTS
from .quantisation import check_quantization
from .sharding import check_groups, copy_kv_heads, model_devices, partition_specs, with_kv_head_copies

VERSION = 1
CHUNK = 1 << 24  # bytes of a part of an array that is read in one piece
IN_FLIGHT = 1  # GB of arrays between disk and devices at a time, if none is larger
TABLE, HEAD = "embed_tokens.weight", "lm_head.kernel"
OTHER = {TABLE: HEAD, HEAD: TABLE}
# Files of a model that are no weights, and folders of such files.
TEXT_FILES = re.compile(r".*\.(json|jinja|txt|model|tiktoken|md)|LICENSE.*|NOTICE.*")
INDEX = re.compile(r".*\.index(\.[\w-]+)?\.json")
FOLDERS = ("draft_head", "additional_chat_templates")


class Description(NamedTuple):
    """The contents of `converted.json`."""

    dtype: str  # in which the model computes
    quantization: str | None  # of the matrices
    arrays: dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape, by name
    files: dict[str, int]  # bytes of each file below the directory


class Dtypes(NamedTuple):
    """The dtypes in which a converted checkpoint is loaded."""

    dtype: np.dtype  # that is asked for
    vectors: np.dtype
    as_stored: bool  # whether matrices of bfloat16 stay so in a float32 model


def description(directory: Path) -> Description | None:
    """The description in a converted checkpoint; None for another directory. Raises ModelError."""
    file = directory / CONVERTED
    if not file.exists():
        if (directory / CONVERTED_WEIGHTS).is_dir():
            raise ModelError(f"{file} is missing: the conversion has not ended")
        return None
    raw = read_json(file, LARGEST_JSON)
    if raw.get("version") != VERSION:
        raise ModelError(f"{file}: version must be {VERSION}; got {abbreviate(raw.get('version'))}")
    try:
        arrays: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (jnp.dtype(dtype).name, tuple(shape)) for name, (dtype, shape) in raw["arrays"].items()
        }
        files = {name: int(size) for name, size in raw["files"].items()}
        return Description(str(raw["dtype"]), check_quantization(raw["quantization"]), arrays, files)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ModelError(
            f"{file} must have dtype, quantization, arrays and files, as `entropic convert` writes them"
        ) from None


def check(directory: Path, stored: Description, dtype: np.dtype, quantization: str | None) -> None:
    """Raise ModelError unless a checkpoint is what is asked for, and its files have their sizes.

    Args:
        directory: the directory of the checkpoint.
        stored: what it says that it holds.
        dtype: the dtype that is asked for.
        quantization: the quantization that is asked for; None for that of the checkpoint.
    """
    if dtype.name != stored.dtype:
        raise ModelError(
            f"dtype must be {stored.dtype}, which {directory} was converted to; got {dtype.name}"
        )
    if quantization not in (None, stored.quantization):
        accepted = "None" if stored.quantization is None else f"{stored.quantization} or None"
        raise ModelError(
            f"quantization must be {accepted}, which {directory} was converted to; got {quantization}"
        )
    for name, size in stored.files.items():
        file = directory / name
        held = file.stat().st_size if file.is_file() else None
        if held != size:
            state = "is missing" if held is None else f"must have {size} bytes; got {held}"
            raise ModelError(f"{file} {state}: the checkpoint is damaged")


def is_vector(name: str) -> bool:
    """Whether an array has the dtype of vectors: neither a matrix, nor the embedding, nor a scale."""
    return not name.startswith("embed_tokens.") and name.rpartition(".")[2] not in ("kernel", "scale")


def read(
    directory: Path,
    stored: Description,
    config: Config,
    dtypes: Dtypes,
    mesh: Mesh | None = None,
    page_shards: int | None = None,
) -> Params:
    """The parameters of a checkpoint on their devices. Raises ModelError where it is damaged.

    Args:
        directory: the directory of the checkpoint.
        stored: what it says that it holds, which `check` accepts.
        config: the model's configuration.
        dtypes: the dtypes of the result.
        mesh: over which every array is divided; None for the default device.
        page_shards: devices that divide a KV head, as for `sharding.check_page_shards`.
    """
    devices = model_devices(mesh)
    shapes = {name: x.shape for name, x in named(structure(config, stored.quantization)[1]).items()}
    check_arrays(directory, stored, shapes, config)
    divided = structure(with_kv_head_copies(config, devices, page_shards), stored.quantization)[1]
    if mesh is not None:
        check_groups(divided, mesh)
    targets, specs = named(divided), named(partition_specs(divided, devices))

    def place(name: str, shape: tuple[int, ...]) -> Sharding:
        if mesh is None:
            return SingleDeviceSharding(default_device())
        # A process reads all KV heads of an array of which its devices have copies.
        return NamedSharding(mesh, specs[name] if shape == targets[name].shape else P())

    def loaded_dtype(name: str, dtype: Any) -> np.dtype:
        narrow = dtypes.dtype == np.float32 and dtype == jnp.bfloat16 and name.endswith(".kernel")
        keeps = dtypes.as_stored and mesh is None and skinny_matmul.reads_as_stored(dtype)
        return dtypes.dtype if narrow and not keeps else dtype

    arrays = restored(
        directory / CONVERTED_WEIGHTS,
        {
            name: jax.ShapeDtypeStruct(
                shape, loaded_dtype(name, jnp.dtype(dtype)), sharding=place(name, shape)
            )
            for name, (dtype, shape) in stored.arrays.items()
        },
    )
    for name, x in arrays.items():
        shape = targets[name].shape
        if x.shape != shape or (is_vector(name) and x.dtype != dtypes.vectors):
            finish = lambda x, name=name, shape=shape: copy_kv_heads(
                x.astype(dtypes.vectors) if is_vector(name) else x, shape, config.num_key_value_heads
            )
            arrays[name] = jax.jit(finish, out_shardings=place(name, shape))(x)
    for missing in shapes.keys() - arrays.keys():  # of tied embeddings
        turned = jax.jit(jnp.transpose, out_shardings=place(missing, shapes[missing]))
        arrays[missing] = turned(arrays[OTHER[missing]])
    table, head = arrays[TABLE], arrays[HEAD]
    alike = mesh is None and stored.quantization is None and table.dtype == head.dtype
    if alike and may_have_one_table(config, table.dtype.itemsize):
        arrays[TABLE] = head
    return jax.tree.unflatten(jax.tree.structure(divided), [arrays[name] for name in targets])


def check_arrays(
    directory: Path, stored: Description, shapes: Mapping[str, tuple[int, ...]], config: Config
) -> None:
    """Raise ModelError, naming the first array that differs, unless a checkpoint has those of its config.

    Args:
        directory: the directory of the checkpoint.
        stored: what it says that it holds.
        shapes: the shapes that the configuration asks for, by name.
        config: the model's configuration.
    """
    for name in sorted({*shapes, *stored.arrays}):
        tied = config.tie_word_embeddings and OTHER.get(name) in stored.arrays
        if name not in stored.arrays and tied:
            continue
        held = stored.arrays[name][1] if name in stored.arrays else "absent"
        expected = shapes.get(name, "absent")
        if held != expected:
            raise ModelError(
                f"{directory / CONVERTED}: {name} must be {expected}, as config.json says; got {held}"
            )


def restored(path: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of an orbax checkpoint in these dtypes, on the devices of these shardings."""
    args = {
        name: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)
        for name, x in targets.items()
    }
    try:
        with ocp.Checkpointer(handler(targets)) as checkpointer:
            return dict(
                checkpointer.restore(
                    path.absolute(), args=ocp.args.PyTreeRestore(item=dict(targets), restore_args=args)
                )
            )
    except Exception as error:  # orbax and its store raise what they like
        reason = (str(error).splitlines() or [""])[0]
        raise ModelError(
            f"{path} cannot be read, the checkpoint is damaged: {type(error).__name__}: {reason:.300}"
        ) from None


def handler(arrays: Mapping[str, Any]) -> ocp.PyTreeCheckpointHandler:
    """The handler that reads and writes arrays: without compression, and few at a time."""
    largest = max(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays.values())
    room = max(IN_FLIGHT, math.ceil(2 * largest / 1e9))
    return ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=room,
        restore_concurrent_gb=room,
        save_device_host_concurrent_gb=room,
        use_compression=False,
    )


def write(directory: Path, params: Params, config: Config, dtype: np.dtype, quantization: str | None) -> None:
    """Write the arrays of a model, each process those of its devices, and then what they are.

    Args:
        directory: the directory of the checkpoint, which all processes see.
        params: the parameters, without copies of KV heads, and with vectors of float32.
        config: the model's configuration.
        dtype: the dtype that the model computes in.
        quantization: the quantization of the parameters.
    """
    arrays = stored_arrays(params, config, quantization)
    weights = (directory / CONVERTED_WEIGHTS).absolute()
    args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK) for name in arrays}
    with ocp.Checkpointer(handler(arrays)) as checkpointer:
        checkpointer.save(weights, args=ocp.args.PyTreeSave(item=arrays, save_args=args))
    if jax.process_index() == 0:
        described = {
            "version": VERSION,
            "dtype": dtype.name,
            "quantization": quantization,
            "arrays": {name: [x.dtype.name, list(x.shape)] for name, x in arrays.items()},
            "files": {
                str(file.relative_to(directory.absolute())): file.stat().st_size
                for file in sorted(weights.rglob("*"))
                if file.is_file()
            },
        }
        partial = directory / f"{CONVERTED}.partial"
        partial.write_text(json.dumps(described, indent=1) + "\n", "utf-8")
        partial.replace(directory / CONVERTED)


def stored_arrays(params: Params, config: Config, quantization: str | None) -> dict[str, jax.Array]:
    """The arrays that are written, by name: of tied embeddings, one of both tables if they are the same.

    Args:
        params: the parameters.
        config: the model's configuration.
        quantization: the quantization of the parameters.
    """
    arrays = named(params)
    table, head = arrays[TABLE], arrays[HEAD]
    if config.tie_word_embeddings and quantization is None and table.dtype == head.dtype:
        del arrays[TABLE if table.shape == head.shape else HEAD]
    return arrays


def copy_files(source: Path, output: Path, raw: Mapping[str, Any]) -> None:
    """Write what a checkpoint has besides its arrays.

    Args:
        source: the directory of the model.
        output: the directory of the checkpoint.
        raw: the parsed config.json of the model.
    """
    for file in sorted(source.iterdir()):
        if file.is_dir() and file.name in FOLDERS:
            shutil.copytree(file, output / file.name)
        elif file.is_file() and TEXT_FILES.fullmatch(file.name) and not INDEX.fullmatch(file.name):
            shutil.copyfile(file, output / file.name)
    dense = {
        name: without_format(value) if name == "text_config" else value
        for name, value in without_format(raw).items()
    }
    (output / "config.json").write_text(json.dumps(dense, indent=2) + "\n", "utf-8")


def without_format(raw: Any) -> Any:
    """An object of config.json without the format of its weights, which are converted."""
    return (
        {name: value for name, value in raw.items() if name not in FIELDS} if isinstance(raw, dict) else raw
    )


def summary(stored: Description) -> dict[str, int]:
    """Numbers of each dtype in a checkpoint."""
    numbers: dict[str, int] = {}
    for dtype, shape in stored.arrays.values():
        numbers[dtype] = numbers.get(dtype, 0) + math.prod(shape)
    return numbers
