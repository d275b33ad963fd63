"""Configuration of a model from the metadata of a GGUF file, in the fields of `config.json`."""

from pathlib import Path
from typing import Any

from ..config import ModelError, is_integer
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
# Fields that change what is computed, and the values at which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.attn_factor": (None, 1.0),
    "rope.scaling.yarn_ext_factor": (None, 1.0),
    "rope.scaling.yarn_attn_factor": (None, 1.0),
    "attention.scale": (None, 0.0),
    "attention.logit_scale": (None, 0.0),
    "attention.clamp_kqv": (None, 0.0),
    "attention.causal": (None, True),
    "expert_weights_scale": (None, 0.0, 1.0),
    "logit_scale": (None, 0.0, 1.0),
    "embedding_scale": (None, 0.0, 1.0),
    "residual_scale": (None, 0.0, 1.0),
}
EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
SELF_CONTAINED = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma")  # metadata say everything
SCALINGS = ("none", "linear", "yarn")


def gguf_config(path: Path) -> dict[str, Any]:
    """The equivalent of config.json. Raises ModelError for a file that does not determine it."""
    file = GGUFFile(path)
    values = file.metadata
    name = values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{path}: general.architecture must be one of {', '.join(ARCHITECTURES)}; got {name!r}"
        )
    factors = next(filter(file.tensors.__contains__, ROPE_FACTORS), None)
    if factors is not None:
        raise ModelError(f"{path.parent / 'config.json'} is missing: {factors} does not state rope_scaling")
    if name not in SELF_CONTAINED:
        raise ModelError(
            f"{path.parent / 'config.json'} is missing: the metadata of {name} do not state all of it"
        )
    for field, accepted in NEUTRAL.items():
        if (stated := values.get(f"{name}.{field}")) not in accepted:
            raise ModelError(f"{path}: {name}.{field} must be absent; got {stated!r}")
    if values.get(f"{name}.attention.value_length") not in (None, values.get(f"{name}.attention.key_length")):
        raise ModelError(f"{path}: {name}.attention.value_length must equal {name}.attention.key_length")
    read = {field: values.get(f"{name}.{theirs}") for field, theirs in FIELDS.items()}
    experts = {
        ours: values[f"{name}.{theirs}"] for ours, theirs in EXPERTS.items() if f"{name}.{theirs}" in values
    }
    if experts:
        experts |= {"num_local_experts": experts["num_experts"]} if "num_experts" in experts else {}
        experts["norm_topk_prob"] = name == "qwen3moe"  # as llama.cpp computes it
    embedding = file.tensors.get("token_embd.weight")
    return {field: value for field, value in read.items() if value is not None} | {
        "architectures": ["MixtralForCausalLM" if experts and name == "llama" else ARCHITECTURES[name][0]],
        **experts,
        "vocab_size": embedding.shape[0] if embedding is not None and embedding.shape else None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "rope_scaling": rope_scaling(path, values, name),
        "partial_rotary_factor": rotated_share(values, name),
    }


def rotated_share(values: dict[str, Any], name: str) -> float | None:
    """The share of a head that is rotated, if the metadata state it.

    Args:
        values: metadata of the file.
        name: the name of the architecture.
    """
    rotated, width = (values.get(f"{name}.{key}") for key in ("rope.dimension_count", "attention.key_length"))
    hidden, heads = (values.get(f"{name}.{key}") for key in ("embedding_length", "attention.head_count"))
    if width is None and is_integer(hidden) and is_integer(heads) and heads > 0:
        width = hidden // heads
    return rotated / width if is_integer(rotated) and is_integer(width) and width > 0 else None


def rope_scaling(path: Path, values: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The scaling of the rotation.

    Args:
        path: the path of the file, for messages.
        values: its metadata.
        name: the name of the architecture.
    """
    factor = values.get(f"{name}.rope.scaling.factor") or values.get(f"{name}.rope.scale_linear")
    kind = values.get(f"{name}.rope.scaling.type", "linear" if factor else "none")  # as in llama.cpp
    if kind not in SCALINGS:
        raise ModelError(
            f"{path}: {name}.rope.scaling.type must be one of {', '.join(SCALINGS)}; got {kind!r}"
        )
    if kind == "none":
        return None
    original = values.get(f"{name}.rope.scaling.original_context_length")
    extra = {} if original is None else {"original_max_position_embeddings": original}
    for ours in ("beta_fast", "beta_slow") if kind == "yarn" else ():
        value = values.get(f"{name}.rope.scaling.yarn_{ours}")
        extra |= {} if value is None else {ours: value}
    return {"rope_type": kind, "factor": factor, **extra}
