"""Families with layer norms and feed-forward blocks without a gate: Starcoder 2, Nemotron."""

from ..block_spec import BlockSpec, Family, NormSpec, OutputSpec, block_of, mlp_of
from ..config import Config


def starcoder_norm(config: Config) -> NormSpec:
    return NormSpec(config.rms_norm_eps, "layer", bias=True)


def starcoder2(config: Config, layer: int) -> BlockSpec:
    """Starcoder 2 (arXiv 2402.19173)."""
    bias = config.use_bias
    mlp = mlp_of(config, gated=False, bias=bias)
    return block_of(config, layer, mlp, starcoder_norm(config), bias=bias, output_bias=bias)


def starcoder_output(config: Config) -> OutputSpec:
    return OutputSpec(starcoder_norm(config))


def nemotron_norm(config: Config) -> NormSpec:
    return NormSpec(config.rms_norm_eps, "layer", offset=1.0, bias=True)


def nemotron(config: Config, layer: int) -> BlockSpec:
    """Nemotron 3 and 4 (arXiv 2402.16819): max(x, 0)², half of a head rotated."""
    bias = config.attention_bias
    mlp = mlp_of(config, gated=False, bias=config.mlp_bias)
    return block_of(config, layer, mlp, nemotron_norm(config), bias=bias, output_bias=bias)


def nemotron_output(config: Config) -> OutputSpec:
    return OutputSpec(nemotron_norm(config))


FAMILIES = (
    Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"max_position_embeddings": 4096, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "use_bias": True}
        | {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None, "tie_word_embeddings": True},
        starcoder2,
        starcoder_output,
        aliases={"rms_norm_eps": "norm_epsilon"},
        renames=((".mlp.up_proj.", ".mlp.c_fc."), (".mlp.down_proj.", ".mlp.c_proj.")),
    ),
    Family(
        "NemotronForCausalLM",
        "nemotron",
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"}
        | {"partial_rotary_factor": 0.5, "attention_bias": False, "mlp_bias": False},
        nemotron,
        nemotron_output,
        aliases={"rms_norm_eps": "norm_eps"},
    ),
)
