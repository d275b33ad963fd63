"""Rotary embedding: the frequencies of transformers, and one cosine per step on the CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.conftest import dense_attend, empty_caches

from models import Config, Decoder, RopeScaling
from models.decoder import structure
from models.rope import frequencies, rotate, rotation, turn

SCALINGS = {
    "default": None,
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_frequencies_are_those_of_transformers(kind, theta):
    transformers = pytest.importorskip("transformers")
    scaling = SCALINGS[kind]
    stated = {"rope_theta": theta, **({"rope_type": "default"} if scaling is None else scaling.to_json())}
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=stated)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()
    ours = frequencies(128, theta, scaling)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=3e-7)
