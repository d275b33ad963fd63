"""Llama, and families that differ in a switch, such as Mistral, SmolLM3, Seed-OSS and Hunyuan."""

from ..block_spec import BlockSpec, Family, PositionScale, block_of, mlp_of, rms_norm_of, rope_of
from ..config import Config, ModelError

POSITIONS = {"max_position_embeddings": 131072}


def llama(config: Config, layer: int) -> BlockSpec:
    """Llama 2 and 3.x (arXiv 2307.09288, 2407.21783)."""
    bias = config.attention_bias
    return block_of(config, layer, mlp_of(config, bias=config.mlp_bias), bias=bias, output_bias=bias)


def mistral(config: Config, layer: int) -> BlockSpec:
    """Mistral (arXiv 2310.06825): layers may see a sliding window."""
    return block_of(config, layer)


def ministral3(config: Config, layer: int) -> BlockSpec:
    """Ministral 3: queries grow with the logarithm of the position beyond the original context."""
    beta, scaling = config.llama_4_scaling_beta, config.rope_scaling
    growth = None
    if beta:
        if scaling is None or scaling.rope_type != "yarn":
            raise ModelError(f"rope_scaling.llama_4_scaling_beta must be 0 without 'yarn'; got {beta}")
        growth = PositionScale(beta, scaling.original_max_position_embeddings)
    return block_of(config, layer, position_scale=growth)


def seed_oss(config: Config, layer: int) -> BlockSpec:
    """Seed-OSS: biases of q, k and v, and of the output where stated."""
    mlp = mlp_of(config, bias=config.mlp_bias)
    return block_of(config, layer, mlp, bias=config.attention_bias, output_bias=config.attention_out_bias)


def helium(config: Config, layer: int) -> BlockSpec:
    """Helium: pairs of the rotation are neighbours."""
    mlp, rope = mlp_of(config, bias=config.mlp_bias), rope_of(config, layer, interleaved=True)
    return block_of(config, layer, mlp, bias=config.attention_bias, rope=rope)


def hunyuan(config: Config, layer: int) -> BlockSpec:
    """Hunyuan, dense: queries and keys are normalised per head after they are rotated."""
    bias, norm = config.attention_bias, rms_norm_of(config)
    return block_of(config, layer, bias=bias, output_bias=bias, head_norm=norm, norm_rotated=True)


def arcee(config: Config, layer: int) -> BlockSpec:
    """Arcee (AFM): a feed-forward block without a gate, by default with max(x, 0)²."""
    mlp, bias = mlp_of(config, gated=False, bias=config.mlp_bias), config.attention_bias
    return block_of(config, layer, mlp, bias=bias, output_bias=bias)


LLAMA_KEYS = {"attention_bias": False, "mlp_bias": False}
FAMILIES = (
    Family("LlamaForCausalLM", "llama", {"max_position_embeddings": 2048, **LLAMA_KEYS}, llama),
    Family(
        "MistralForCausalLM",
        "mistral",
        {**POSITIONS, "num_key_value_heads": 8, "sliding_window": 4096},
        mistral,
    ),
    Family(
        "MinistralForCausalLM",
        "ministral",
        {**POSITIONS, "num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None},
        mistral,
    ),
    Family(
        "Ministral3ForCausalLM",
        "ministral3",
        {"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
        | {"sliding_window": None, "llama_4_scaling_beta": 0.0},
        ministral3,
        default_rope={"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1}
        | {"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        {"max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6, **LLAMA_KEYS}
        | {"tie_word_embeddings": True, "no_rope_layers": None, "no_rope_layer_interval": 4}
        | {"use_sliding_window": False, "sliding_window": None, "layer_types": None},
        llama,
    ),
    Family(
        "SeedOssForCausalLM",
        "seed_oss",
        {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, **LLAMA_KEYS}
        | {"attention_bias": True, "attention_out_bias": False},
        seed_oss,
    ),
    Family(
        "HeliumForCausalLM",
        "helium",
        {"max_position_embeddings": 4096, "num_key_value_heads": 20, "head_dim": 128, **LLAMA_KEYS}
        | {"rms_norm_eps": 1e-8, "rope_theta": 1e5},
        helium,
    ),
    Family(
        "ArceeForCausalLM",
        "arcee",
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2", **LLAMA_KEYS},
        arcee,
    ),
    Family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False},
        hunyuan,
        renames=((".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm.")),
        stretched_base=True,
    ),
)
