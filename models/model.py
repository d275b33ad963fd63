"""Model: loading from a directory, saving, and random initialisation."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from entropic_jax.pallas import skinny_matmul

from . import converted, sharding, weights
from .config import LARGEST_SETTINGS, Config, ModelError, read_json
from .config_json import from_json, to_json
from .decoder import FAMILIES, Decoder, Params, family, structure
from .formats import LOG, log_activations, weight_format
from .formats.gguf_config import gguf_config
from .formats.model_files import SINGLE, gguf_path
from .generation_json import read_generation
from .gguf_tokenizer import gguf_tokenizer
from .kernel_layout import block_kernels
from .layer_stack import scans_layers, stack_layers
from .layers import OperandDtype
from .quantisation import check_quantization, int8_kernels, quantise
from .sentencepiece_model import sentencepiece_tokenizer
from .stored_tensors import StoredTensors
from .tekken import tekken_tokenizer
from .tensor_names import entries
from .text_towers import text_part, tower_of
from .tokenizer import Tokenizer
from .tokenizer_files import is_there

ACCEPTED_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Configuration, arrays and text side of a model."""

    config: Config
    params: Params
    tokenizer: Tokenizer | None = None  # None where the directory has no tokenizer.json
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)  # generation_config.json as it is
    mesh: Mesh | None = None  # of the devices that hold the arrays; None: one device
    quantization: str | None = None  # of the weights; None: not quantised
    operand_dtype: OperandDtype | None = None  # see `Decoder`
    blocked: bool = False  # some matrices lie block by block, see `kernel_layout`
    stacked: bool = False  # layers that repeat are stacked, see `layer_stack`
    page_shards: int | None = None  # devices that divide a KV head and its pages; None: all that can

    @property
    def decoder(self) -> Decoder:
        """The model's pure functions, static in compiled programs."""
        devices = sharding.model_devices(self.mesh)
        config = sharding.with_kv_head_copies(self.config, devices, self.page_shards)
        page_shards = sharding.check_page_shards(self.config, devices, self.page_shards)
        return Decoder(config, self.mesh, self.quantization, self.operand_dtype, self.stacked, page_shards)

    @property
    def activation_dtype(self) -> np.dtype:
        """The dtype of activations, queries and hidden states."""
        narrow = jax.tree.leaves(self.params)[0].dtype  # that of the embedding
        return np.dtype(narrow if self.operand_dtype is None else np.float32)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text: those of generation_config.json, else those of config.json."""
        stated = self.generation.get("eos_token_id")
        if stated is None:
            return self.config.eos_token_id
        return tuple(stated) if isinstance(stated, list) else (stated,)


def directory_of(path: str | Path | None) -> Path:
    """The directory of a model; None is the model that ships with the package."""
    return Path(__file__).with_name("embedded") if path is None else Path(path)


def read_config(path: Path, mesh: Mesh | None = None, page_shards: int | None = None) -> Config:
    """The Config of a model directory, or of the config.json in it.

    Args:
        path: the directory, or the file.
        mesh: over which the model will be divided; None for one device.
        page_shards: as for `load`.

    Raises:
        ModelError: it cannot be used, or the model cannot be divided over the mesh.
    """
    file = path / "config.json" if path.is_dir() else path
    raw = read_config_json(path)
    try:
        raw = text_part(raw)
        config = from_json(raw, family(raw))
        if mesh is None:
            sharding.check_page_shards(config, 1, page_shards)
        else:
            sharding.check_mesh(config, mesh)
            sharding.check_page_shards(config, sharding.model_devices(mesh), page_shards)
            sharding.partition_specs(structure(config)[1], sharding.model_devices(mesh))
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    return config


def read_config_json(path: Path) -> dict[str, Any]:
    """The object in a config.json or in that of a directory, which a GGUF file may stand in for."""
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not is_there(file) and (stored := gguf_path(path)) is not None:
        return gguf_config(stored)
    return read_json(file, LARGEST_SETTINGS)


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a directory, of the first of these files; None without any.

    They are tokenizer.json, tokenizer.model, tekken.json and a GGUF file.
    """
    for read in (Tokenizer.from_directory, sentencepiece_tokenizer, tekken_tokenizer):
        if (tokenizer := read(directory)) is not None:
            return tokenizer
    stored = gguf_path(directory)
    return None if stored is None else gguf_tokenizer(stored)


