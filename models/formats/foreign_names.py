"""Tensors of files that are not Hugging Face's: GGUF of llama.cpp, and Mistral's `consolidated.safetensors`.

Both name tensors otherwise, and both keep the two numbers of a rotated pair next to each other where Hugging
Face's Llama keeps them half a head apart. Rows of the queries' and keys' matrices are put back in that order.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config, ModelError
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
    (".attn_q_norm.", ".self_attn.q_norm."),
    (".attn_k_norm.", ".self_attn.k_norm."),
    (".ffn_gate.", ".mlp.gate_proj."),
    (".ffn_down.", ".mlp.down_proj."),
    (".ffn_up.", ".mlp.up_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
)
# Architectures of GGUF files that are read, and the model families that each may hold.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "MistralForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
}
PAIRED = ("llama",)  # of these, rows of queries and keys are in the order of pairs
ROPE_FACTORS = "rope_freqs.weight"  # follows from rope_scaling in config.json


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


ForeignTensor = StoredTensor | GGUFTensor | ReorderedTensor


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
    renamed: dict[str, ForeignTensor] = {
        renames(name, GGUF): tensor for name, tensor in file.tensors.items() if name != ROPE_FACTORS
    }
    return in_halves(renamed, config) if architecture in PAIRED else renamed


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
