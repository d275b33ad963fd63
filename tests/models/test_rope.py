"""Rotary embedding: the frequencies match transformers, and a step on a CPU computes one cosine."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models import Config, Decoder, RopeScaling
from entropic_jax.models.decoder import structure
from entropic_jax.models.rope import Rotation, apply_rope, rope_frequencies, rope_rotation
from tests.models.dense import run
from tests.models.family_cases import SIZES, longrope
from tests.models.oracle import TOLERANCE, greedy, paged_logits, random_model

YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=4096, beta_fast=20.0, beta_slow=3.0)
SCALINGS = {
    "default": None,
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
    "yarn": RopeScaling("yarn", 4.0, original_max_position_embeddings=4096),
    "yarn from 20 to 3 turns": YARN,
    "yarn between whole pairs": YARN._replace(truncate=False),
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_frequencies_are_those_of_transformers(kind, theta):
    transformers = pytest.importorskip("transformers")
    scaling = SCALINGS[kind]
    stated = {"rope_theta": theta, **({"rope_type": "default"} if scaling is None else scaling.to_json())}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=2**18, rope_parameters=stated
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()
    ours = rope_frequencies(128, theta, scaling)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_each_bound_of_yarn_changes_other_pairs():
    """Pairs that turn more often than `beta_fast` keep their frequency; that of slow ones is divided."""
    unscaled, scaled = rope_frequencies(128, 1e4), rope_frequencies(128, 1e4, YARN)
    rotations = 4096 * unscaled / (2 * np.pi)
    np.testing.assert_array_equal(scaled[rotations > 25], unscaled[rotations > 25])
    np.testing.assert_allclose(scaled[rotations < 2.4], unscaled[rotations < 2.4] / 4, rtol=1e-6)
    between = (rotations > 3) & (rotations < 16)
    assert np.all((scaled[between] < unscaled[between]) & (scaled[between] > unscaled[between] / 4))
    for name, value in (("beta_fast", 40.0), ("beta_slow", 1.0)):
        assert np.any(rope_frequencies(128, 1e4, YARN._replace(**{name: value})) != scaled), name


def test_rotation_by_definition():
    """Pair (i, i + d/2) of a vector at position p turns by p · frequency, here in double precision."""
    positions, frequency = np.asarray([[0, 1, 5, 1000]]), rope_frequencies(6, 1e4)
    x = np.random.default_rng(0).standard_normal((1, 4, 2, 6)).astype(np.float32)
    angle = np.float32(positions[..., None, None] * frequency).astype(np.float64)
    pairs = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angle)
    actual = jax.jit(lambda x, p: apply_rope(x, rope_rotation(p, frequency)))(
        x, jnp.asarray(positions, jnp.int32)
    )
    np.testing.assert_allclose(actual, np.concatenate([pairs.real, pairs.imag], -1), atol=1e-6)


def test_the_loop_on_the_cpu_changes_nothing():
    positions, frequency = jnp.arange(512, dtype=jnp.int32).reshape(2, -1), rope_frequencies(64, 5e5)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequency
    plain = jax.jit(lambda a: Rotation(jnp.cos(a), jnp.sin(a)))(angles)
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(lambda p: rope_rotation(p, frequency))(positions), plain
    )


@pytest.mark.slow
def test_cosines_are_computed_once_per_step():
    """Not once per layer, head and half, which would cost prefill more than attention does."""
    config = Config("LlamaForCausalLM", 11, 8, 12, 3, 2)
    tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
    text = run.lower(Decoder(config), structure(config)[1], tokens, 16).compile().as_text()
    computing = [part for part in re.split(r"\n(?=%|ENTRY)", text) if " cosine(" in part]
    assert len(computing) == 1
    assert "ROOT" in next(line for line in computing[0].splitlines() if " cosine(" in line)


LONG = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": RopeScaling("llama3", 4.0, 1.0, 4.0, 16).to_json(),
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": longrope(3) | {"original_max_position_embeddings": 16, "factor": 4.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
def test_four_times_the_original_length(kind, tmp_path):
    """A prompt beyond the original context of 16, then decoding up to 64 positions, against transformers."""
    pytest.importorskip("transformers")
    sizes = {**SIZES, "head_dim": 6, "max_position_embeddings": 16 if kind in ("dynamic", "linear") else 64}
    reference = random_model("Llama", {**sizes, "rope_parameters": {"rope_theta": 1e4, **LONG[kind]}}, seed=3)
    reference.save_pretrained(tmp_path)
    prompt = np.random.default_rng(0).integers(0, SIZES["vocab_size"], 40).tolist()
    tokens, expected = greedy(reference, prompt, 24)
    actual = paged_logits(models.load(tmp_path, progress=False), tokens[:-1], len(prompt))
    assert np.abs(actual - expected).max() <= TOLERANCE
