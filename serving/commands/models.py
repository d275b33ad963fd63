"""List the models that can be run, or describe one.

Without a path: the embedded model and the architectures that can be loaded. With one: what a model directory
holds, in any format that can be loaded. No weight is read.
"""

import argparse
import math
from collections import Counter
from pathlib import Path

from ..options.model import EMBEDDED
from ..request import RequestError

ROWS = (  # of the description: what it says, and the field of `Config`
    ("layers", "num_hidden_layers"),
    ("hidden size", "hidden_size"),
    ("attention heads", "num_attention_heads"),
    ("key/value heads", "num_key_value_heads"),
    ("experts", "num_local_experts"),
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
    from entropic_jax.models.text_towers import TOWERS

    print("embedded")
    print("\n".join(f"  {line}" for line in describe(EMBEDDED)))
    print("\narchitectures")
    print("\n".join(f"  {name}" for name in sorted(FAMILIES)))
    print("\narchitectures with a text tower, of which the language model is loaded")
    print("\n".join(f"  {name}" for name in sorted(TOWERS)))
    return 0


def describe(path: Path) -> list[str]:
    """Lines on the model in a directory. Raises RequestError if it is not one that can be loaded."""
    from entropic_jax.models import ModelError, converted
    from entropic_jax.models.decoder import num_parameters
    from entropic_jax.models.formats import FIELDS
    from entropic_jax.models.formats.model_files import open_tensors
    from entropic_jax.models.formats.stored import DTYPES, FLOAT8, INTEGERS
    from entropic_jax.models.model import read_config, read_config_json

    if not path.is_dir():
        raise RequestError(f"path must be a model directory; got {path}")
    try:
        raw, config = read_config_json(path), read_config(path)
        checkpoint = converted.description(path)
        stored = () if checkpoint is not None else open_tensors(path, config).values()
        parameters = num_parameters(config)
    except ModelError as error:
        raise RequestError(f"path must be a model that can be loaded: {error}", "path") from None
    kinds: Counter[str] = Counter()
    names = DTYPES | INTEGERS | FLOAT8
    for tensor in stored:
        kind = "GGUF" if tensor.file.suffix == ".gguf" else names.get(tensor.dtype, tensor.dtype)
        kinds[kind] += math.prod(tensor.shape)
    size = sum(file.stat().st_size for file in {tensor.file for tensor in stored})
    if checkpoint is not None:
        kinds, size = Counter(converted.summary(checkpoint)), sum(checkpoint.files.values())
    rows = [
        ("path", str(path)),
        ("architecture", config.architecture),
        ("parameters", f"{parameters:,}"),
        ("weights", f"{' and '.join(kind for kind, _ in kinds.most_common())}, {size / 1e6:,.1f} MB"),
    ]
    quantization = next((raw[field] for field in FIELDS if raw.get(field)), None)
    if isinstance(quantization, dict):
        rows.append(("quantization", str(quantization.get("quant_method"))))
    if checkpoint is not None:
        rows.append(("converted to", ", ".join(filter(None, (checkpoint.dtype, checkpoint.quantization)))))
    for label, name in ROWS:
        value = getattr(config, name)
        if value:
            rows.append((label, f"{value:,}"))
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {value}" for label, value in rows]