def load(
    path: str | Path | None = None,
    dtype: Any = "float32",
    progress: bool = True,
    as_stored: bool = True,
    mesh: Mesh | None = None,
    quantization: str | None = None,
    blocked: bool = False,
    stacked: bool | None = False,
    page_shards: int | None = None,
) -> Model:
    """Read a Hugging Face model directory, or one that `convert` wrote.

    Args:
        path: the path of the directory; None is the model that ships with the package.
        dtype: the dtype of the weights and of the computation, whatever is on disk: "float32", "bfloat16"
            or "float16". On a CPU with kernels, "bfloat16" is that of matrices and of the embedding; all
            between products is float32, and on processors with AMX or AVX512-BF16 their
            operands are bfloat16.
        progress: whether to show a bar on stderr where that is a terminal.
        as_stored: whether matrices that are bfloat16 on disk stay so in a float32 model where the CPU's
            products widen them as they read: the same numbers, in half of the time.
        mesh: over which the weights are divided, from `entropic_jax.mesh.make_mesh`; each device gets only
            its part. None puts them on the default device.
        quantization: the quantization of the matrices that are multiplied by rows, and of the embedding,
            from `quantisation.QUANTIZATIONS`. "int8" keeps matrices that are stored so; None keeps or
            dequantises all of them. For a converted directory, its own or None.
        blocked: whether matrices lie block by block where CPU kernels read them so, as in an engine: decoding
            is faster, the results are the same. They then have another shape (see `kernel_layout`), and the
            model cannot be saved, quantised or divided.
        stacked: whether layers that repeat are stacked, for programs that scan over layers; see
            `layer_stack`. The model is as limited as with `blocked`, which it then is not. None: as engines
            do on the default device (`layer_stack.scans_layers`).
        page_shards: devices that divide a KV head and its pages, where the mesh has more devices than there
            are KV heads: a divisor of the number of devices that have the same head. 1 gives each a copy;
            None divides it over all, unless `sharding.why_copied` has a reason.

    Raises:
        ModelError: the directory cannot be used, or the model cannot be divided over the mesh; a ValueError.
    """
    directory = directory_of(path)
    dtype, quantization = checked(dtype), check_quantization(quantization)
    if not directory.is_dir():
        raise ModelError(f"path must be a directory with config.json and safetensors files; got {path}")
    config = read_config(directory, mesh, page_shards)
    stacked = scans_layers() if stacked is None else stacked
    stored = converted.description(directory)
    if stored is not None:
        converted.check(directory, stored, dtype, quantization)
    generation = read_generation(directory / "generation_config.json", config)
    tokenizer = read_tokenizer(directory)
    if tokenizer is not None:
        check_surrounding(tokenizer, directory, config)
    operand_dtype = wide_activations(dtype) if mesh is None else None
    vectors = dtype if operand_dtype is None else np.dtype(np.float32)
    if stored is not None:
        dtypes = converted.Dtypes(dtype, vectors, as_stored)
        params = converted.read(directory, stored, config, dtypes, mesh, page_shards)
        model = Model(config, params, tokenizer, generation, mesh, stored.quantization, operand_dtype)
    else:
        read = tensor_reader(directory, config, dtype, progress, mesh, quantization, page_shards)
        params = read(vectors, as_stored and mesh is None)
        model = Model(config, params, tokenizer, generation, mesh, operand_dtype=operand_dtype)
        model = model if quantization is None else quantised(model, quantization)
    model = dataclasses.replace(model, page_shards=page_shards)
    model = stack_layers(model) if stacked else model
    return in_blocks(model) if blocked and not model.stacked else model


