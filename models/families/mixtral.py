"""Mixtral, and MiniMax M2, which spells its experts alike."""

from ..block_spec import BlockSpec, Family, RouterSpec, block_of, experts_of, rms_norm_of
from ..config import Config

ROUTER = RouterSpec(normalise=True)


def mixtral(config: Config, layer: int) -> BlockSpec:
    """Mixtral (arXiv 2401.04088): the weights of a token's experts sum to one."""
    return block_of(config, layer, experts_of(config, ROUTER, inner=config.intermediate_size))


def minimax_m2(config: Config, layer: int) -> BlockSpec:
    """MiniMax M2: sigmoid scores with a correction; norms over all query heads, and over all key heads."""
    router = RouterSpec("sigmoid", correction=True, normalise=True)
    experts = experts_of(config, router, inner=config.intermediate_size)
    return block_of(config, layer, experts, head_norm=rms_norm_of(config), norm_span="all")


RENAMES = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)
FAMILIES = (
    Family(
        "MixtralForCausalLM",
        "mixtral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
        mixtral,
        renames=RENAMES,
    ),
    Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6}
        | {"num_local_experts": 256, "num_experts_per_tok": 8, "rotary_width": None}
        | {"partial_rotary_factor": 1.0},
        minimax_m2,
        aliases={"rotary_width": "rotary_dim"},
        renames=(*RENAMES, (".gate.e_score_correction_bias", ".e_score_correction_bias")),
        required={"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer"}
        | {"shared_intermediate_size": 0, "use_routing_bias": True},
    ),
)
