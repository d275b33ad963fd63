"""Families of models: which blocks each is made of, and how its files spell them. Each is a table entry."""

from ..block_spec import Family
from . import (
    apertus,
    cohere,
    deepseek,
    ernie,
    gemma,
    glm,
    gpt_oss,
    granite,
    layer_norm,
    llama,
    llama4,
    mixtral,
    olmo,
    phi,
    qwen,
)

MODULES = (
    *(llama, llama4, qwen, mixtral, gemma, phi, olmo, granite, cohere, glm),
    *(layer_norm, gpt_oss, apertus, deepseek, ernie),
)
FAMILIES: dict[str, Family] = {family.architecture: family for m in MODULES for family in m.FAMILIES}

REFUSED = {  # architectures whose layers the block specification cannot express, and why
    "Qwen3NextForCausalLM": "layers with a recurrent state",
    "FalconH1ForCausalLM": "layers with a recurrent state",
    "MambaForCausalLM": "layers with a recurrent state",
    "Mamba2ForCausalLM": "layers with a recurrent state",
    "JambaForCausalLM": "layers with a recurrent state",
    "BambaForCausalLM": "layers with a recurrent state",
    "Zamba2ForCausalLM": "layers with a recurrent state",
    "NemotronHForCausalLM": "layers with a recurrent state",
    "GraniteMoeHybridForCausalLM": "layers with a recurrent state",
    "RecurrentGemmaForCausalLM": "layers with a recurrent state",
    "Lfm2ForCausalLM": "layers with a short convolution",
    "Lfm2MoeForCausalLM": "layers with a short convolution",
    "FalconMambaForCausalLM": "layers with a recurrent state",
    "ZambaForCausalLM": "layers with a recurrent state",
    "KimiLinearForCausalLM": "layers with a recurrent state",
    "MiniMaxForCausalLM": "layers with a recurrent state",
    "OlmoHybridForCausalLM": "layers with a recurrent state",
    "Qwen3_5ForCausalLM": "layers with a recurrent state",
    "Qwen3_5ForConditionalGeneration": "layers with a recurrent state",
}
