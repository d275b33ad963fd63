"""List the models that can be run, or describe one.

Without a path: the embedded model and the architectures that can be loaded. With one: what a model directory
holds, read from its headers alone.
"""

import argparse
import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from ..options.model import EMBEDDED
from ..request import RequestError

BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
}
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HEADER_LIMIT = 100_000_000  # bytes, of the safetensors format
ROWS = (  # of the description: what it says, and the keys of config.json
    ("layers", "num_hidden_layers"),
    ("hidden size", "hidden_size"),
    ("attention heads", "num_attention_heads"),
    ("key/value heads", "num_key_value_heads"),
    ("experts", "num_local_experts", "num_experts"),
    ("experts per token", "num_experts_per_tok"),
    ("vocabulary", "vocab_size"),
    ("context", "max_position_embeddings"),
    ("sliding window", "sliding_window"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic models` takes."""
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help="a model directory")


def run(options: argparse.Namespace) -> int:
    """Print the list or the description, and return the exit status."""
    if options.path is not None:
        print("\n".join(describe(options.path)))
        return 0
    from entropic_jax.models import FAMILIES

    print("embedded")
    print("\n".join(f"  {line}" for line in describe(EMBEDDED)))
    print("\narchitectures")
    print("\n".join(f"  {name}" for name in sorted(FAMILIES)))
    return 0


def describe(path: Path) -> list[str]:
    """Lines on the model in a directory; RequestError if it is not one."""
    config = read_config(path)
    tensors = read_tensors(path)
    parameters = sum(math.prod(shape) for _, shape in tensors)
    kinds = Counter()
    for kind, shape in tensors:
        kinds[NAMES.get(kind, kind)] += math.prod(shape)
    size = sum(BYTES.get(kind, 1) * math.prod(shape) for kind, shape in tensors)
    rows = [
        ("path", str(path)),
        ("architecture", ", ".join(config.get("architectures") or [config.get("model_type", "unknown")])),
        ("parameters", f"{parameters:,}"),
        ("weights", f"{' and '.join(kind for kind, _ in kinds.most_common())}, {size / 1e6:,.1f} MB"),
    ]
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        rows.append(("quantization", str(quantization.get("quant_method"))))
    for label, *keys in ROWS:
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is not None:
            rows.append((label, f"{value:,}" if isinstance(value, int) else str(value)))
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {value}" for label, value in rows]


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a model directory."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise RequestError(
            "path must be a directory with config.json, tokenizer.json and weights in safetensors; "
            f"got {file}, which cannot be read ({error.strerror})"
        ) from None
    except ValueError as error:
        raise RequestError(f"{file} must hold a JSON object; got text that is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise RequestError(f"{file} must hold a JSON object; got {type(config).__name__}")
    return config


def read_tensors(path: Path) -> list[tuple[str, list[int]]]:
    """Kind and shape of every tensor in the safetensors files of a directory."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise RequestError(f"path must be a directory with *.safetensors; got {path}, which has none")
    tensors = []
    for file in files:
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(length, HEADER_LIMIT)))
            tensors += [
                (entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"
            ]
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
            raise RequestError(
                f"{file} must be a complete safetensors file; got one without a readable header"
            ) from None
    return tensors
