"""Random bits equal those of jax.random, for every kind of key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.sampling.randomness import random_bits, row_keys

SEEDS, POSITIONS = jnp.array([0, 7, -1, 2**31 - 1], jnp.int32), jnp.array([0, 1, 5, 131071], jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("count", [1, 2, 4097])
def test_bits_are_those_of_jax(kind, count):
    key = jax.random.key(11, impl=kind)
    keys = row_keys(key, SEEDS, POSITIONS)
    separate = [
        jax.random.fold_in(jax.random.fold_in(key, s), p) for s, p in zip(SEEDS, POSITIONS, strict=True)
    ]
    assert (keys == jnp.stack(separate)).all()
    if kind == "threefry2x32":  # the others depend on the batch
        expected = [jax.random.bits(k, (count,), jnp.uint32) for k in separate]
        np.testing.assert_array_equal(random_bits(keys, count), jnp.stack(expected))
    assert random_bits(keys, count).shape == (4, count)


def test_raw_words_are_a_key():
    raw = jax.random.key_data(jax.random.key(3))
    assert (row_keys(raw, SEEDS, POSITIONS) == row_keys(jax.random.key(3), SEEDS, POSITIONS)).all()


def test_nothing_loops():
    trace = jax.make_jaxpr(lambda key: random_bits(row_keys(key, SEEDS, POSITIONS), 64))(jax.random.key(0))
    assert not {"while", "scan", "threefry2x32", "random_bits"} & {e.primitive.name for e in trace.eqns}
