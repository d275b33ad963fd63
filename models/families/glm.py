"""GLM 4 (arXiv 2406.12793), of 2024 and of 2025, and GLM 4.5: half of a head rotates."""

from ..block_spec import (
    BlockSpec,
    Family,
    MLPSpec,
    RouterSpec,
    block_of,
    experts_of,
    mlp_of,
    rms_norm_of,
    rope_of,
)
from ..config import Config


def glm(config: Config, layer: int) -> BlockSpec:
    """GLM 4 of 2024 (GLM-4-9B): pairs of the rotation are neighbours."""
    return block_of(config, layer, bias=config.attention_bias, rope=rope_of(config, layer, interleaved=True))


def glm4(config: Config, layer: int) -> BlockSpec:
    """GLM 4 of 2025 (GLM-4-0414): norms around both blocks."""
    rope = rope_of(config, layer, interleaved=True)
    return block_of(config, layer, placement="sandwich", bias=config.attention_bias, rope=rope)


def glm4_moe(config: Config, layer: int) -> BlockSpec:
    """GLM 4.5 (arXiv 2508.06471): the experts of DeepSeek V3, but for the first layers."""
    normalise, scale = config.norm_topk_prob, config.routed_scaling_factor
    router = RouterSpec("sigmoid", False, True, normalise, scale, config.n_group, config.topk_group, 2)
    mlp = mlp_of(config)
    if layer >= config.first_k_dense_replace:
        shared = MLPSpec(config.moe_intermediate_size * config.n_shared_experts, config.hidden_act)
        mlp = experts_of(config, router, shared=shared if config.n_shared_experts else None)
    head_norm = rms_norm_of(config) if config.use_qk_norm else None
    return block_of(config, layer, mlp, bias=config.attention_bias, head_norm=head_norm)


KEYS = {"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128} | {
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
FUSED = (("gate_up_proj", ("gate_proj", "up_proj")),)
FAMILIES = (
    Family("GlmForCausalLM", "glm", KEYS, glm, fused=FUSED),
    Family(
        "Glm4ForCausalLM",
        "glm4",
        KEYS,
        glm4,
        fused=FUSED,
        renames=(
            (".attention_output_norm.", ".post_self_attn_layernorm."),
            (".mlp_output_norm.", ".post_mlp_layernorm."),
        ),
    ),
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
        | {"partial_rotary_factor": 0.5, "attention_bias": False, "use_qk_norm": False}
        | {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
        | {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0},
        glm4_moe,
        aliases={"num_local_experts": "n_routed_experts"},
        renames=((".shared_expert.", ".shared_experts."),),
    ),
)
