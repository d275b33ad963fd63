"""Phases of a step as functions of a few arrays: no model and no cache."""

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax.phases.batch import Batch, record
from entropic_jax.phases.emission import Logits, choose, observe
from entropic_jax.sampling import History, parameters
from entropic_jax.sampling.randomness import row_keys
from entropic_jax.state import RUNNING, STOPPED, State, plain_action, unmeasured
from entropic_jax.state.constraints import no_constraints


def state_of(rows: int, **fields) -> State:
    """A state with these fields alone."""
    return State(**{**dict.fromkeys(State._fields), **fields})


def test_the_text_has_every_token_of_a_pass_at_its_position():
    blank = History(jnp.zeros((3, 9), bool), jnp.zeros((3, 9), jnp.int32))
    state = state_of(
        3,
        history=blank,
        text=jnp.full((3, 8), -1, jnp.int32),
        length=jnp.array([4, 3, 2], jnp.int32),  # after the pass: the last token is not in the cache yet
        evicted=jnp.array([0, 2, 0], jnp.int32),
    )
    emitted = jnp.array([[True, True, False], [True, False, False], [True, False, False]])
    tokens = jnp.array([[5, 6, 7], [8, 1, 7], [3, 1, 7]], jnp.int32)
    after = record(state, tokens, emitted)
    np.testing.assert_array_equal(
        after.text,
        [
            [-1, -1, 5, 8, 3, -1, -1, -1],
            [-1, -1, -1, -1, -1, 6, -1, -1],
            [-1] * 8,
        ],
    )
    np.testing.assert_array_equal(after.history.generated.sum(1), [3, 1, 0])
    assert record(state._replace(text=None), tokens, emitted).text is None


def test_a_signal_says_which_rows_can_go_on_and_draws_for_the_next_position():
    state = state_of(
        4,
        key=jax.random.key(1),
        seed=jnp.arange(4, dtype=jnp.int32),
        length=jnp.array([5, 6, 5, 5], jnp.int32),
        evicted=jnp.array([0, 0, 0, 3], jnp.int32),
        limit=jnp.full(4, 7, jnp.int32),
        status=jnp.array([RUNNING, RUNNING, STOPPED, RUNNING], jnp.int32),
        sampling=parameters(4, temperature=0.5),
    )
    logits = Logits(**dict.fromkeys(Logits._fields))._replace(processed=jnp.zeros((4, 9)))
    batch, emitting = Batch(state, jnp.ones(4, bool)), jnp.array([True, True, True, False])
    signal = observe(batch, unmeasured(4), emitting, logits, None)
    assert signal.runnable.tolist() == [True, False, False, False]  # the second will be full, the last failed
    expected = row_keys(state.key, state.seed, jnp.array([6, 7, 6, 9], jnp.int32))
    np.testing.assert_array_equal(jax.random.key_data(signal.key), jax.random.key_data(expected))


def test_a_constraint_forces_any_token_and_goes_before_others():
    forced = no_constraints(3, 9)._replace(forced=jnp.array([0, -1, 4], jnp.int32))
    logits = Logits(**dict.fromkeys(Logits._fields))
    batch = Batch(state_of(3), jnp.ones(3, bool))
    token = choose(logits, batch, plain_action(jnp.ones(3)), jnp.array([7, 7, 7], jnp.int32), forced)
    assert token.tolist() == [0, 7, 4]
