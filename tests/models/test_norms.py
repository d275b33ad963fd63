"""Norms without a weight, as in OLMo 1, by definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from entropic_jax.models.block_spec import NormSpec
from entropic_jax.models.norms import norm

X = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_layer_norm_without_weight(offset):
    layer = norm(16, NormSpec(1e-5, "layer", offset=offset, weight=False))
    centred = X - X.mean(-1, keepdims=True, dtype=np.float64)
    expected = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(layer(jnp.asarray(X)), expected, rtol=1e-4, atol=1e-5)
    assert jax.tree.leaves(nnx.state(layer)) == []


def test_weights_begin_as_one():
    for kind in ("rms", "layer"):
        for offset in (0.0, 1.0):
            layer, plain = (norm(16, NormSpec(1e-5, kind, offset, weight=w)) for w in (True, False))
            np.testing.assert_allclose(layer(X), plain(X), rtol=1e-6)
