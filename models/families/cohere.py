"""Cohere 1 and 2 (Command R): layer norms without bias, attention and feed-forward block side by side."""

from typing import Any

from ..block_spec import BlockSpec, Family, NormSpec, OutputSpec, block_of, rope_of
from ..config import Config


def norm(config: Config) -> NormSpec:
    return NormSpec(config.rms_norm_eps, "layer")


def cohere(config: Config, layer: int) -> BlockSpec:
    """Cohere 1: queries and keys may be normalised, with a weight for every head."""
    bias, rope = config.attention_bias, rope_of(config, layer, interleaved=True)
    switches: dict[str, Any] = {"bias": bias, "output_bias": bias, "rope": rope}
    if config.use_qk_norm:
        switches |= {"head_norm": norm(config), "norm_span": "each"}
    return block_of(config, layer, norm=norm(config), placement="parallel", **switches)


def cohere2(config: Config, layer: int) -> BlockSpec:
    """Cohere 2: layers with a window rotate, layers without do not."""
    bias, sliding = config.attention_bias, config.window(layer) is not None
    rope = rope_of(config, layer, interleaved=True) if sliding else None
    return block_of(
        config, layer, norm=norm(config), placement="parallel", bias=bias, output_bias=bias, rope=rope
    )


def output(config: Config) -> OutputSpec:
    return OutputSpec(norm(config), 1.0, config.logit_scale)


KEYS = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "logit_scale": 0.0625} | {
    "tie_word_embeddings": True,
    "attention_bias": False,
}
FAMILIES = (
    Family(
        "CohereForCausalLM",
        "cohere",
        {**KEYS, "rope_theta": 5e5, "use_qk_norm": False},
        cohere,
        output,
        aliases={"rms_norm_eps": "layer_norm_eps"},
    ),
    Family(
        "Cohere2ForCausalLM",
        "cohere2",
        {**KEYS, "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
        cohere2,
        output,
        aliases={"rms_norm_eps": "layer_norm_eps"},
    ),
)
