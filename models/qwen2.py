"""Qwen 2 and 2.5 (arXiv 2407.10671): biases on queries, keys and values; later layers may slide."""

from .config import Config, Family
from .layers import MLP, Attention, DecoderLayer


def layer(config: Config, index: int) -> DecoderLayer:
    attention = Attention(config, bias=True, window=config.window(index))
    return DecoderLayer(config, attention, MLP(config.hidden_size, config.intermediate_size))


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    layer=layer,
)