def tensor_reader(
    directory: Path,
    config: Config,
    dtype: np.dtype,
    progress: bool,
    mesh: Mesh | None,
    quantization: str | None,
    page_shards: int | None = None,
) -> Callable[[np.dtype, bool], Params]:
    """A function of the dtype of vectors, and of `as_stored`, that reads the tensors of a directory.

    Args:
        directory: the directory, whose tensors are checked at once.
        config: the model's configuration.
        dtype: the dtype of matrices and of the embedding.
        progress: whether to show a bar.
        mesh: over which the arrays are divided.
        quantization: the quantization that they are meant for: matrices of int8 may stay as they are.
        page_shards: as for `load`.
    """
    raw = read_config_json(directory)
    stored_format, is_tower = weight_format(raw), tower_of(raw) is not None
    if stored_format is not None:
        log_activations(stored_format, directory.name, dtype.name)
    if is_tower:
        LOG.warning("%s: only its language model is loaded; images are refused", directory.name)
    tensors = StoredTensors(directory, config, stored_format, is_tower)
    tensors.check_sizes(config)
    try:
        _, shapes = structure(config)
    except ModelError as error:
        raise ModelError(f"{directory / 'config.json'}: {error}") from None

    def read(vectors: np.dtype, as_stored: bool) -> Params:
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        hidden = not (progress and sys.stderr.isatty())
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
            total = sum(leaf.size for leaf in jax.tree.leaves(shapes)) * dtype.itemsize
            task = bar.add_task(f"loading {directory.name}", total=total)
            advance = lambda amount: bar.advance(task, amount)
            narrow = int8_kernels(structure(config, quantization)[1])
            matrices = None if vectors == dtype else dtype
            placed = (mesh, narrow, matrices, page_shards)
            return weights.read(tensors, config, vectors, advance, as_stored, *placed)

    return read


def in_blocks(model: Model) -> Model:
    """The model with matrices block by block, where it computes so that CPU kernels read them; see `load`.

    Args:
        model: consumed: its arrays are moved.
    """
    if model.mesh is not None or model.activation_dtype != np.float32:
        return model
    return dataclasses.replace(model, blocked=block_kernels(model.params))


def check_layout(model: Model, action: str) -> None:
    """Raise ModelError for a model whose matrices lie block by block, or in stacks."""
    for name in ("blocked", "stacked"):
        if getattr(model, name):
            raise ModelError(f"model must be loaded without `{name}` to be {action}")


def wide_activations(dtype: np.dtype) -> OperandDtype | None:
    """The dtype of operands on one device, with weights of `dtype`; None for activations of that dtype.

    The kernels of a CPU take activations of float32; one that multiplies bfloat16 rounds operands to it.
    """
    if dtype != jnp.bfloat16 or not skinny_matmul.reads_as_stored(dtype):
        return None
    return "bfloat16" if skinny_matmul.rounds_operands() else "float32"


def quantised(model: Model, quantization: str = "int8") -> Model:
    """The model with quantised weights.

    Args:
        model: not quantised.
        quantization: one of `quantisation.QUANTIZATIONS`.

    Raises:
        ModelError: for another quantisation, one whose groups do not divide the model's matrices, or a model
            that is quantised already; a ValueError.
    """
    check_layout(model, "quantised")
    if model.quantization is not None:
        raise ModelError(f"model must not be quantised; its weights are {model.quantization}")
    shapes = structure(model.config, check_quantization(quantization))[1]
    if model.mesh is not None:
        sharding.check_groups(shapes, model.mesh)
    params = quantise(model.params, shapes)
    if model.mesh is not None:
        params = jax.device_put(params, sharding.shardings(params, model.mesh))
    return dataclasses.replace(model, params=params, quantization=quantization)


