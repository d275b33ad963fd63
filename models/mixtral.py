"""Mixtral (arXiv 2401.04088): Mistral with experts, whose weights sum to one over a token's choices."""

from .config import Config, Family
from .experts import SparseMLP
from .layers import Attention, DecoderLayer


def layer(config: Config, index: int) -> DecoderLayer:
    attention = Attention(config, window=config.window(index))
    experts, choices = config.num_local_experts, config.num_experts_per_tok
    mlp = SparseMLP(config.hidden_size, config.intermediate_size, experts, choices, normalise=True)
    return DecoderLayer(config, attention, mlp)


FAMILY = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    layer=layer,
    renames=(
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".down_proj.", ".w2."),
        (".up_proj.", ".w3."),
    ),
)
