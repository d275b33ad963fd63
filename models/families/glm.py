"""GLM 4 (arXiv 2406.12793), of 2024 and of 2025: half of a head rotates, in neighbouring pairs."""

from ..block_spec import BlockSpec, Family, block_of, rope_of
from ..config import Config


def glm(config: Config, layer: int) -> BlockSpec:
    """GLM 4 of 2024 (GLM-4-9B)."""
    return block_of(config, layer, bias=config.attention_bias, rope=rope_of(config, layer, interleaved=True))


def glm4(config: Config, layer: int) -> BlockSpec:
    """GLM 4 of 2025 (GLM-4-0414): norms around both blocks."""
    rope = rope_of(config, layer, interleaved=True)
    return block_of(config, layer, placement="sandwich", bias=config.attention_bias, rope=rope)


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
)