def check_surrounding(tokenizer: Tokenizer, directory: Path, config: Config) -> None:
    """Raise ModelError for a tokenizer that puts tokens around a text that the model does not know.

    Args:
        tokenizer: the tokenizer.
        directory: the directory of the model.
        config: the model's configuration.
    """
    unknown = [token for token in tokenizer.encode("") if token >= config.vocab_size]
    if unknown:
        raise ModelError(
            f"{directory / 'tokenizer.json'}: post_processor must add token ids below vocab_size, "
            f"{config.vocab_size}; got {unknown[0]}"
        )


def save(model: Model, path: str | Path, dtype: Any = None) -> None:
    """Write a directory that `load` and transformers read.

    The output projection is left out where the embeddings are tied.

    Args:
        model: the model to write.
        path: the path of the directory, which is made.
        dtype: the dtype of the weights on disk, by default that of the parameters.
    """
    check_layout(model, "saved")
    if model.quantization is not None:
        raise ModelError(f"model must not be quantised to be saved; its weights are {model.quantization}")
    devices = sharding.model_devices(model.mesh)
    if (copies := sharding.kv_head_copies(model.config, devices, model.page_shards)) > 1:
        raise ModelError(f"model must have one copy of each KV head to be saved; it has {copies} on its mesh")
    directory = Path(path)
    dtype = checked(jax.tree.leaves(model.params)[0].dtype if dtype is None else dtype)
    directory.mkdir(parents=True, exist_ok=True)
    described = to_json(model.config, FAMILIES[model.config.architecture], dtype.name)
    generation = model.generation or {name: described[name] for name in ("bos_token_id", "eos_token_id")}
    for name, value in (("config.json", described), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    if model.tokenizer is not None:
        model.tokenizer.save(directory)
    weights.write(directory / SINGLE, model.params, model.config, dtype)


def initialise(config: Config, seed: int, dtype: Any = "float32") -> Model:
    """A model with random weights, the same for the same seed: for tests and benchmarks, not for training.

    Kernels are normal with variance 1 / fan-in, so activations keep their scale; norms are one.

    Args:
        config: the model's configuration.
        seed: the seed of the weights.
        dtype: "float32", "bfloat16" or "float16", as in `load`.
    """
    dtype = checked(dtype)
    operand_dtype = wide_activations(dtype)
    vector_dtype = dtype if operand_dtype is None else np.dtype(np.float32)
    structure(config)  # an unknown architecture is an error
    offset = FAMILIES[config.architecture].output(config).norm.offset
    arrays = []
    for number, entry in enumerate(entries(config)):
        random, kind = np.random.default_rng((seed, number)), entry.path[-1]
        if kind == "weight" and entry.path[0] != "embed_tokens":
            arrays.append(jnp.full(entry.shape, 1.0 - offset, vector_dtype))
            continue
        fan_in = entry.shape[-2] if kind == "kernel" else config.hidden_size
        values = random.standard_normal(entry.shape, np.float32)
        values /= np.float32(math.sqrt(fan_in))
        is_matrix = entry.is_kernel or kind == "weight"
        arrays.append(jnp.asarray(values.astype(dtype if is_matrix else vector_dtype)))
    params = jax.tree.unflatten(jax.tree.structure(structure(config)[1]), arrays)
    if config.tie_word_embeddings:
        params["lm_head"]["kernel"] = params["embed_tokens"]["weight"].T.copy()
    return Model(config, params, operand_dtype=operand_dtype)


def checked(dtype: Any) -> np.dtype:
    """The NumPy dtype of that name. Raises ModelError unless it is one of `ACCEPTED_DTYPES`."""
    try:
        result = jnp.dtype(dtype)
    except TypeError:
        result = None
    if result is None or result.name not in ACCEPTED_DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(ACCEPTED_DTYPES)}; got {dtype!r}")
    return result
