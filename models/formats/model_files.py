"""Files of a model directory that hold its weights: which there are, and the tensors in them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ..config import Config, ModelError, abbreviate, read_json
from .foreign_names import ForeignTensor, consolidated, gguf
from .safetensors_files import open_safetensors
from .stored import StoredTensor, require_names
from .torch_files import open_torch_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONSOLIDATED, CONSOLIDATED_INDEX = "consolidated.safetensors", "consolidated.safetensors.index.json"
TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
CONVERTED, CONVERTED_WEIGHTS = "converted.json", "weights"  # what `converted` reads, and the folder of arrays
VARIANT = re.compile(r"model\.([\w-]+)\.safetensors|model\.safetensors\.index\.([\w-]+)\.json")
TORCH_VARIANT = re.compile(r"pytorch_model\.([\w-]+)\.bin|pytorch_model\.bin\.index\.([\w-]+)\.json")
SHARD = re.compile(r"-\d{5}-of-\d{5}$")  # of a variant, whose index has the name without it
Opener = Callable[[Path], dict[str, StoredTensor]]
LONGEST = 255  # bytes of a file name


def open_tensors(directory: Path, config: Config) -> Mapping[str, ForeignTensor]:
    """The tensors of a directory by Hugging Face's names. Raises ModelError for missing or broken files."""
    for single, index, opener in (
        (SINGLE, INDEX, open_safetensors),
        (*variant(directory, SINGLE, VARIANT), open_safetensors),
        (TORCH_SINGLE, TORCH_INDEX, open_torch_file),
        (*variant(directory, TORCH_SINGLE, TORCH_VARIANT), open_torch_file),
    ):
        if (directory / single).exists():
            return opener(directory / single)
        if (directory / index).exists():
            return open_shards(directory, index, opener)
    if (directory / CONSOLIDATED).exists():
        return consolidated(open_safetensors(directory / CONSOLIDATED), config)
    if (directory / CONSOLIDATED_INDEX).exists():
        return consolidated(open_shards(directory, CONSOLIDATED_INDEX, open_safetensors), config)
    if (path := gguf_path(directory)) is not None:
        return gguf(path, config)
    others = ", ".join((TORCH_SINGLE, CONSOLIDATED, "*.gguf"))
    raise ModelError(
        f"{directory} must hold {SINGLE}, or several files and {INDEX}; got neither, nor {others}"
    )


def gguf_path(directory: Path) -> Path | None:
    """The GGUF file of a directory; None if there is none. Raises ModelError for several."""
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(f"{directory} must hold one GGUF file; got {', '.join(f.name for f in files[:3])}")
    return files[0] if files else None


def variant(directory: Path, single: str, pattern: re.Pattern[str]) -> tuple[str, str]:
    """The names that a file and an index of a variant, such as "fp16", would have.

    Args:
        directory: the directory of the model.
        single: the name of a file that is no variant.
        pattern: the pattern of the names of variants.

    Raises:
        ModelError: there are several variants.
    """
    stem, ending = single.split(".")
    matches = (pattern.fullmatch(path.name) for path in directory.glob(f"{stem}.*"))
    names = {match[1] or match[2] for match in matches if match}
    names = sorted({SHARD.sub("", name) for name in names})
    if len(names) > 1:
        raise ModelError(f"{directory} must hold one variant of {single}; got {', '.join(names)}")
    name = f".{names[0]}" if names else ""
    return f"{stem}{name}.{ending}", f"{single}.index{name}.json"


def open_shards(directory: Path, index: str, opener: Opener) -> dict[str, StoredTensor]:
    """The tensors of several files.

    Args:
        directory: the directory of the model.
        index: name of the file that says which tensor is in which file.
        opener: function that opens one file.
    """
    file_of = read_json(directory / index).get("weight_map", {})
    valid = isinstance(file_of, dict) and all(isinstance(f, str) for f in file_of.values())
    if not file_of or not valid:
        raise ModelError(f"{directory / index}: weight_map must be an object of tensor to file names")
    require_names(directory / index, file_of)
    outside = [f for f in file_of.values() if not is_file_name(f)]
    if outside:
        raise ModelError(
            f"{directory / index}: weight_map must name files in its directory; got {abbreviate(outside[0])}"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(file_of.values())):
        if not (directory / file).exists():
            raise ModelError(f"{directory / file} is missing, and {index} names it")
        tensors |= opener(directory / file)
    for name, file in file_of.items():
        if name not in tensors or tensors[name].file.name != file:
            holder = tensors.get(name)
            problem = "which has no such tensor" if holder is None else f"but {holder.file} holds it"
            raise ModelError(f"{index} says that {name} is in {directory / file}, {problem}")
    return tensors


def is_file_name(text: str) -> bool:
    """Whether a file of a directory can have this name."""
    return (
        text not in ("", "..")
        and Path(text).name == text
        and text.isprintable()
        and len(text.encode()) <= LONGEST
    )
