"""Qwen 3 with experts (arXiv 2505.09388): Qwen 3's attention; some layers may keep a plain block."""

from .config import Config, Family
from .experts import SparseMLP
from .layers import MLP, Attention, DecoderLayer


def layer(config: Config, index: int) -> DecoderLayer:
    bias = config.attention_bias
    attention = Attention(config, bias=bias, output_bias=bias, head_norm=True, window=config.window(index))
    if index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step:
        return DecoderLayer(config, attention, MLP(config.hidden_size, config.intermediate_size))
    experts, choices = config.num_local_experts, config.num_experts_per_tok
    inner, normalise = config.moe_intermediate_size, config.norm_topk_prob
    mlp = SparseMLP(config.hidden_size, inner, experts, choices, normalise)
    return DecoderLayer(config, attention, mlp)


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    },
    layer=layer,
)
