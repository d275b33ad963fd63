"""gpt-oss (arXiv 2508.10925): attention sinks, biases everywhere, experts with a clamped SwiGLU."""

from ..block_spec import BlockSpec, Family, RouterSpec, block_of, experts_of
from ..config import Config


def gpt_oss(config: Config, layer: int) -> BlockSpec:
    """Every second layer has a window; a head's sink takes attention and gives nothing."""
    experts = experts_of(
        config,
        RouterSpec(by_logit=True, bias=True),
        inner=config.intermediate_size,
        bias=True,
        clamp=(config.swiglu_alpha, config.swiglu_limit),
    )
    bias = config.attention_bias
    return block_of(config, layer, experts, bias=bias, output_bias=bias, sinks=True)


FAMILIES = (
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5}
        | {"rope_theta": 150000.0, "sliding_window": 128, "layer_types": None, "sliding_window_pattern": 2}
        | {"attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4}
        | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        gpt_oss,
        required={"sliding_window_pattern": 2},
        fused=(("gate_up_proj", ("gate_proj", "up_proj")),),
        renames=(
            (".mlp.gate.", ".mlp.router."),
            (".experts.gate_up_proj.weight", ".experts.gate_up_proj"),
            (".experts.gate_up_proj.bias", ".experts.gate_up_proj_bias"),
            (".experts.down_proj.weight", ".experts.down_proj"),
            (".experts.down_proj.bias", ".experts.down_proj_bias"),
        ),
        stacked_experts=True,
        experts_as_multiplied=True,
        interleaved_experts=True,
        default_rope={"rope_type": "yarn", "factor": 32.0, "truncate": False}
        | {"original_max_position_embeddings": 4096},
    ),
)
