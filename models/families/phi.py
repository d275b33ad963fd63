"""Phi 3, 3.5 and 4-mini (arXiv 2404.14219, 2503.01743): Llama in fused tensors, part of a head rotated."""

from ..block_spec import BlockSpec, Family, block_of
from ..config import Config


def phi3(config: Config, layer: int) -> BlockSpec:
    """Phi 3: a window in every layer where one is stated."""
    return block_of(config, layer)


FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)
FAMILIES = (
    Family(
        "Phi3ForCausalLM",
        "phi3",
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None}
        | {"original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
        phi3,
        fused=FUSED,
    ),
)
