"""Mixtral, and Granite 3 with experts: Mistral's attention with experts of two spellings."""

from ..block_spec import BlockSpec, Family, RouterSpec, block_of, experts_of
from ..config import Config

ROUTER = RouterSpec(normalise=True)


def mixtral(config: Config, layer: int) -> BlockSpec:
    """Mixtral (arXiv 2401.04088): the weights of a token's experts sum to one."""
    return block_of(config, layer, experts_of(config, ROUTER, inner=config.intermediate_size))


FAMILIES = (
    Family(
        "MixtralForCausalLM",
        "mixtral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
        mixtral,
        renames=(
            (".mlp.", ".block_sparse_moe."),
            (".gate_proj.", ".w1."),
            (".down_proj.", ".w2."),
            (".up_proj.", ".w3."),
        ),
    ),
)
