"""Ernie 4.5, dense and with experts: pairs of the rotation are neighbours."""

from ..block_spec import (
    BlockSpec,
    ExpertsSpec,
    Family,
    MLPSpec,
    OutputSpec,
    RouterSpec,
    block_of,
    experts_of,
    mlp_of,
    rms_norm_of,
    rope_of,
)
from ..config import Config


def ernie(config: Config, layer: int) -> BlockSpec:
    """Ernie 4.5."""
    return block(config, layer, mlp_of(config, bias=config.use_bias))


def ernie_moe(config: Config, layer: int) -> BlockSpec:
    """Ernie 4.5 with experts in some layers: softmax scores with a correction, weights that sum to 1."""
    mlp, last = mlp_of(config, bias=config.use_bias), config.moe_layer_end_index
    between = config.first_k_dense_replace <= layer and (last == -1 or layer <= last)
    if between and (layer + 1) % config.decoder_sparse_step == 0:
        inner = config.moe_intermediate_size * config.n_shared_experts
        shared = MLPSpec(inner, config.hidden_act, bias=config.use_bias) if inner else None
        mlp = experts_of(config, RouterSpec(correction=True, normalise=True), shared=shared)
    return block(config, layer, mlp)


def output(config: Config) -> OutputSpec:
    """With experts, `use_bias` means the output projection as well."""
    return OutputSpec(rms_norm_of(config), head_bias=config.use_bias)


def block(config: Config, layer: int, mlp: MLPSpec | ExpertsSpec) -> BlockSpec:
    """A layer with this feed-forward block, or these experts.

    Args:
        config: the model's configuration.
        layer: the number of the layer.
        mlp: the feed-forward block, or the experts.
    """
    bias, rope = config.use_bias, rope_of(config, layer, interleaved=True)
    return block_of(config, layer, mlp, bias=bias, output_bias=bias, rope=rope)


KEYS = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5} | {
    "tie_word_embeddings": True,
    "use_bias": False,
}
FAMILIES = (
    Family("Ernie4_5ForCausalLM", "ernie4_5", {**KEYS, "num_key_value_heads": 2, "head_dim": 128}, ernie),
    Family(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {**KEYS, "num_key_value_heads": 4, "moe_intermediate_size": 1536, "n_shared_experts": 2}
        | {"num_local_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
        | {"decoder_sparse_step": 1, "moe_layer_end_index": -1},
        ernie_moe,
        output,
        aliases={
            "num_local_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts",
            "first_k_dense_replace": "moe_layer_start_index",
            "decoder_sparse_step": "moe_layer_interval",
        },
        renames=(
            (".shared_expert.", ".shared_experts."),
            (".gate.e_score_correction_bias", ".moe_statics.e_score_correction_bias"),
        ),
        rows=("e_score_correction_bias",),
    ),
)
