"""Families with layer norms that have a bias: Starcoder 2, Nemotron, Phi 1 and 2, StableLM."""

from ..block_spec import BlockSpec, Family, NormSpec, OutputSpec, block_of, mlp_of
from ..config import Config


def biased_norm(config: Config) -> NormSpec:
    return NormSpec(config.rms_norm_eps, "layer", bias=True)


def starcoder2(config: Config, layer: int) -> BlockSpec:
    """Starcoder 2 (arXiv 2402.19173)."""
    bias = config.use_bias
    mlp = mlp_of(config, gated=False, bias=bias)
    return block_of(config, layer, mlp, biased_norm(config), bias=bias, output_bias=bias)


def biased_output(config: Config) -> OutputSpec:
    return OutputSpec(biased_norm(config))


def nemotron_norm(config: Config) -> NormSpec:
    return NormSpec(config.rms_norm_eps, "layer", offset=1.0, bias=True)


def nemotron(config: Config, layer: int) -> BlockSpec:
    """Nemotron 3 and 4 (arXiv 2402.16819): max(x, 0)², half of a head rotated."""
    bias = config.attention_bias
    mlp = mlp_of(config, gated=False, bias=config.mlp_bias)
    return block_of(config, layer, mlp, nemotron_norm(config), bias=bias, output_bias=bias)


def nemotron_output(config: Config) -> OutputSpec:
    return OutputSpec(nemotron_norm(config))


def phi(config: Config, layer: int) -> BlockSpec:
    """Phi 1, 1.5 and 2 (arXiv 2306.11644): both blocks side by side, biases everywhere."""
    norm, mlp = biased_norm(config), mlp_of(config, gated=False, bias=True)
    head_norm = norm if config.use_qk_norm else None
    biases = {"bias": True, "output_bias": True}
    return block_of(config, layer, mlp, norm, placement="parallel", head_norm=head_norm, **biases)


def phi_output(config: Config) -> OutputSpec:
    return OutputSpec(biased_norm(config), head_bias=True)


def stablelm(config: Config, layer: int) -> BlockSpec:
    """StableLM 3B and 2 (arXiv 2402.17834): a part of a head rotates, blocks may stand side by side."""
    placement = "parallel" if config.use_parallel_residual else "pre"
    return block_of(config, layer, norm=biased_norm(config), placement=placement, bias=config.attention_bias)


FAMILIES = (
    Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"max_position_embeddings": 4096, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "use_bias": True}
        | {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None, "tie_word_embeddings": True},
        starcoder2,
        biased_output,
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
    Family(
        "PhiForCausalLM",
        "phi",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh"}
        | {"partial_rotary_factor": 0.5, "use_qk_norm": False},
        phi,
        phi_output,
        aliases={"rms_norm_eps": "layer_norm_eps", "use_qk_norm": "qk_layernorm"},
        renames=(
            (".o_proj.", ".dense."),
            (".q_norm.", ".q_layernorm."),
            (".k_norm.", ".k_layernorm."),
            (".mlp.up_proj.", ".mlp.fc1."),
            (".mlp.down_proj.", ".mlp.fc2."),
            ("model.norm.", "model.final_layernorm."),
        ),
    ),
    Family(
        "StableLmForCausalLM",
        "stablelm",
        {"max_position_embeddings": 4096, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}
        | {"partial_rotary_factor": 0.25, "attention_bias": False, "use_parallel_residual": False},
        stablelm,
        biased_output,
        aliases={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
        required={"qk_layernorm": False},
    ),
)
