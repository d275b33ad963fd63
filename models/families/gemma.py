"""Gemma 1, 2 and 3, text only (arXiv 2403.08295, 2408.00118, 2503.19786), and VaultGemma (2510.15001)."""

from typing import Any

from ..block_spec import BlockSpec, Family, NormSpec, OutputSpec, block_of, rope_of
from ..config import Config


def norm(config: Config) -> NormSpec:
    """An RMS norm whose stored weight is one less."""
    return NormSpec(config.rms_norm_eps, offset=1.0)


def gemma(config: Config, layer: int) -> BlockSpec:
    """Gemma 1: Llama with a GELU gate and another norm."""
    bias = config.attention_bias
    return block_of(config, layer, norm=norm(config), bias=bias, output_bias=bias)


def gemma2(config: Config, layer: int, placement: str = "sandwich", **switches: Any) -> BlockSpec:
    """Gemma 2: norms around both blocks, capped scores, a window in every second layer.

    Args:
        config: the model's configuration.
        layer: its number.
        placement: the placement of the norms.
        **switches: fields of the block that differ in a descendant.
    """
    bias = config.attention_bias
    return block_of(
        config,
        layer,
        norm=norm(config),
        placement=placement,
        scale=config.query_pre_attn_scalar**-0.5,
        soft_cap=config.attn_logit_softcapping,
        bias=bias,
        output_bias=bias,
        **switches,
    )


def gemma3(config: Config, layer: int) -> BlockSpec:
    """Gemma 3: normalised queries and keys, five layers of six with a window and a base of their own."""
    return gemma2(config, layer, head_norm=norm(config), rope=rope_of(config, layer, local=True))


def vaultgemma(config: Config, layer: int) -> BlockSpec:
    """VaultGemma: Gemma 2 without norms after the blocks."""
    return gemma2(config, layer, "pre")


def output(config: Config) -> OutputSpec:
    """Embeddings are multiplied by √hidden, and logits may be capped."""
    return OutputSpec(norm(config), config.hidden_size**0.5, 1.0, config.final_logit_softcapping)


KEYS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "attention_bias": False,
}
CAPS = {"query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None}
SANDWICH = (
    (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
    (".attention_output_norm.", ".post_attention_layernorm."),
    (".mlp_output_norm.", ".post_feedforward_layernorm."),
)
FAMILIES = (
    Family(
        "GemmaForCausalLM",
        "gemma",
        {**KEYS, "max_position_embeddings": 8192, "num_key_value_heads": 16},
        gemma,
        output,
        activations={"gelu": "gelu_pytorch_tanh"},  # of the first files, which were trained with the other
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        {
            **KEYS,
            **CAPS,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "sliding_window_pattern": 2,
        }
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        gemma2,
        output,
        aliases={"hidden_act": "hidden_activation"},
        renames=SANDWICH,
        required={"sliding_window_pattern": 2},
    ),
    Family(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        {**KEYS, **CAPS, "max_position_embeddings": 8192, "num_key_value_heads": 4}
        | {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        vaultgemma,
        output,
        aliases={"hidden_act": "hidden_activation"},
        renames=SANDWICH[:1],
        required={"sliding_window_pattern": 2},
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**KEYS, **CAPS, "max_position_embeddings": 131072, "num_key_value_heads": 4, "rope_theta": 1e6}
        | {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4}
        | {"final_logit_softcapping": None},
        gemma3,
        output,
        aliases={"hidden_act": "hidden_activation"},
        renames=SANDWICH,
        required={"attn_logit_softcapping": None},
    ),
)
