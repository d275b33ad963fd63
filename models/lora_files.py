"""Adapters on disk in PEFT's format: adapter_config.json and adapter_model.safetensors in a directory.

Modules have the names of the model's own tensors. One that holds several of our linear layers (`qkv_proj`)
is split, so that each gets its part of B. Every field that changes what an adapter computes is honoured, or
refused by name.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .config import LARGEST_SETTINGS, Config, ModelError, abbreviate, is_integer, is_number, read_json
from .formats.safetensors_files import open_safetensors
from .formats.settings import Settings
from .formats.stored import DTYPES, StoredTensor, as_float32
from .lora import BLOCKS, Factors, targets, zero_factors
from .tensor_names import Piece, entries
from .text_towers import text_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
# Initial weights that leave those of the base model as they are.
INITIAL = (True, False, "gaussian", "eva", "orthogonal")
# Fields without an effect on what a trained adapter computes: where it comes from, how it was trained. Which
# modules it has, its tensors say.
IGNORED = frozenset(
    "auto_mapping base_model_name_or_path ensure_weight_tying ephemeral_gpu_offload eva_config "
    "exclude_modules inference_mode layers_pattern layers_to_transform loftq_config lora_dropout "
    "megatron_core peft_version qalora_group_size revision runtime_config task_type".split()
)
READ = frozenset(
    "alpha_pattern bias fan_in_fan_out init_lora_weights lora_alpha peft_type r rank_pattern target_modules "
    "use_rslora".split()
)
LARGEST_RANK, LARGEST_ALPHA = 2**16, 1e9
MODULE_NAME = re.compile(r"\^?[A-Za-z0-9_.\\]+\$?")


class AdapterConfig(NamedTuple):
    """The fields of adapter_config.json that say what an adapter computes."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]  # of modules that differ, by pattern
    alphas: Mapping[str, float]
    modules: tuple[str, ...]  # that it updates; () if a pattern says so

    def rank_of(self, module: str) -> int:
        """The rank r of a module."""
        return self.ranks.get(matching(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of the product of A and B: α/r, or α/√r."""
        rank, alpha = self.rank_of(module), self.alphas.get(matching(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def matching(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that a module's name ends with, as in PEFT; "" if there is none.

    >>> matching({"k_proj": 4, "layers.1.self_attn.q_proj": 8}, "model.layers.1.self_attn.q_proj")
    'layers.1.self_attn.q_proj'
    """
    for pattern in patterns:
        name = pattern.replace("\\", "").removesuffix("$")
        if module == name.removeprefix("^") or (not name.startswith("^") and module.endswith(f".{name}")):
            return pattern
    return ""


def read_adapter_config(directory: Path) -> AdapterConfig:
    """The configuration of an adapter. Raises ModelError for a field that cannot be honoured."""
    file = directory / CONFIG
    raw = read_json(file, LARGEST_SETTINGS)
    settings = Settings(raw, str(file))
    settings.choice("peft_type", ("LORA",))
    settings.choice("bias", ("none",), "none")
    settings.choice("init_lora_weights", INITIAL, True)
    settings.boolean("fan_in_fan_out", False)  # says how the base model is stored, which is known
    settings.absent(*sorted(raw.keys() - IGNORED - READ))
    rank: Any = raw.get("r")
    alpha: Any = raw.get("lora_alpha", 8)
    if not is_rank(rank):
        raise settings.refuse("r", f"an integer between 1 and {LARGEST_RANK}")
    if not is_alpha(alpha):
        raise settings.refuse("lora_alpha", "a number")
    modules = raw.get("target_modules")
    if isinstance(modules, list) and not all(isinstance(name, str) for name in modules):
        raise settings.refuse("target_modules", "a list of names, a pattern or null")
    if not isinstance(modules, list | str | None):
        raise settings.refuse("target_modules", "a list of names, a pattern or null")
    return AdapterConfig(
        rank,
        float(alpha),
        settings.boolean("use_rslora", False),
        read_pattern(settings, "rank_pattern", is_rank, "positive integers"),
        read_pattern(settings, "alpha_pattern", is_alpha, "numbers"),
        tuple(modules) if isinstance(modules, list) else (),
    )


def is_rank(value: object) -> bool:
    """Whether a value can be the rank of an update."""
    return is_integer(value) and 0 < value <= LARGEST_RANK


def is_alpha(value: object) -> bool:
    """Whether a value can be α; NaN cannot."""
    return is_number(value) and abs(value) <= LARGEST_ALPHA


def read_pattern(settings: Settings, field: str, valid: Any, kind: str) -> Mapping[str, Any]:
    """An object of module names to numbers.

    Args:
        settings: the object that has the field.
        field: its name.
        valid: says whether a number is accepted.
        kind: what numbers are accepted, for the message.
    """
    value = settings.fields.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(map(valid, value.values())):
        raise settings.refuse(field, f"an object of module names to {kind}")
    if wrong := next((name for name in value if not MODULE_NAME.fullmatch(name)), None):
        raise ModelError(f"{settings.name}.{field} must name modules, not patterns; got {abbreviate(wrong)}")
    return value


def read_adapter(directory: Path, config: Config, largest_rank: int) -> dict[str, Factors]:
    """An adapter in float32, padded to the largest rank.

    Args:
        directory: the directory of the adapter.
        config: the configuration of the model that it updates.
        largest_rank: the rank that slots have room for.

    Raises:
        ModelError: a file is missing or damaged, a field or tensor cannot be honoured, a shape or the rank
            does not suit the model.
    """
    if not directory.is_dir():
        raise ModelError(f"adapter must be a directory with {CONFIG} and {TENSORS}; got {directory}")
    settings, file = read_adapter_config(directory), directory / TENSORS
    modules = paired(open_safetensors(file), file)
    pieces = pieces_of(config)
    check_complete(settings, modules, pieces, file)
    result, layers_of = zero_factors(config, largest_rank), targets(config)
    for module, (a, b) in modules.items():
        if module not in pieces:
            raise ModelError(f"{file}: {module} must be a linear layer of {config.architecture}")
        for path, _ in pieces[module]:
            name = path[3] if len(path) == 5 and path[0] == "layers" else ""
            if name not in layers_of or path[2] != BLOCKS[name][0] or path[1] not in layers_of[name].layers:
                raise ModelError(f"{file}: {module} must be one of {', '.join(BLOCKS)} of a dense layer")
        rank = settings.rank_of(module)
        if rank > largest_rank:
            raise ModelError(
                f"max_lora_rank must be at least {rank}, the rank of {module} in {directory}; "
                f"got {largest_rank}"
            )
        outputs, inputs = pieces[module][0][1].stored_shape
        check_tensor(a, f"{module}.lora_A", (rank, inputs))
        check_tensor(b, f"{module}.lora_B", (outputs, rank))
        scaled = as_float32(b) * np.float32(settings.scale_of(module))
        for path, piece in pieces[module]:
            factors, place = result[path[3]], layers_of[path[3]].layers.index(path[1])
            factors.a[place, :, :rank] = as_float32(a).T
            factors.b[place, :rank] = scaled[piece.outputs].T
    return result


def paired(tensors: Mapping[str, StoredTensor], file: Path) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """A and B of every module, by the module's name in the model. Raises ModelError for other tensors."""
    factors: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = FACTOR.fullmatch(name.removeprefix(PREFIX))
        if match is None or not name.startswith(PREFIX):
            raise ModelError(
                f"{file}: tensors must be {PREFIX}*.lora_A.weight and .lora_B.weight of linear layers; "
                f"got {abbreviate(name)}"
            )
        factors.setdefault(match["module"], {})[match["factor"]] = tensor
    for module, pair in factors.items():
        if len(pair) == 1:
            raise ModelError(f"{file}: {module} must have lora_A and lora_B; got lora_{next(iter(pair))}")
    if not factors:
        raise ModelError(f"{file} must have tensors; got none")
    return {family_name(module): (pair["A"], pair["B"]) for module, pair in factors.items()}


def family_name(module: str) -> str:
    """The name of a module in a file of its family, also for the language model of one that sees images."""
    return next(iter(text_tensors([f"{module}.weight"])), module).removesuffix(".weight")


def pieces_of(config: Config) -> dict[str, list[tuple[tuple[Any, ...], Piece]]]:
    """The matrices of Params that a linear layer on disk is made of, by its name."""
    result: dict[str, list[tuple[tuple[Any, ...], Piece]]] = {}
    for entry in entries(config):
        if entry.is_kernel:
            for piece in entry.pieces:
                result.setdefault(piece.name.removesuffix(".weight"), []).append((entry.path, piece))
    return result


def check_complete(
    settings: AdapterConfig, modules: Mapping[str, Any], pieces: Mapping[str, Any], file: Path
) -> None:
    """Raise ModelError if the configuration names modules of the model of which there is no tensor.

    Args:
        settings: names the modules.
        modules: those with tensors.
        pieces: those of the model.
        file: the file that holds the tensors.
    """
    for name in settings.modules:
        has = lambda names, name=name: any(module == name or module.endswith(f".{name}") for module in names)
        if has(pieces) and not has(modules):
            raise ModelError(f"{file} lacks tensors of {abbreviate(name)}, which target_modules names")


def check_tensor(tensor: StoredTensor, name: str, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless a tensor has a shape and a known dtype.

    Args:
        tensor: a tensor of the adapter.
        name: its name, for the message.
        shape: the shape that it must have.
    """
    if tensor.shape != shape:
        raise ModelError(f"{tensor.file}: {name} must have shape {shape}; got {tensor.shape}")
    if tensor.dtype not in DTYPES:
        raise ModelError(f"{tensor.file}: {name} must be of {', '.join(DTYPES)}; got {tensor.dtype}")
