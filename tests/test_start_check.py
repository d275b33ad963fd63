"""Arguments of `start` and `generate` that are refused by name, and those that are accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, parameters, replay, start
from entropic_jax.attention.page_selection import Selection
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.state import Hardware
from tests import tiny

REFUSED = {
    "prompts": [
        ("ab", r"prompts must have 2 entries, one per row of the cache; got 'ab'"),
        ([[1]], r"prompts must have 2 entries, one per row of the cache; got 1"),
        ([[1], [96]], r"prompts\[1\] must hold token ids between 0 and 95; got 96"),
        ([[1], [True]], r"prompts\[1\] must hold token ids between 0 and 95; got True"),
        ([[1.0], [1]], r"prompts\[0\] must hold token ids between 0 and 95; got 1\.0"),
        ([[1], "a"], r"prompts\[1\] must be a list of token ids between 0 and 95; got 'a'"),
        ([[1], [10**30]], r"prompts\[1\] must hold token ids between 0 and 95; got 1000"),
        ([[1], np.ones(2)], r"prompts\[1\] must hold token ids .*; got an array of float64 and shape \(2,\)"),
        ([[1], [[2]]], r"prompts\[1\] must hold token ids between 0 and 95; got \[2\]"),
        ([[1], [2] * 200], r"prompts\[1\] must have at most 128 tokens, .*; got 200"),
    ],
    "max_tokens": [
        (-1, r"max_tokens must be an integer between 0 and 2147483647; got -1"),
        (2**31, r"max_tokens must be an integer between 0 and 2147483647; got 2147483648"),
        (2.5, r"max_tokens must be an integer .*; got 2\.5"),
        (None, r"max_tokens must be an integer .*; got None"),
        ([3], r"max_tokens must have 2 entries, one per row, or be an integer; got 1"),
        ([3, "4"], r"max_tokens must hold integers between 0 and 2147483647; got '4'"),
    ],
    "seeds": [
        (3, r"seeds must have 2 entries, one per row; got 3"),
        ([1, 2, 3], r"seeds must have 2 entries, one per row; got 3"),
        ([1, 2**31], r"seeds must hold integers between -2147483648 and 2147483647; got 2147483648"),
        ([1, None], r"seeds must hold integers .*; got None"),
    ],
    "stop": [
        ([1, 2], r"stop\[0\] must be a list of token ids between -1 and 95; got 1"),
        ([[1]], r"stop must have 2 entries, a list of token ids for each row; got 1"),
        ("ab", r"stop must have 2 entries, a list of token ids for each row; got 'ab'"),
        ([[1], [96]], r"stop\[1\] must hold token ids between -1 and 95; got 96"),
    ],
    "sample": [
        (0.7, r"sample must be a Sampling of 2 rows, as `parameters` makes it; got 0\.7"),
        (parameters(3), r"sample must be a Sampling of 2 rows, .*; got one of shape \(3,\)"),
    ],
    "key": [
        (3, "key must be a random key, .*; got 3"),
        (None, "key must be a random key, .*; got None"),
        (np.zeros(3, np.uint32), r"key must be a random key, .*; got an array of uint32 and shape \(3,\)"),
        (
            jax.random.split(jax.random.key(0), 3),
            r"key must be a random key, .*; got an array of key.* \(3,\)",
        ),
    ],
    "belief_temperature": [
        *(
            (value, f"belief_temperature must be a number above 0 and finite; got {value}")
            for value in (0, -1.0, float("nan"), None, True)
        ),
        (np.ones(2), r"belief_temperature must be a number .*; got an array of float64 and shape \(2,\)"),
        (np.True_, "belief_temperature must be a number .*; got "),
        ("1", "belief_temperature must be a number .*; got '1'"),
    ],
    "hardware": [
        (5, "hardware must be None or a Hardware .*; got 5"),
        (Hardware(1.0, 0.0), "hardware must be None or a Hardware .*; got Hardware"),
        (Hardware(1.0, "2"), "hardware must be None or a Hardware .*; got Hardware"),
    ],
    "page_policy": [
        (5, "page_policy must be None or a page policy, such as a Selection; got 5"),
        (Selection, "page_policy must be None or a page policy, such as a Selection; got <class"),
    ],
    "controller": [(5, "controller must have a method `init`, .*; got 5")],
    "cache": [(5, "cache must be a Cache, as `allocate` makes it; got 5")],
    "speculator": [(5, "speculator must be None or a Speculator, .*; got 5")],
}


@pytest.mark.parametrize(
    ("name", "value", "message"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_start_refuses_by_name(name, value, message):
    model = tiny.model()
    arguments = {"prompts": [[1], [2]], "max_tokens": 4, "key": jax.random.key(0)}
    arguments |= {
        "controller": chain(),
        "cache": allocate(model.decoder.shape, 2, 128, page_size=8),
        name: value,
    }
    with pytest.raises(ValueError, match=message):
        start(model.decoder, model.params, **arguments)


def test_what_is_consumed_is_not_used_again():
    model = tiny.model()
    arguments = {"prompts": [[1, 3], [2]], "max_tokens": 4, "key": jax.random.key(0)}
    pool = allocate(model.decoder.shape, 2, 128, page_size=8)
    state = start(model.decoder, model.params, chain(), pool, **arguments)
    with pytest.raises(ValueError, match="cache must be one that `allocate` has just made; got one that an"):
        start(model.decoder, model.params, chain(), pool, **arguments)
    state_again, _ = generate(model.decoder, model.params, chain(), state, 2)
    with pytest.raises(ValueError, match="cache must be empty; got one with 2 pages granted"):
        start(model.decoder, model.params, chain(), state_again.cache, **arguments)
    for call in (
        lambda: generate(model.decoder, model.params, chain(), state, 2),
        lambda: replay(model.decoder, model.params, chain(), state, np.ones((2, 1), np.int32)),
    ):
        with pytest.raises(
            ValueError, match="state must be the one that the last call returned; got one that"
        ):
            call()


def test_a_state_goes_on_under_its_own_controller():
    model = tiny.model()
    law, started = chain(FixedPruning(0.1)), tiny.begin([[1], [2]])
    for call in (
        lambda: generate(model.decoder, model.params, law, started, 2),
        lambda: replay(model.decoder, model.params, law, started, np.ones((2, 1), np.int32)),
    ):
        with pytest.raises(ValueError, match="controller must be the one that the state was started with"):
            call()
    with pytest.raises(ValueError, match=r"controller must have a method `init`, .*; got 5"):
        generate(model.decoder, model.params, 5, started, 2)


@pytest.mark.parametrize("tokens", [[[1], [2]], [[1, 2], [3]], "ab"])
def test_tokens_to_replay_are_an_array(tokens):
    model = tiny.model()
    with pytest.raises(ValueError, match=r"tokens must be an array of shape \(2, steps\); got "):
        replay(model.decoder, model.params, chain(), tiny.begin([[1], [2]]), tokens)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"capacity": 0}, "capacity must be an integer between 1 and 2147483647; got 0"),
        ({"width": -1}, "width must be an integer between 1 and 2147483647; got -1"),
        *(
            ({name: value}, f"{name} must be an integer .*; got {value!r}")
            for name in ("capacity", "width")
            for value in (1.5, "x", True)
        ),
        *(
            ({"steps": value}, f"steps must be an integer between 0 and 2147483647; got {value!r}")
            for value in (float("nan"), -1, 1.5, True, 10**12, "x", None)
        ),
        ({"steps": jnp.int32(-3)}, "steps must be an integer .*; got Array\\(-3,"),
        ({"steps": jnp.ones(2, jnp.int32)}, "steps must be an integer"),
        ({"speculator": 5}, "speculator must be None or a Speculator, .*; got 5"),
    ],
)
def test_generate_refuses_by_name(sizes, message):
    model = tiny.model()
    with pytest.raises(ValueError, match=message):
        generate(model.decoder, model.params, chain(), tiny.begin([[1], [2]]), **{"steps": 1, **sizes})


def test_traced_steps_are_integers():
    model = tiny.model()
    launch = jax.jit(
        lambda state, steps: generate(model.decoder, model.params, chain(), state, steps, capacity=4)
    )
    _, trace = launch(tiny.begin([[1], [2]]), np.int32(2))
    assert trace.emitted.sum(0).tolist() == [2, 2]
    with pytest.raises(ValueError, match=r"steps must be an integer; got float32 of shape \(\)"):
        launch(tiny.begin([[1], [2]]), np.float32(2))
    _, trace = generate(
        model.decoder, model.params, chain(), tiny.begin([[1], [2]]), jnp.int32(2), capacity=4
    )
    assert trace.emitted.sum(0).tolist() == [2, 2]


def test_start_accepts_arrays():
    """Of NumPy and JAX, of one number for all rows, and the largest limit."""
    model = tiny.model()
    prompts = [np.array([1, 2]), jnp.array([3])]
    pool = allocate(model.decoder.shape, 2, 16, page_size=8)
    state = start(
        *(model.decoder, model.params, chain(), pool, prompts),
        key=jax.random.key(0),
        max_tokens=np.int64(2**31 - 1),
        seeds=np.array([5, -6]),
        stop=np.array([[1], [-1]]),
    )
    assert state.limit.tolist() == [16, 16] and state.seed.tolist() == [5, -6]
