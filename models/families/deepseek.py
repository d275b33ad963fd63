"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention, groups of experts, shared experts.

GLM 4.7 Flash is V3 with other sizes, and says layer by layer which have experts. dots.llm1 has another
attention.
"""

from ..block_spec import (
    BlockSpec,
    ExpertsSpec,
    Family,
    LatentAttentionSpec,
    MLPSpec,
    NormSpec,
    RouterSpec,
    block_of,
    experts_of,
    mlp_of,
    rms_norm_of,
)
from ..config import DENSE, Config, ModelError
from ..rope import RopeSpec, yarn_magnitude

LATENT_EPSILON = 1e-6  # of the norms of latent vectors, whatever config.json states for the others


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
        NormSpec(LATENT_EPSILON),
        config.q_lora_rank,
        config.attention_bias,
        scale,
    )


def experts(config: Config, layer: int, router: RouterSpec) -> MLPSpec | ExpertsSpec:
    """Experts, and those that all tokens share; in the first layers a feed-forward block instead.

    Args:
        config: the model's configuration.
        layer: the number of the layer.
        router: the router of its experts.
    """
    kinds = config.mlp_layer_types
    if layer < config.first_k_dense_replace if kinds is None else kinds[layer] == DENSE:
        return mlp_of(config)
    shared = MLPSpec(config.moe_intermediate_size * config.n_shared_experts, config.hidden_act)
    return experts_of(config, router, shared=shared if config.n_shared_experts else None)


def deepseek_v2(config: Config, layer: int) -> BlockSpec:
    """DeepSeek V2: softmax scores, experts of the groups with the best expert."""
    if config.topk_method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"topk_method must be 'greedy' or 'group_limited_greedy'; got {config.topk_method!r}"
        )
    grouped = config.topk_method != "greedy"
    groups = (config.n_group, config.topk_group) if grouped else (1, 1)
    router = RouterSpec("softmax", False, False, False, config.routed_scaling_factor, *groups)
    return BlockSpec(attention(config), experts(config, layer, router), rms_norm_of(config))


def corrected(config: Config) -> RouterSpec:
    """Sigmoid scores with a correction, experts of the groups with the best two experts."""
    normalise, scale = config.norm_topk_prob, config.routed_scaling_factor
    return RouterSpec("sigmoid", False, True, normalise, scale, config.n_group, config.topk_group, 2)


def deepseek_v3(config: Config, layer: int) -> BlockSpec:
    """DeepSeek V3."""
    return BlockSpec(attention(config), experts(config, layer, corrected(config)), rms_norm_of(config))


def dots1(config: Config, layer: int) -> BlockSpec:
    """dots.llm1 (arXiv 2506.05767): the attention of Qwen 3, the experts of DeepSeek V3."""
    bias, mlp = config.attention_bias, experts(config, layer, corrected(config))
    return block_of(config, layer, mlp, bias=bias, output_bias=bias, head_norm=rms_norm_of(config))


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
    Family(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        {**LATENT, **EXPERTS, "v_head_dim": 256, "attention_bias": False, "rms_norm_eps": 1e-5}
        | {"max_position_embeddings": 202752, "q_lora_rank": 768, "qk_nope_head_dim": 192}
        | {"num_local_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1}
        | {"moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
        | {"mlp_layer_types": None, "num_nextn_predict_layers": 0},
        deepseek_v3,
        aliases=ALIASES,
        renames=RENAMES,
        required={"rope_interleave": True, "topk_method": "noaux_tc"},
        unwritten=("head_dim",),  # qk_rope_head_dim
    ),
    Family(
        "Dots1ForCausalLM",
        "dots1",
        {"num_key_value_heads": 32, "attention_bias": False, "max_position_embeddings": 2048, **EXPERTS}
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 0, "n_shared_experts": 0}
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "norm_topk_prob": False}
        | {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
        | {"sliding_window": 4096, "max_window_layers": 62, "layer_types": None},
        dots1,
        aliases=ALIASES,
        renames=RENAMES,
        required={"topk_method": "noaux_tc"},
    ),
)
