"""Tensors of files that are not Hugging Face's: GGUF of llama.cpp, and Mistral's `consolidated.safetensors`.

Both name tensors otherwise, and both keep the two numbers of a rotated pair next to each other where Hugging
Face's Llama keeps them half a head apart. Rows of the queries' and keys' matrices are put back in that order.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config, ModelError
from ..families import FAMILIES
from .gguf_files import GGUFFile, GGUFTensor
from .stored import StoredTensor

# Parts of names, replaced in order.
CONSOLIDATED = (
    ("tok_embeddings.", "model.embed_tokens."),
    ("output.", "lm_head."),
    ("layers.", "model.layers."),
    (".attention.wq.", ".self_attn.q_proj."),
    (".attention.wk.", ".self_attn.k_proj."),
    (".attention.wv.", ".self_attn.v_proj."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
)
GGUF = (
    ("token_embd.", "model.embed_tokens."),
    ("output_norm.", "model.norm."),
    ("output.", "lm_head."),
    ("blk.", "model.layers."),
    *((f".attn_{part}.", f".self_attn.{part}_proj.") for part in "qkv"),
    (".attn_output.", ".self_attn.o_proj."),
    (".attn_qkv.", ".self_attn.qkv_proj."),
    (".attn_q_norm.", ".self_attn.q_norm."),
    (".attn_k_norm.", ".self_attn.k_norm."),
    (".post_attention_norm.", ".attention_output_norm."),
    (".post_ffw_norm.", ".mlp_output_norm."),
    (".ffn_gate_inp_shexp.", ".mlp.shared_expert_gate."),
    (".ffn_gate_inp.", ".mlp.gate."),
    *((f".ffn_{part}_shexp.", f".mlp.shared_expert.{part}_proj.") for part in ("gate", "down", "up")),
    *((f".ffn_{part}_exps.", f".mlp.experts.{part}_proj.") for part in ("gate", "down", "up")),
    (".ffn_gate.", ".mlp.gate_proj."),
    (".ffn_down.", ".mlp.down_proj."),
    (".ffn_up.", ".mlp.up_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
)
# Architectures of GGUF files that are read, and the model families that each may hold.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen2moe": ("Qwen2MoeForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3moe": ("Qwen3MoeForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3": ("Gemma3ForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
}
FUSED = ("phi3",)  # of these, `ffn_up` holds the gate too
PAIRED = ("llama",)  # of these, rows of queries and keys are in the order of pairs
# Factors of the rotation, which follow from rope_scaling in config.json.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class ReorderedTensor:
    """A matrix whose rows are stored in another order.

    Args:
        tensor: as it is stored.
        order: where each row is stored.
    """

    def __init__(self, tensor: Any, order: np.ndarray) -> None:
        self.tensor, self.order = tensor, order
        self.dtype, self.shape, self.file = tensor.dtype, tensor.shape, tensor.file

    def __getitem__(self, index: Any) -> np.ndarray:
        rows = index[0] if isinstance(index, tuple) else index
        return self.tensor[self.order[rows]]

    def release(self) -> None:
        """See `release_pages`."""
        self.tensor.release()


class ShiftedTensor:
    """A vector of which a number is stored too much: a weight of a norm with its offset.

    Args:
        tensor: as it is stored.
        offset: what is subtracted.
    """

    def __init__(self, tensor: Any, offset: float) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype, self.shape, self.file = tensor.dtype, tensor.shape, tensor.file

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.tensor[index] - np.float32(self.offset)

    def release(self) -> None:
        """See `release_pages`."""
        self.tensor.release()


ForeignTensor = StoredTensor | GGUFTensor | ReorderedTensor | ShiftedTensor


def order_of_halves(rows: int, heads: int) -> np.ndarray:
    """Where the rows of a matrix are stored whose heads hold pairs: even rows of a head first, then odd ones.

    >>> order_of_halves(8, heads=2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def consolidated(tensors: Mapping[str, StoredTensor], config: Config) -> dict[str, ForeignTensor]:
    """The tensors of Mistral's file under Hugging Face's names, in its order of rows."""
    renamed = {renames(name, CONSOLIDATED): tensor for name, tensor in tensors.items()}
    renamed = {f"model.{name}" if name == "norm.weight" else name: t for name, t in renamed.items()}
    return in_halves(renamed, config)


def gguf(path: Path, config: Config) -> dict[str, ForeignTensor]:
    """The tensors of a GGUF file under Hugging Face's names, in its order of rows.

    Raises ModelError for a file that is damaged, or of another family than config.json.
    """
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    families = ARCHITECTURES.get(architecture, ()) if isinstance(architecture, str) else ()
    if config.architecture not in families:
        known = ", ".join(name for name, names in ARCHITECTURES.items() if config.architecture in names)
        raise ModelError(
            f"{path}: general.architecture must be {known or ', '.join(ARCHITECTURES)} for "
            f"{config.architecture}; got {architecture!r}"
        )
    family = FAMILIES[config.architecture]
    offset = family.output(config).norm.offset
    named: dict[str, ForeignTensor] = {}
    for name, tensor in file.tensors.items():
        if name not in ROPE_FACTORS:
            named |= parts_of(renames(name, GGUF), tensor, offset)
    renamed = {}
    fused = ((".mlp.up_proj.", ".mlp.gate_up_proj."),) if architecture in FUSED else ()
    for name, tensor in named.items():
        for ours, theirs in (*fused, *family.renames):
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return in_halves(renamed, config) if architecture in PAIRED else renamed


def parts_of(name: str, tensor: GGUFTensor, offset: float) -> dict[str, ForeignTensor]:
    """The tensors of a model that a tensor of a GGUF file holds, by name: one, or one per expert.

    Args:
        name: in the spelling of Llama.
        tensor: as it is stored.
        offset: what the weights of norms are stored with in addition.
    """
    if ".experts." in name and len(tensor.shape) == 3:
        split = (tensor.part(expert) for expert in range(tensor.shape[0]))
        return {name.replace(".experts.", f".experts.{i}."): part for i, part in enumerate(split)}
    if name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1:
        return {name: tensor.as_row()}
    if offset and "norm." in name:
        return {name: ShiftedTensor(tensor, offset)}
    return {name: tensor}


def renames(name: str, table: tuple[tuple[str, str], ...]) -> str:
    for theirs, ours in table:
        if theirs[0] == "." or name.startswith(theirs):
            name = name.replace(theirs, ours, 1)
    return name


def in_halves(tensors: Mapping[str, ForeignTensor], config: Config) -> dict[str, ForeignTensor]:
    """The tensors with the rows of queries and keys in the order of Hugging Face's Llama."""
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    result = dict(tensors)
    for name, tensor in tensors.items():
        count = next((n for part, n in heads.items() if part in name), None)
        if count is not None and tensor.shape and tensor.shape[0] % (2 * count) == 0:
            result[name] = ReorderedTensor(tensor, order_of_halves(tensor.shape[0], count))
    return result
