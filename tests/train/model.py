"""The shape of the embedded model, reduced for tests, with random parameters."""

from typing import Any

import jax
import ml_dtypes
import numpy as np

from entropic_jax.models.train.shape import Shape
from entropic_jax.models.train.trainer import initialise

TINY = Shape(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
)

SPARSE = TINY._replace(intermediate_size=24, num_local_experts=5, num_experts_per_tok=3)


def random_params(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Random parameters without zeros and ones, rounded to bfloat16 as in an export."""
    rng = np.random.default_rng(seed)
    params = initialise(shape, seed)
    for layer in params["layers"]:
        for name, value in layer.items():
            noise = 0.2 * rng.standard_normal(value.shape)
            layer[name] = value + noise.astype(np.float32)
    params["embed_tokens"] *= 20
    return jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params)
