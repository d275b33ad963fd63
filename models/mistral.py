"""Mistral (arXiv 2310.06825): Llama whose layers, in the first releases, see a sliding window."""

from .config import Config, Family
from .layers import MLP, Attention, DecoderLayer


def layer(config: Config, index: int) -> DecoderLayer:
    attention = Attention(config, window=config.window(index))
    return DecoderLayer(config, attention, MLP(config.hidden_size, config.intermediate_size))


FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    layer=layer,
)
