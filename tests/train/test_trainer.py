"""A run that was interrupted goes on as if it had not been; the exported weights are the averaged ones."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from entropic_jax.models.train import export, forward
from entropic_jax.models.train.shape import Shape, parse_shape, record_shape, recorded_shape
from entropic_jax.models.train.trainer import Trainer, initialise, optimiser, stack, unstack
from tests.train.model import TINY


def steps(trainer: Trainer, first: int, stop: int) -> list[float]:
    """Losses of steps on random tokens of their number."""
    losses = []
    for number in range(first, stop):
        rng = np.random.default_rng(number)
        tokens = rng.integers(2, TINY.vocab_size, (2 * trainer.mesh.size, 17)).astype(np.int32)
        losses.append(trainer.update(tokens, np.ones((len(tokens), 16), np.float32), 2, 0.3)[0])
    return losses


def assert_equal_trees(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_run_equals_one_that_was_not(tmp_path: Path):
    rule = optimiser("muon", optax.constant_schedule(0.01))
    start = lambda name: Trainer(tmp_path / name, TINY, rule, initialise(TINY, 0), keep=1000)
    through = start("through")
    expected = steps(through, 0, 4)
    before = start("stopped")
    losses = steps(before, 0, 2)
    before.save(2)
    before.manager.wait_until_finished()
    steps(before, 2, 3)  # lost with the process
    after = start("stopped")
    assert after.first == 2
    losses += steps(after, 2, 4)
    assert losses == expected
    assert_equal_trees(after.params, through.params)
    assert_equal_trees(after.average, through.average)
    after.save(4)
    after.manager.wait_until_finished()
    exported, step = export.newest(tmp_path / "stopped" / "checkpoints")
    assert step == 4
    assert_equal_trees(exported, unstack(jax.device_get(through.average)))
    assert not np.array_equal(exported["embed_tokens"], through.params["embed_tokens"])


def test_layers_are_stacked_and_unstacked():
    params = initialise(TINY, 0)
    assert_equal_trees(unstack(stack(params)), params)
    assert stack(params)["layers"]["k_proj"].shape == (2, 32, 16)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("ngqd,nkd->ngqk", q, k) * q.shape[-1] ** -0.5
    masked = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("ngqk,nkd->ngqd", jax.nn.softmax(masked, -1), v)


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_attention_in_tiles_has_the_gradients_of_attention(products: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forward, "PRODUCT_DTYPE", jnp.dtype(products).type)
    monkeypatch.setattr(forward, "TILE", 16)
    rng = np.random.default_rng(0)
    q, k, v, slope = (
        jnp.asarray(rng.standard_normal(size), jnp.float32)
        for size in ((2, 2, 48, 8), (2, 48, 8), (2, 48, 8), (2, 2, 48, 8))
    )
    out, gradients = jax.vjp(jax.jit(lambda *x: forward.causal_attention(*x)), q, k, v)
    expected, plain = jax.vjp(plain_attention, q, k, v)
    tolerance = 1e-5 if products == "float32" else 0.05
    np.testing.assert_allclose(out, expected, atol=tolerance)
    for a, b in zip(gradients(slope), plain(slope), strict=True):
        np.testing.assert_allclose(a, b, atol=2 * tolerance)


def test_products_are_in_the_dtype_that_the_processor_is_fast_in():
    assert forward.product_dtype("flags: avx512_bf16 amx_bf16 amx_tile") is jnp.bfloat16
    assert forward.product_dtype("flags: avx512_bf16") is jnp.float32


def test_a_shape_is_the_default_with_changes_and_stays_that_of_its_folder(tmp_path: Path):
    shape = parse_shape("num_hidden_layers=3,rope_theta=1e4")
    assert shape == Shape(num_hidden_layers=3, rope_theta=10_000.0)
    assert parse_shape("") == Shape()
    record_shape(tmp_path, shape)
    record_shape(tmp_path, shape)
    assert recorded_shape(tmp_path) == shape
    with pytest.raises(ValueError, match="--shape must be that of the run in --work"):
        record_shape(tmp_path, Shape())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers=3", "--shape must name vocab_size, .*; got 'layers'"),
        ("hidden_size=x", "--shape must give hidden_size a number; got 'x'"),
        ("hidden_size=0", "--shape must give hidden_size a number above 0; got 0"),
        ("num_attention_heads=6", "in multiples of num_key_value_heads; got 6 and 4"),
        ("num_local_experts=8", "num_experts_per_tok from 1 to num_local_experts, or neither; got 0 and 8"),
        ("num_local_experts=2,num_experts_per_tok=3", "or neither; got 3 and 2"),
    ],
)
def test_a_wrong_shape_is_an_error(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_shape(text)
