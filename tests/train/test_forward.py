"""The forward pass of training computes what the served decoder computes."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models.train import forward
from entropic_jax.models.train.shape import Shape
from tests.train.model import SPARSE, TINY


def compare_hidden_states(folder: Path, params: dict[str, Any], shape: Shape) -> None:
    """Hidden states of training beside those of the exported model."""
    served = models.load(folder, "float32", progress=False)
    tokens = np.random.default_rng(0).integers(2, shape.vocab_size, (2, 64)).astype(np.int32)

    def attend(q, k, v, cache, /, *, window):
        rows, length, heads, dim = q.shape
        by_head = lambda x: x.transpose(0, 2, 1, 3).reshape(rows * x.shape[2], length, dim)
        grouped = by_head(q).reshape(rows * k.shape[2], -1, length, dim)
        out = forward.causal_attention(grouped, by_head(k), by_head(v))
        return out.reshape(rows, heads, length, dim).transpose(0, 2, 1, 3), cache

    positions = jnp.broadcast_to(jnp.arange(64), tokens.shape)
    no_caches = (None,) * shape.num_hidden_layers
    hidden, _ = served.decoder.hidden(served.params, jnp.asarray(tokens), positions, no_caches, attend)
    trained = forward.hidden(params, jnp.asarray(tokens), shape)[0].reshape(hidden.shape)
    tolerance = 1e-4 if jnp.float32 == forward.PRODUCT_DTYPE else 0.1
    np.testing.assert_allclose(trained, hidden, atol=tolerance * float(jnp.abs(hidden).max()))


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_training_and_serving_have_the_same_hidden_states(exported: Path, params: dict[str, Any]):
    compare_hidden_states(exported, params, TINY)


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_experts_in_training_and_serving_are_the_same(
    exported_experts: Path, params_with_experts: dict[str, Any]
):
    compare_hidden_states(exported_experts, params_with_experts, SPARSE)
