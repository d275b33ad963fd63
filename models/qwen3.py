"""Qwen 3 (arXiv 2505.09388): queries and keys are normalised per head before they are rotated."""

from .config import Config, Family
from .layers import MLP, Attention, DecoderLayer


def layer(config: Config, index: int) -> DecoderLayer:
    bias = config.attention_bias
    attention = Attention(config, bias=bias, output_bias=bias, head_norm=True, window=config.window(index))
    return DecoderLayer(config, attention, MLP(config.hidden_size, config.intermediate_size))


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    layer=layer,
)
