"""Granite 3, dense and with experts: Llama with multipliers of embedding, scores, residuals and logits."""

from ..block_spec import BlockSpec, Family, OutputSpec, RouterSpec, block_of, experts_of, mlp_of, rms_norm_of
from ..config import Config


def granite(config: Config, layer: int) -> BlockSpec:
    """Granite: scores are multiplied by `attention_multiplier`."""
    bias, scale = config.attention_bias, config.attention_multiplier
    mlp = mlp_of(config, bias=config.mlp_bias)
    return block_of(config, layer, mlp, bias=bias, output_bias=bias, scale=scale)


def granite_moe(config: Config, layer: int) -> BlockSpec:
    """Granite with experts, whose weights are a softmax over those chosen."""
    bias, scale = config.attention_bias, config.attention_multiplier
    mlp = experts_of(config, RouterSpec(by_logit=True), inner=config.intermediate_size)
    return block_of(config, layer, mlp, bias=bias, output_bias=bias, scale=scale)


def output(config: Config) -> OutputSpec:
    return OutputSpec(rms_norm_of(config), config.embedding_multiplier, 1.0 / config.logits_scaling)


KEYS = {"max_position_embeddings": 2048, "attention_bias": False, "embedding_multiplier": 1.0} | {
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
FAMILIES = (
    Family("GraniteForCausalLM", "granite", {**KEYS, "mlp_bias": False}, granite, output),
    Family(
        "GraniteMoeForCausalLM",
        "granitemoe",
        {**KEYS, "num_local_experts": 8, "num_experts_per_tok": 2},
        granite_moe,
        output,
        fused=(("input_linear", ("gate_proj", "up_proj")),),
        renames=(
            (".mlp.experts.", ".block_sparse_moe."),
            (".block_sparse_moe.down_proj.", ".block_sparse_moe.output_linear."),
            (".mlp.gate.", ".block_sparse_moe.router.layer."),
        ),
        stacked_experts=True,
    ),
)
