"""Weight quantisation: the error of a matrix is bounded, and what runs is the rounded model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models.model import quantised
from entropic_jax.models.quantisation import QUANTIZATIONS, quantise_kernel
from entropic_jax.serving.options import model as model_options
from tests import tiny

EXPERTS = dict(architecture="MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2)


def logits(model: models.Model, length: int) -> np.ndarray:
    """Logits of a text without a cache."""
    decoder = model.decoder
    tokens = jnp.asarray(tiny.prompts(length))
    position = jnp.arange(length)[None]

    def attend(query, key, value, cache, **_):
        group = query.shape[2] // key.shape[2]
        scores = jnp.einsum("rnhd,rmhd->rhnm", query, jnp.repeat(key, group, 2)) / query.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("rhnm,rmhd->rnhd", weights, jnp.repeat(value, group, 2)), cache

    layers = (None,) * model.config.num_hidden_layers
    hidden, _ = decoder.hidden(model.params, tokens, position, layers, attend)
    return np.asarray(decoder.logits(model.params, hidden))


def widened(params):
    """The parameters with quantised kernels as float32."""
    if isinstance(params, tuple):
        return tuple(map(widened, params))
    if not isinstance(params, dict):
        return params
    if "scale" in params:
        wide = params["kernel"].astype(jnp.float32) * params["scale"]
        return {name: x for name, x in params.items() if name != "scale"} | {"kernel": wide}
    return {name: widened(x) for name, x in params.items()}


def test_the_error_of_an_element_is_at_most_half_a_step():
    kernel = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    kernel[:, 3] = 0
    quantised_kernel, scale = quantise_kernel(jnp.asarray(kernel))
    assert quantised_kernel.dtype == jnp.int8 and (scale > 0).all()
    error = np.abs(np.asarray(quantised_kernel, np.float32) * np.asarray(scale) - kernel)
    assert (error <= np.asarray(scale) * 0.5001).all()
    np.testing.assert_allclose(scale[:3], np.abs(kernel).max(0)[:3] / 127, rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("length", [5, 70])
def test_the_model_computes_with_its_rounded_weights(changes, length):
    model = tiny.model(**changes)
    narrow = quantised(model)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(narrow.params)}
    assert dtypes == {"int8", "float32"}
    rounded = models.Model(model.config, widened(narrow.params))
    np.testing.assert_allclose(logits(narrow, length), logits(rounded, length), atol=2e-4)
    assert 1e-3 < np.abs(logits(narrow, length) - logits(model, length)).max() < 1


def test_load_quantises(tmp_path: Path):
    model = tiny.model()
    models.save(model, tmp_path)
    loaded = models.load(tmp_path, quantization="int8")
    assert loaded.quantization == loaded.decoder.quantization == "int8"
    for x, y in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(quantised(model).params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_errors(tmp_path: Path):
    model = quantised(tiny.model())
    with pytest.raises(ValueError, match="quantization must be int8 or None; got 'int3'"):
        models.load(tmp_path, quantization="int3")
    with pytest.raises(ValueError, match="model must not be quantised; its weights are int8"):
        quantised(model)
    with pytest.raises(ValueError, match="model must not be quantised to be saved"):
        models.save(model, tmp_path)
    assert model_options.QUANTIZATIONS == QUANTIZATIONS
