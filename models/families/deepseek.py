"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention, groups of experts, shared experts."""

from ..block_spec import (
    BlockSpec,
    Family,
    LatentAttentionSpec,
    MLPSpec,
    RouterSpec,
    experts_of,
    mlp_of,
    rms_norm_of,
)
from ..config import Config, ModelError
from ..rope import RopeSpec, yarn_magnitude


def attention(config: Config) -> LatentAttentionSpec:
    """Latent attention; with YaRN the scores are scaled once more."""
    scaling = config.rope_scaling
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if scaling is not None and scaling.mscale_all_dim:
        scale *= yarn_magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
    return LatentAttentionSpec(
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.v_head_dim,
        RopeSpec(config.qk_rope_head_dim, config.rope_theta, scaling, interleaved=True),
        rms_norm_of(config),
        config.q_lora_rank,
        config.attention_bias,
        scale,
    )


def block(config: Config, layer: int, router: RouterSpec) -> BlockSpec:
    """A layer with experts, but for the first ones.

    Args:
        config: the model's configuration.
        layer: its number.
        router: the router of its experts.
    """
    mlp = mlp_of(config)
    if layer >= config.first_k_dense_replace:
        shared = MLPSpec(config.moe_intermediate_size * config.n_shared_experts, config.hidden_act)
        mlp = experts_of(config, router, shared=shared if config.n_shared_experts else None)
    return BlockSpec(attention(config), mlp, rms_norm_of(config))


def deepseek_v2(config: Config, layer: int) -> BlockSpec:
    """DeepSeek V2: softmax scores, experts of the groups with the best expert."""
    if config.topk_method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"topk_method must be 'greedy' or 'group_limited_greedy'; got {config.topk_method!r}"
        )
    grouped = config.topk_method != "greedy"
    groups = (config.n_group, config.topk_group) if grouped else (1, 1)
    return block(
        config, layer, RouterSpec("softmax", False, False, False, config.routed_scaling_factor, *groups)
    )


def deepseek_v3(config: Config, layer: int) -> BlockSpec:
    """DeepSeek V3: sigmoid scores with a correction, experts of the groups with the best two experts."""
    normalise, scale = config.norm_topk_prob, config.routed_scaling_factor
    router = RouterSpec("sigmoid", False, True, normalise, scale, config.n_group, config.topk_group, 2)
    return block(config, layer, router)


LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
EXPERTS = {"num_experts_per_tok": 8, "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0}
ALIASES = {"num_local_experts": "n_routed_experts"}
RENAMES = ((".shared_expert.", ".shared_experts."),)
FAMILIES = (
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {**LATENT, **EXPERTS, "v_head_dim": 128, "attention_bias": False, "max_position_embeddings": 2048}
        | {"num_local_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 0}
        | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        deepseek_v2,
        aliases=ALIASES,
        renames=RENAMES,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {**LATENT, **EXPERTS, "v_head_dim": 128, "attention_bias": False, "max_position_embeddings": 4096}
        | {"num_local_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3}
        | {"moe_intermediate_size": 2048, "routed_scaling_factor": 2.5}
        | {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "num_nextn_predict_layers": 0},
        deepseek_v3,
        aliases=ALIASES,
        renames=RENAMES,
        required={"rope_interleave": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
)
