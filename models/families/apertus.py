"""Apertus (arXiv 2509.14233): xIELU in a feed-forward block without a gate, normalised queries and keys."""

from ..block_spec import BlockSpec, Family, block_of, mlp_of, rms_norm_of
from ..config import Config


def apertus(config: Config, layer: int) -> BlockSpec:
    bias = config.attention_bias
    mlp = mlp_of(config, gated=False)
    return block_of(config, layer, mlp, bias=bias, output_bias=bias, head_norm=rms_norm_of(config))


FAMILIES = (
    Family(
        "ApertusForCausalLM",
        "apertus",
        {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "hidden_act": "xielu"}
        | {"rope_theta": 12e6, "attention_bias": False},
        apertus,
        renames=(
            (".input_layernorm.", ".attention_layernorm."),
            (".post_attention_layernorm.", ".feedforward_layernorm."),
        ),
        default_rope={"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
)
