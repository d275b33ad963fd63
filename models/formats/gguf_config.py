"""Configuration of a model from the metadata of a GGUF file, in the fields of `config.json`."""

from pathlib import Path
from typing import Any

from ..config import ModelError
from .foreign_names import ARCHITECTURES, ROPE_FACTORS
from .gguf_files import GGUFFile

FIELDS = {  # of config.json: of the metadata, after the architecture's name
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
}
SCALINGS = ("none", "linear", "yarn")


def gguf_config(path: Path) -> dict[str, Any]:
    """What a config.json would say. Raises ModelError for a file from which it cannot be known."""
    file = GGUFFile(path)
    values = file.metadata
    name = values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{path}: general.architecture must be one of {', '.join(ARCHITECTURES)}; got {name!r}"
        )
    if ROPE_FACTORS in file.tensors:
        raise ModelError(
            f"{path.parent / 'config.json'} is missing: {ROPE_FACTORS} does not state rope_scaling"
        )
    read = {field: values.get(f"{name}.{theirs}") for field, theirs in FIELDS.items()}
    embedding = file.tensors.get("token_embd.weight")
    return {field: value for field, value in read.items() if value is not None} | {
        "architectures": [ARCHITECTURES[name][0]],
        "vocab_size": embedding.shape[0] if embedding is not None and embedding.shape else None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "rope_scaling": rope_scaling(path, values, name),
    }


def rope_scaling(path: Path, values: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The scaling of the rotation.

    Args:
        path: the path of the file, for messages.
        values: its metadata.
        name: the name of the architecture.
    """
    kind = values.get(f"{name}.rope.scaling.type", "none")
    if kind not in SCALINGS:
        raise ModelError(
            f"{path}: {name}.rope.scaling.type must be one of {', '.join(SCALINGS)}; got {kind!r}"
        )
    if kind == "none":
        return None
    original = values.get(f"{name}.rope.scaling.original_context_length")
    extra = {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_type": kind, "factor": values.get(f"{name}.rope.scaling.factor"), **extra}
