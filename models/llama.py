"""Llama 2 and 3.x (arXiv 2307.09288, 2407.21783), with linear or llama3 scaling of the rotary embedding."""

from .config import Config, Family
from .layers import MLP, Attention, DecoderLayer


def layer(config: Config, index: int) -> DecoderLayer:
    attention = Attention(config, bias=config.attention_bias, output_bias=config.attention_bias)
    return DecoderLayer(config, attention, MLP(config.hidden_size, config.intermediate_size, config.mlp_bias))


FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults={"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    layer=layer,
)
