"""OLMo 2 and 3 (arXiv 2501.00656): norms after the blocks, queries and keys normalised over all heads."""

from ..block_spec import BlockSpec, Family, block_of, rms_norm_of, rope_of
from ..config import Config


def olmo(config: Config, layer: int) -> BlockSpec:
    """OLMo 2, and OLMo 3 whose layers with a window have no scaled rotation."""
    bias = config.attention_bias
    switches = {"bias": bias, "output_bias": bias, "rope": rope_of(config, layer, local=True)}
    head_norm = {"head_norm": rms_norm_of(config), "norm_span": "all"}
    return block_of(config, layer, placement="post", **switches, **head_norm)


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
        {**KEYS, "max_position_embeddings": 65536, "rope_theta": 5e5, "rope_local_base_freq": None}
        | {"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
        olmo,
        renames=RENAMES,
    ),
)
