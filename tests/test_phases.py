"""Phases of a step as functions of a few arrays: no model and no cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax.attention.page_reader import ReadStats
from entropic_jax.phases import forward, prefill
from entropic_jax.phases.batch import Batch, gather_active, record
from entropic_jax.phases.emission import (
    Decision,
    Logits,
    advance,
    choose,
    measure,
    measure_token,
    observe,
    process,
    trace_of,
)
from entropic_jax.phases.forward import Forward, _adapters
from entropic_jax.sampling import history, parameters, sample
from entropic_jax.sampling.randomness import row_keys
from entropic_jax.state import PAUSED, RUNNING, STOPPED, State, ledger, plain_action, unmeasured
from entropic_jax.state.cache import Cache
from entropic_jax.state.constraints import no_constraints
from tests import tiny


def with_fields(kind: Any, **fields: Any) -> Any:
    """A named tuple with these fields, the others None."""
    return kind(**{**dict.fromkeys(kind._fields), **fields})


def state_of(rows: int, **fields) -> State:
    """A state with these fields alone."""
    return with_fields(State, **fields)


def test_the_text_has_every_token_of_a_pass_at_its_position():
    blank = history(3, 9)
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
    logits = with_fields(Logits, processed=jnp.zeros((4, 9)))
    batch, emitting = Batch(state, jnp.ones(4, bool)), jnp.array([True, True, True, False])
    signal = observe(batch, unmeasured(4), emitting, logits, None)
    assert signal.runnable.tolist() == [True, False, False, False]  # the second will be full, the last failed
    expected = row_keys(state.key, state.seed, jnp.array([6, 7, 6, 9], jnp.int32))
    np.testing.assert_array_equal(jax.random.key_data(signal.key), jax.random.key_data(expected))


def test_a_constraint_forces_any_token_and_goes_before_others():
    forced = no_constraints(3, 9)._replace(forced=jnp.array([0, -1, 4], jnp.int32))
    logits = with_fields(Logits)
    batch = Batch(state_of(3), jnp.ones(3, bool))
    token = choose(logits, batch, plain_action(jnp.ones(3)), jnp.array([7, 7, 7], jnp.int32), forced)
    assert token.tolist() == [0, 7, 4]


def test_a_stop_token_is_forbidden_below_the_minimum_length_of_the_text_with_the_token_to_come():
    state = state_of(
        3,
        sampling=parameters(3),
        history=history(3, 9),
        stop=jnp.full((3, 1), 2, jnp.int32),
        length=jnp.array([4, 5, 2], jnp.int32),
        evicted=jnp.array([0, 0, 3], jnp.int32),
    )
    constraints = no_constraints(3, 9)._replace(min_length=jnp.full(3, 6, jnp.int32))
    logits = process(jnp.zeros((3, 9)), state, constraints)
    np.testing.assert_array_equal(jnp.isinf(logits.processed).nonzero(), [[0], [2]])  # a text of 5 tokens
    assert bool(logits.changed) and not bool(process(jnp.zeros((3, 9)), state, None).changed)
    enough = constraints._replace(min_length=jnp.full(3, 5, jnp.int32))
    assert not bool(process(jnp.zeros((3, 9)), state, enough).changed)


def test_a_token_is_the_controller_s_or_drawn_for_its_position_in_the_text():
    state = state_of(
        3,
        key=jax.random.key(3),
        seed=jnp.arange(3, dtype=jnp.int32),
        length=jnp.array([5, 5, 6], jnp.int32),
        evicted=jnp.array([0, 3, 2], jnp.int32),
        sampling=parameters(3),
    )
    processed = jax.random.normal(jax.random.key(4), (3, 999))
    logits = with_fields(Logits, processed=processed)
    action = plain_action(jnp.ones(3))._replace(token=jnp.array([0, -1, -1], jnp.int32))
    token = choose(logits, Batch(state, jnp.ones(3, bool)), action, None, None)
    position = jnp.array([6, 9, 9], jnp.int32)
    drawn = sample(processed, state.sampling, jnp.ones(3), state.key, state.seed, position)
    assert token.tolist() == [0, *drawn[1:].tolist()] and drawn[0] != 0


def test_a_row_pauses_after_a_token_that_was_not_expected_at_its_place_in_the_text():
    """The plan counts evicted positions: the token of the first row is that of its fourth position."""
    state = state_of(
        3,
        token=jnp.array([5, 5, 6], jnp.int32),
        stop=jnp.full((3, 1), 2, jnp.int32),
        length=jnp.array([1, 4, 4], jnp.int32),
        evicted=jnp.array([3, 0, 0], jnp.int32),
        limit=jnp.full(3, 20, jnp.int32),
        status=jnp.full(3, RUNNING, jnp.int32),
    )
    constraints = no_constraints(3, 9, positions=4)._replace(
        masked=jnp.ones(3, bool),
        start=jnp.full(3, 2, jnp.int32),
        expected=jnp.tile(jnp.array([7, 8, 3, 5], jnp.int32), (3, 1)),
    )
    after = advance(Batch(state, jnp.ones(3, bool)), state, jnp.ones(3, bool), constraints)
    assert after.status.tolist() == [RUNNING, RUNNING, PAUSED] and after.length.tolist() == [2, 5, 5]


def test_pages_ahead_end_where_a_row_is_full():
    state = tiny.begin(tiny.prompts(9, 9), page_size=4)._replace(limit=jnp.array([12, 60], jnp.int32))
    _, exact, _ = gather_active(state, None, 19)
    assert exact.cache.granted.tolist() == [3, 7]  # 12 and 8 + 1 + 19 positions
    _, state, _ = gather_active(state, None, 20)
    assert state.cache.granted.tolist() == [3, 8]  # 12 and 8 + 1 + 20 positions


def test_rows_that_do_not_run_get_no_page():
    state = tiny.begin([[1, 2], [], [3]], page_size=8)  # the prompts' last tokens are not in the cache
    state = state._replace(action=state.action._replace(quota=jnp.array([1, 1, 0], jnp.int32)))
    _, after, batch = gather_active(state, None)
    assert after.cache.granted.tolist() == [1, 0, 0] and state.cache.granted.tolist() == [1, 0, 0]
    assert batch.active.tolist() == [True, False, False]
    quota = jnp.ones(3, jnp.int32)
    _, after, _ = gather_active(state._replace(action=state.action._replace(quota=quota)), 1)
    assert after.cache.granted.tolist() == [1, 0, 0]  # the last is ready, and not among those of the step


def test_the_surprisal_of_a_token_is_that_of_the_belief():
    z = jax.random.normal(jax.random.key(5), (2, 9))
    state = state_of(
        2,
        belief_temperature=jnp.float32(1.6),
        sampling=parameters(2, temperature=0.5),
        action=plain_action(jnp.full(2, 0.5)),
    )
    logits, batch = Logits(z, z, jnp.array(False)), Batch(state, jnp.ones(2, bool))
    belief, tempered = measure(logits, batch)
    token = jnp.array([4, 0], jnp.int32)
    measured = measure_token(batch, logits, belief, tempered, state.action, token, jnp.zeros(2))
    expected = -jax.nn.log_softmax(z / 1.6)[jnp.arange(2), token]
    np.testing.assert_allclose(measured.surprisal, expected, rtol=1e-5)


def test_rows_without_a_token_take_no_adapter():
    state = state_of(3, adapter=jnp.array([2, 1, 3], jnp.int32))
    assert _adapters(state, jnp.array([1, 0, 5], jnp.int32), None)["adapter"].tolist() == [2, 0, 3]
    assert _adapters(state_of(3), jnp.ones(3, jnp.int32), None) == {}


def test_a_trace_has_what_the_step_read_and_what_its_token_was():
    after = state_of(
        2,
        token=jnp.array([3, 4], jnp.int32),
        measured=unmeasured(2)._replace(entropy=jnp.array([0.5, 1.5])),
        action=plain_action(jnp.array([0.7, 0.9])),
        ledger=ledger.new_ledger(2)._replace(entropic_time=jnp.array([2.0, 3.0])),
    )
    limit = jnp.array([0.1, 0.2])
    before = after._replace(action=after.action._replace(dropped_mass_limit=limit))
    read = ReadStats(jnp.array([3.0, 0.0]), jnp.array([4.0, 0.0]), jnp.zeros(2), jnp.array([0.25, 0.5]))
    cost = with_fields(ledger.Cost, seconds=jnp.array([6.0, 7.0]))
    decision = with_fields(Decision, emitting=jnp.array([True, False]))
    trace = trace_of(before, after, with_fields(Forward, read=read), decision, cost)
    assert trace.certificate.tolist() == [0.25, 0.5] and trace.kept_fraction.tolist() == [0.75, 0.0]
    assert trace.emitted.tolist() == [True, False] and trace.token.tolist() == [3, 4]
    assert trace.entropy.tolist() == [0.5, 1.5] and trace.entropic_time.tolist() == [2.0, 3.0]
    assert trace.cost.tolist() == [6.0, 7.0] and not trace.num_drafted.any() and not trace.from_draft.any()
    np.testing.assert_array_equal(trace.temperature, after.action.temperature)
    np.testing.assert_array_equal(trace.dropped_mass_limit, limit)


def test_what_shards_read_is_added_but_for_a_mean_and_a_bound(monkeypatch):
    first, other = (ReadStats(*(jnp.full(2, start + n) for n in range(5))) for start in (1.0, 10.0))
    assert forward.over_shards(first) is first  # a program for one device
    monkeypatch.setattr(forward, "num_shards", lambda: 2)
    monkeypatch.setattr(forward, "max_over_shards", lambda x: jnp.maximum(x, other.certificate))
    monkeypatch.setattr(forward, "sum_over_shards", lambda read: jax.tree.map(jnp.add, read, other))
    read = forward.over_shards(first)
    assert read.positions.tolist() == [11, 11] and read.held.tolist() == [13, 13]
    assert read.summaries.tolist() == [19, 19]
    assert read.dropped_mass.tolist() == [7.5, 7.5]  # the mean over the heads of both
    assert read.certificate.tolist() == [13, 13]


def test_the_surprisal_of_a_row_is_that_of_the_last_token_of_its_chunk():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 9)), jnp.float32)
    following = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8], [0, 1, 2, 3]], jnp.int32)
    measured = unmeasured(3)._replace(surprisal=jnp.array([7.0, 8.0, 9.0]))
    view = state_of(3, measured=measured, cache=with_fields(Cache))
    count = jnp.array([4, 2, 0], jnp.int32)
    after = prefill._keep_surprisal(view, logits, following, jnp.zeros(3, jnp.int32), count)
    exact = -np.asarray(jax.nn.log_softmax(logits), np.float64)
    np.testing.assert_allclose(after.measured.surprisal, [exact[0, 3, 4], exact[1, 1, 6], 9.0], rtol=1e-5)
