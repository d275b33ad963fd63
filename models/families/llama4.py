"""Llama 4, text only: attention within chunks, layers without rotation, experts that a sigmoid weights.

Three layers of four rotate queries and keys, and attend within chunks of the text; the fourth does neither.
Source: Meta's Llama 4 model cards (2025). Growth of queries: Nakanishi, Scalable-Softmax (2025; arXiv
2501.19399).
"""

from ..block_spec import (
    BlockSpec,
    Family,
    NormSpec,
    PositionScale,
    RouterSpec,
    block_of,
    experts_of,
    mlp_of,
    rope_of,
)
from ..config import CHUNKED, FULL, Config, ModelError


def has_experts(config: Config, layer: int) -> bool:
    """Whether a layer has experts: those listed, else every n-th."""
    if config.moe_layers is not None:
        return layer in config.moe_layers
    return (layer + 1) % config.interleave_moe_layer_step == 0


def llama4(config: Config, layer: int) -> BlockSpec:
    """Layers with a rotation normalise queries and keys after it; in the others queries grow."""
    if config.layer_types is not None and config.layer_types[layer] not in (FULL, CHUNKED):
        raise ModelError(f"layer_types must be {FULL!r} or {CHUNKED!r}; got {config.layer_types[layer]!r}")
    mlp = mlp_of(config, inner=config.intermediate_size_mlp)
    if has_experts(config, layer):
        router = RouterSpec("sigmoid", by_logit=True)
        sizes = {"inner": config.intermediate_size, "shared": mlp_of(config)}
        mlp = experts_of(config, router, weighted_inputs=True, **sizes)
    rotates, bias = config.rotates(layer), config.attention_bias
    tuned = config.attn_temperature_tuning and not rotates
    return block_of(
        config,
        layer,
        mlp,
        bias=bias,
        output_bias=bias,
        rope=rope_of(config, layer, interleaved=True),
        head_norm=NormSpec(config.rms_norm_eps, weight=False) if config.use_qk_norm and rotates else None,
        norm_rotated=True,
        position_scale=PositionScale(config.attn_scale, config.floor_scale, 1) if tuned else None,
        window=None,
        chunk=config.chunk(layer),
    )


FAMILIES = (
    Family(
        "Llama4ForCausalLM",
        "llama4_text",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
        | {"rope_theta": 5e5, "attention_bias": False, "use_qk_norm": True}
        | {"num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 16384}
        | {"interleave_moe_layer_step": 1, "moe_layers": None}
        | {"no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None}
        | {"attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192}
        | {"attn_scale": 0.1},
        llama4,
        fused=(("gate_up_proj", ("gate_proj", "up_proj")),),
        fused_in_experts=True,
        renames=(
            (".mlp.gate.", ".feed_forward.router."),
            (".mlp.", ".feed_forward."),
            (".experts.gate_up_proj.weight", ".experts.gate_up_proj"),
            (".experts.down_proj.weight", ".experts.down_proj"),
        ),
        stacked_experts=True,
        experts_as_multiplied=True,
    ),
)
