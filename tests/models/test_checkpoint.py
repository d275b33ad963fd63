"""Orbax checkpoints restore every bit, random keys included."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from entropic_jax import models
from entropic_jax.models import Config, ModelError, checkpoint


class State(NamedTuple):
    key: jax.Array
    keys: jax.Array
    length: jax.Array
    done: jax.Array
    cache: tuple[jax.Array, ...]
    empty: jax.Array
    controller: tuple = ()
    nothing: None = None


def state(seed: int) -> State:
    random = np.random.default_rng(seed)
    pages = jnp.asarray(random.standard_normal((3, 2)), jnp.float32).at[0, 0].set(jnp.nan)
    return State(
        jax.random.key(seed),
        jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        jnp.int32(seed),
        jnp.asarray([True, False]),
        (pages, pages.astype(jnp.bfloat16)),
        jnp.zeros((2, 0), jnp.int32),
    )


def bits(leaf) -> bytes:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_identical(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert bits(left) == bits(right)


def test_a_state_comes_back_bit_for_bit(tmp_path):
    expected = state(7)
    checkpoint.save(tmp_path / "state", expected)
    actual = checkpoint.restore(tmp_path / "state", state(0))
    assert_identical(actual, expected)
    assert jax.random.bits(actual.key) == jax.random.bits(expected.key)


def test_the_target_may_be_abstract(tmp_path):
    checkpoint.save(tmp_path / "state", state(3))
    assert_identical(checkpoint.restore(tmp_path / "state", jax.eval_shape(lambda: state(0))), state(3))


def test_saving_again_replaces(tmp_path):
    for seed in (1, 2):
        checkpoint.save(tmp_path / "state", state(seed))
    assert_identical(checkpoint.restore(tmp_path / "state", state(0)), state(2))


def test_training_state(tmp_path):
    params = models.initialise(Config("LlamaForCausalLM", 11, 8, 12, 2, 2), seed=0).params
    rule = optax.adamw(1e-3)
    expected = {"params": params, "optimiser": rule.init(params), "step": jnp.int32(5)}
    checkpoint.save(tmp_path / "training", expected)
    assert_identical(checkpoint.restore(tmp_path / "training", expected), expected)


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"path must be a directory .*nowhere does not exist"):
        checkpoint.restore(tmp_path / "nowhere", state(0))


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ModelError, match="is not a checkpoint"):
        checkpoint.restore(tmp_path, state(0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda s: s._replace(length=jnp.zeros(3, jnp.int32)),
            r"length must be int32\[3\], as in `like`; got int32\[\]",
        ),
        (lambda s: s._replace(done=jnp.zeros(2)), r"done must be float32\[2\], .* got bool\[2\]"),
        (lambda s: s._replace(cache=s.cache[:1]), r"cache\.1 must be absent, .* got bfloat16\[3, 2\]"),
        (lambda s: s._replace(nothing=s.length), r"nothing must be int32\[\], .* got absent"),
    ],
    ids=["shape", "dtype", "a leaf too many", "a leaf too few"],
)
def test_another_pytree_is_refused(tmp_path, wrong, message):
    checkpoint.save(tmp_path / "state", state(1))
    with pytest.raises(ModelError, match=message):
        checkpoint.restore(tmp_path / "state", wrong(state(0)))
