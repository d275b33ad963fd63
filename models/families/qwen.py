"""Qwen 2, 2.5 and 3, with and without experts (arXiv 2407.10671, 2412.15115, 2505.09388)."""

from ..block_spec import BlockSpec, Family, MLPSpec, RouterSpec, block_of, experts_of, mlp_of, rms_norm_of
from ..config import Config


def qwen2(config: Config, layer: int) -> BlockSpec:
    """Qwen 2 and 2.5: biases on queries, keys and values; later layers may slide."""
    return block_of(config, layer, bias=True)


def qwen3(config: Config, layer: int) -> BlockSpec:
    """Qwen 3: queries and keys are normalised per head before they are rotated."""
    bias = config.attention_bias
    return block_of(config, layer, bias=bias, output_bias=bias, head_norm=rms_norm_of(config))


def has_experts(config: Config, layer: int) -> bool:
    """Whether the layer has experts instead of one feed-forward block."""
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0


def qwen2_moe(config: Config, layer: int) -> BlockSpec:
    """Qwen 2 with experts and a gated expert that all tokens share."""
    mlp = mlp_of(config)
    if has_experts(config, layer):
        router = RouterSpec(normalise=config.norm_topk_prob)
        shared = MLPSpec(config.shared_expert_intermediate_size, config.hidden_act)
        mlp = experts_of(config, router, shared=shared, shared_gate=True)
    return block_of(config, layer, mlp, bias=config.qkv_bias)


def qwen3_moe(config: Config, layer: int) -> BlockSpec:
    """Qwen 3 with experts."""
    bias, mlp = config.attention_bias, mlp_of(config)
    if has_experts(config, layer):
        mlp = experts_of(config, RouterSpec(normalise=config.norm_topk_prob))
    return block_of(config, layer, mlp, bias=bias, output_bias=bias, head_norm=rms_norm_of(config))


POSITIONS = {"max_position_embeddings": 32768}
WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
LAYERS = {"max_window_layers": 28, "layer_types": None}
EXPERTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()}
FAMILIES = (
    Family("Qwen2ForCausalLM", "qwen2", {**POSITIONS, "num_key_value_heads": 32, **WINDOW, **LAYERS}, qwen2),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        {
            **POSITIONS,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "attention_bias": False,
            **WINDOW,
            **LAYERS,
        },
        qwen3,
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**POSITIONS, "num_key_value_heads": 16, **WINDOW, "max_window_layers": 28, "layer_types": None}
        | {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, **EXPERTS}
        | {"shared_expert_intermediate_size": 5632, "qkv_bias": True},
        qwen2_moe,
        first_layers_slide=True,
        aliases={"num_local_experts": "num_experts"},
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**POSITIONS, "num_key_value_heads": 4, "attention_bias": False, **WINDOW}
        | {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, **EXPERTS},
        qwen3_moe,
        aliases={"num_local_experts": "num_experts"},
    ),
)
