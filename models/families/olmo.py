"""OLMo 2 and 3, OLMoE and EXAONE 4: normalised queries and keys, norms after the blocks but for OLMoE."""

from ..block_spec import BlockSpec, Family, RouterSpec, block_of, experts_of, rms_norm_of, rope_of
from ..config import Config


def olmo(config: Config, layer: int) -> BlockSpec:
    """OLMo 2 (arXiv 2501.00656), and OLMo 3 whose layers with a window have no scaled rotation."""
    bias = config.attention_bias
    switches = {"bias": bias, "output_bias": bias, "rope": rope_of(config, layer, local=True)}
    head_norm = {"head_norm": rms_norm_of(config), "norm_span": "all"}
    return block_of(config, layer, placement="post", **switches, **head_norm)


def olmoe(config: Config, layer: int) -> BlockSpec:
    """OLMoE (arXiv 2409.02060): experts, norms before the blocks, heads normalised all at once."""
    bias = config.attention_bias
    mlp = experts_of(config, RouterSpec(normalise=config.norm_topk_prob), inner=config.intermediate_size)
    head_norm = {"head_norm": rms_norm_of(config), "norm_span": "all"}
    return block_of(config, layer, mlp, bias=bias, output_bias=bias, **head_norm)


def exaone4(config: Config, layer: int) -> BlockSpec:
    """EXAONE 4 (arXiv 2507.11407): each head normalised; if layers slide, those that do not do not rotate."""
    rotates = config.sliding_window is None or config.window(layer) is not None
    rope = rope_of(config, layer) if rotates else None
    return block_of(config, layer, placement="post", rope=rope, head_norm=rms_norm_of(config))


KEYS = {"rms_norm_eps": 1e-5, "attention_bias": False}
RENAMES = (
    (".attention_output_norm.", ".post_attention_layernorm."),
    (".mlp_output_norm.", ".post_feedforward_layernorm."),
)
FAMILIES = (
    Family("Olmo2ForCausalLM", "olmo2", {**KEYS, "max_position_embeddings": 2048}, olmo, renames=RENAMES),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        # As in transformers 5, a `rope_theta` for all layers is that of the layers without a window.
        {**KEYS, "max_position_embeddings": 65536, "rope_theta": 5e5, "rope_local_base_freq": 5e5}
        | {"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
        olmo,
        renames=RENAMES,
        required={"sliding_window_pattern": 4},
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        {**KEYS, "max_position_embeddings": 4096, "num_local_experts": 64, "num_experts_per_tok": 8}
        | {"norm_topk_prob": False},
        olmoe,
        aliases={"num_local_experts": "num_experts"},
        required={"clip_qkv": None, "sliding_window": None},
    ),
    Family(
        "Exaone4ForCausalLM",
        "exaone4",
        {"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}
        | {"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
        exaone4,
        renames=RENAMES,
    ),
)
