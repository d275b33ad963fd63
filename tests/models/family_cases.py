"""Configurations of every family: unusual head counts, ties, biases, windows, caps, experts, ropes."""

from typing import Any

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
BIAS = {"attention_bias": True}
WINDOW = {"sliding_window": 7, "use_sliding_window": True}
SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LLAMA4 = {"head_dim": 8, "intermediate_size_mlp": 36, "num_local_experts": 5} | {
    "attention_chunk_size": 7,
    "floor_scale": 5,
    "interleave_moe_layer_step": 2,
}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6} | {
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
EXPERTS_OF_GLM = {"head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3} | {
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}


def longrope(pairs: int) -> dict[str, Any]:
    """The scaling of Phi 3 for a head of `pairs` pairs."""
    short, long = [1.0 + 0.1 * i for i in range(pairs)], [2.0 + i for i in range(pairs)]
    return {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"num_key_value_heads": 1, **TIED, "rope_parameters": LLAMA3}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}, "head_dim": 16}),
    ("Llama", {**BIAS, "mlp_bias": True, "num_hidden_layers": 3, "num_key_value_heads": 4}),
    ("Llama4", {**LLAMA4, "num_hidden_layers": 4, "num_experts_per_tok": 2}),
    (
        "Llama4",
        {**LLAMA4, "moe_layers": [1], "no_rope_layers": [0, 1], "attention_chunk_size": 12, "floor_scale": 8}
        | {"use_qk_norm": False, **BIAS, **TIED, "rope_parameters": LLAMA3, "num_key_value_heads": 4},
    ),
    (
        "Llama4",
        {
            **LLAMA4,
            "layer_types": [FULL, CHUNKED],
            "attn_temperature_tuning": False,
            "num_key_value_heads": 1,
        },
    ),
    ("Mistral", {"num_key_value_heads": 4, "sliding_window": None, "head_dim": 12}),
    ("Mistral", {"sliding_window": 5, **TIED}),
    ("Ministral", {"sliding_window": 5, "head_dim": 10, "layer_types": [SLIDING, FULL]}),
    (
        "Ministral3",
        {
            "head_dim": 8,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    ("Qwen2", {**TIED, "num_key_value_heads": 1, **WINDOW, "max_window_layers": 1}),
    ("Qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e6}, "num_key_value_heads": 4}),
    ("Qwen3", {"head_dim": 16, **TIED}),
    ("Qwen3", {"num_key_value_heads": 1, "head_dim": 10, **BIAS, **WINDOW, "max_window_layers": 1}),
    ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 6}),
    ("Mixtral", {"num_key_value_heads": 1, "num_local_experts": 4, **TIED}),
    (
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 18, "norm_topk_prob": True, "num_experts": 5},
    ),
    (
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2, "qkv_bias": False},
    ),
    ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True, **WINDOW, **BIAS}),
    ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "norm_topk_prob": False, "mlp_only_layers": [0]}),
    ("Gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    ("VaultGemma", {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 20}),
    (
        "VaultGemma",
        {"head_dim": 8, "num_key_value_heads": 1, "attn_logit_softcapping": 2.0, **BIAS, **UNTIED}
        | {"layer_types": [FULL, SLIDING], "sliding_window": 5, "final_logit_softcapping": None},
    ),
    (
        "Gemma2",
        {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
    ),
    (
        "Gemma2",
        {"head_dim": 8, "num_key_value_heads": 4, "sliding_window": 9, "final_logit_softcapping": None},
    ),
    ("Gemma3", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 9, "num_hidden_layers": 6}),
    (
        "Gemma3",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": [FULL, SLIDING],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    ("Phi3", {"sliding_window": 7}),
    (
        "Phi3",
        {
            "rope_parameters": {**longrope(3), "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 16,
        },
    ),
    ("Olmo2", {"num_key_value_heads": 1, **BIAS}),
    ("Olmo3", {"sliding_window": 6, "num_hidden_layers": 4, **TIED}),
    ("Olmo3", {"sliding_window": 6, "layer_types": [SLIDING, FULL], "rope_parameters": {FULL: YARN}}),
    (
        "Granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3}
        | {"logits_scaling": 3.0, **TIED},
    ),
    ("Granite", {**BIAS, "mlp_bias": True, "num_key_value_heads": 4}),
    ("GraniteMoe", {"num_local_experts": 5, "num_experts_per_tok": 3, "residual_multiplier": 0.5, **TIED}),
    ("SmolLM3", {"num_hidden_layers": 4, **TIED}),
    (
        "SmolLM3",
        {**UNTIED, **BIAS, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 6},
    ),
    ("Starcoder2", {"sliding_window": 6, **TIED}),
    ("Starcoder2", {"use_bias": False, **UNTIED, "num_key_value_heads": 1}),
    ("Cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    ("Cohere", {**BIAS, "logit_scale": 1.5, "num_key_value_heads": 1}),
    ("Cohere2", {"sliding_window": 6, "num_hidden_layers": 4, "logit_scale": 0.7}),
    ("Glm", {"head_dim": 8}),
    ("Glm4", {"head_dim": 16, "num_key_value_heads": 1}),
    ("Glm4", {"head_dim": 8, "attention_bias": False, **TIED}),
    ("GptOss", {"head_dim": 8, "sliding_window": 6, "num_local_experts": 6, "num_experts_per_tok": 2}),
    (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "num_local_experts": 4,
            "rope_parameters": {**YARN, "truncate": False},
        }
        | {"swiglu_limit": 0.5},
    ),
    ("Arcee", {"rope_parameters": {**YARN, "beta_fast": 4.0, "beta_slow": 0.1}, **TIED}),
    ("Nemotron", {"num_key_value_heads": 1}),
    (
        "Nemotron",
        {"mlp_bias": True, **BIAS, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ),
    ("Phi", {"num_key_value_heads": 4}),
    (
        "Phi",
        {"num_key_value_heads": 1, "qk_layernorm": True}
        | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ),
    ("StableLm", {"num_key_value_heads": 1, "use_qkv_bias": True}),
    (
        "StableLm",
        {"use_parallel_residual": True, **TIED}
        | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 1}),
    ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True, **BIAS, **TIED}),
    ("Exaone4", {"sliding_window": 6, "num_hidden_layers": 4}),
    ("Exaone4", {"sliding_window": None, "layer_types": [FULL, FULL], "rope_parameters": LLAMA3}),
    ("HunYuanDenseV1", {"head_dim": 12, "num_key_value_heads": 1, **BIAS}),
    (
        "HunYuanDenseV1",
        {
            "head_dim": 8,
            **TIED,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
        },
    ),
    ("Helium", {"head_dim": 8, "num_key_value_heads": 1}),
    ("Glm4Moe", {**EXPERTS_OF_GLM, "n_group": 4, "topk_group": 2}),
    (
        "Glm4Moe",
        {**EXPERTS_OF_GLM, "use_qk_norm": True, **BIAS, "n_shared_experts": 2, "norm_topk_prob": False},
    ),
    ("SeedOss", {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True}),
    ("Ernie4_5", {"head_dim": 8, "use_bias": True}),
    (
        "Ernie4_5_Moe",
        {"head_dim": 8, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20}
        | {"num_hidden_layers": 3, "moe_layer_end_index": 1, **UNTIED},
    ),
    (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 0}
        | {"moe_layer_start_index": 0, "moe_layer_interval": 2, "use_bias": True},
    ),
    ("MiniMaxM2", {"head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 4}),
    ("Apertus", {"num_key_value_heads": 4}),
    ("Apertus", {**BIAS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("DeepseekV2", {**LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "n_shared_experts": 2}),
    (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": 12, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"num_key_value_heads": 4, "routed_scaling_factor": 2.0},
    ),
    ("DeepseekV3", {**LATENT, "q_lora_rank": 12, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2}),
    (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
        | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}, **BIAS},
    ),
    (
        "Glm4MoeLite",
        {**LATENT, "q_lora_rank": 12, "num_key_value_heads": 4, "num_hidden_layers": 3}
        | {"mlp_layer_types": ["dense", "sparse", "dense"], "n_group": 2},
    ),
    ("Glm4MoeLite", {**LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "n_shared_experts": 2}),
    (
        "Dots1",
        {**EXPERTS_OF_GLM, "n_shared_experts": 2, "norm_topk_prob": True, "n_group": 4, "topk_group": 2},
    ),
    (
        "Dots1",
        {**EXPERTS_OF_GLM, "n_shared_experts": 1, "sliding_window": 7, "max_window_layers": 1, **BIAS}
        | {"routed_scaling_factor": 2.5},
    ),
]
