"""Options of LoRA adapters, by vLLM's names: checks of them, of names and of paths."""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from entropic_jax.parameter_tables.speculation_names import has_weights
from entropic_jax.parameter_tables.table import Flag, Number, ParameterError, short

from .option_types import Several, positive

NUMBERS = {"max_lora_rank": Number(int, 1, 512), "max_loras": Number(int, 1, 1024)}  # accepted values
LONGEST_NAME = 200  # characters


class LoRAModule(NamedTuple):
    """An adapter that the server begins with."""

    name: str
    path: str  # of a directory in PEFT's format


def add_arguments(group: argparse._ActionsContainer) -> None:
    """Declare the options of adapters."""
    group.add_argument(
        "--enable-lora", action="store_true", help="serve LoRA adapters of the model, several in one batch"
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        action=Several,
        type=module,
        default=(),
        metavar="NAME=PATH",
        help='adapters: names of the API and directories in PEFT\'s format; or {"name": ..., "path": ...}',
    )
    group.add_argument(
        "--max-loras",
        type=positive,
        metavar="INT",
        help="adapters that are loaded at once (default: as many as --lora-modules names)",
    )
    group.add_argument(
        "--max-lora-rank",
        type=positive,
        default=16,
        metavar="INT",
        help="largest rank of an adapter; smaller ones are padded (default: 16)",
    )


def module(text: str) -> LoRAModule:
    """An entry of `--lora-modules`: NAME=PATH, or an object as vLLM takes it."""
    if text.startswith("{"):
        try:
            stated = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"must be NAME=PATH or a JSON object; {error}") from None
        if not isinstance(stated, dict) or stated.keys() - {"name", "path", "base_model_name"}:
            raise argparse.ArgumentTypeError(f"must have the fields name and path; got {short(text)}")
        if not all(isinstance(stated.get(field), str) for field in ("name", "path")):
            raise argparse.ArgumentTypeError(f"must have the fields name and path; got {short(text)}")
        return LoRAModule(stated["name"], stated["path"])
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH; got {short(text)}")
    return LoRAModule(name, path)


def fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `EngineOptions` that a command line describes."""
    return {
        "enable_lora": options.enable_lora,
        "lora_modules": tuple(options.lora_modules),
        "max_loras": options.max_loras,
        "max_lora_rank": options.max_lora_rank,
    }


def check(options: Any) -> None:
    """Raise ParameterError unless adapters can be served with the other options.

    Args:
        options: with the fields of `fields`, `speculate`, `mesh` and the sizes of parallelism, as
            `EngineOptions`.
    """
    Flag().check("enable_lora", options.enable_lora)
    modules, most = options.lora_modules, options.max_loras
    if not isinstance(modules, (list, tuple)) or not all(isinstance(x, LoRAModule) for x in modules):
        raise ParameterError(
            f"lora_modules must be a list of LoRAModule; got {short(modules)}", "lora_modules"
        )
    names = [entry.name for entry in modules]
    if not options.enable_lora:
        if names:
            raise ParameterError(
                f"lora_modules must be empty unless enable_lora is on; got {short(names)}", "lora_modules"
            )
        if most is not None:
            raise ParameterError(f"max_loras must be None unless enable_lora is on; got {most}", "max_loras")
        return
    for name in names:
        check_name(name, "lora_modules")
    if len(set(names)) < len(names):
        raise ParameterError(f"lora_modules must have different names; got {short(names)}", "lora_modules")
    if most is not None and len(names) > most:
        raise ParameterError(
            f"max_loras must be at least {len(names)}, the number of lora_modules; got {most}", "max_loras"
        )
    sizes = (options.tensor_parallel_size, options.data_parallel_size, options.expert_parallel_size)
    if options.mesh is not None or sizes != (1, 1, 1):
        raise ParameterError(
            "enable_lora must be off with several devices, over which adapters are not divided; got True",
            "enable_lora",
        )
    if options.speculate is not None and has_weights(options.speculate):
        raise ParameterError(
            "speculate must not name a draft model or head together with enable_lora: they have no adapters; "
            f"got {short(options.speculate)}",
            "speculate",
        )


def check_name(name: Any, field: str) -> None:
    """Raise ParameterError for what cannot be the name of an adapter.

    Args:
        name: the name.
        field: the field that states the name, for the message.
    """
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise ParameterError(
            f"{field} must be a name of 1 to {LONGEST_NAME} printable characters; got {short(name)}", field
        )


def inside(path: str, folder: Path) -> Path:
    """The directory of an adapter below a folder, without symbolic links.

    Args:
        path: absolute, or relative to the folder.
        folder: the folder that the directory must be in.

    Raises:
        ParameterError: It leads out of the folder, also by a symbolic link of it or of a file in it.
    """
    refused = ParameterError(
        f"lora_path must be a directory below the server's --lora-dir; got {short(path)}", "lora_path"
    )
    try:
        root = folder.resolve(strict=True)
        directory = (root / path).resolve(strict=True)
        entries = [entry.resolve(strict=True) for entry in directory.iterdir()]
    except (OSError, ValueError, RuntimeError):  # missing, a file, a null byte, a loop of links
        raise refused from None
    if not all(place.is_relative_to(root) for place in (directory, *entries)) or directory == root:
        raise refused
    return directory
