"""The scheduling laws: the predictor, the priority, the selection of rows, and the bound on waiting."""

import math
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from entropic_jax.control import chain, scheduling
from entropic_jax.control.controller import update_rows
from entropic_jax.control.entropy_drop import AR1
from entropic_jax.control.laws import SCHEDULES
from entropic_jax.control.scheduling import PaperScheduling, RowLoad, Scheduling
from entropic_jax.state import Signal, plain_action, quiet_signal
from tests.control.test_entropy_drop import PRIOR, all_emitting, exact_ar1

GAINS = dict(cost=0.5, memory=0.25, slack=0.25, ageing=0.05, bound=4.0)


def load(rows: int, **fields: Any) -> RowLoad:
    plain = scheduling.default_load(rows)
    return plain._replace(**{k: jnp.asarray(v, getattr(plain, k).dtype) for k, v in fields.items()})


def measured(runnable, emitting, **fields: Any) -> Signal:
    runnable, emitting = jnp.asarray(runnable), jnp.asarray(emitting)
    return quiet_signal(runnable.shape[0])._replace(runnable=runnable, emitting=emitting, **fields)


@partial(jax.jit, static_argnames="adversary")
def serve(law, load, entropies, arrived, adversary=None):
    """Which rows advanced at each step, and the quotas after it, `[steps, rows]`."""
    rows = entropies.shape[1]

    def step(carry, inputs):
        action, state, last, length = carry
        entropy, arrived = inputs
        runnable = arrived & (length < load.true_end)
        emitting = runnable & (action.quota > 0)
        emitting &= jnp.cumsum(emitting) <= law.width  # as the loop gathers them
        entropy = entropy if adversary is None else adversary(state, emitting, entropy)
        last, length = jnp.where(emitting, entropy, last), length + emitting.astype(jnp.int32)
        signal = measured(runnable, emitting, entropy=last, length=length)
        action, state = update_rows(law, signal, action, state)
        action, state = law.schedule(signal, action, state)
        return (action, state, last, length), (emitting, action.quota)

    action = plain_action(jnp.ones(rows))
    state = scheduling.with_load(law.init(action), load)
    start = (action, state, jnp.zeros(rows), jnp.zeros(rows, jnp.int32))
    return jax.lax.scan(step, start, (entropies, arrived))[1]


def ends(emitted) -> np.ndarray:
    """The step at which each sequence advanced for the last time, counted from 1."""
    return (np.arange(1, len(emitted) + 1)[:, None] * np.asarray(emitted)).max(0)


# The priority and the choice.


def test_no_sequence_past_its_predicted_length_goes_before_another():
    rows, law = load(3, expected_end=[50, 10, 40]), scheduling.ShortestRemaining(1)
    state = scheduling.with_load(law.init(plain_action(jnp.ones(3))), rows)
    everyone = jnp.ones(3, bool)
    signal = measured(everyone, everyone, length=jnp.array([60, 45, 30], jnp.int32))
    assert law.score(signal, state).tolist() == [0, 0, -10]


def exact_priority(drop, load, wait, cost, memory, slack, ageing, bound):
    field = lambda x: np.asarray(x, np.float64)
    load = cost * field(load.cost) + memory * field(load.memory) + slack * field(load.slack)
    return np.clip(field(drop) / np.maximum(load, 0.05), 0, bound) + ageing * field(wait)


@pytest.mark.parametrize("seed", range(4))
def test_priority_against_float64_and_its_gradients(seed):
    drop, cost, memory, slack, wait = np.random.default_rng(seed).random((5, 6))
    rows = load(6, cost=cost, memory=memory, slack=slack)
    queue = jnp.asarray(4 * drop, jnp.float32), rows, jnp.asarray(60 * wait).astype(jnp.int32)
    exact = lambda **gains: exact_priority(*queue, **{**GAINS, **gains})
    np.testing.assert_allclose(scheduling.priority(*queue, **GAINS), exact(), rtol=1e-5)
    slopes = jax.jacobian(lambda gains: scheduling.priority(*queue, **gains))(GAINS)
    for name, slope in slopes.items():
        rise = exact(**{name: GAINS[name] + 1e-6}) - exact(**{name: GAINS[name] - 1e-6})
        np.testing.assert_allclose(slope, rise / 2e-6, rtol=1e-4, atol=1e-5, err_msg=name)
    broken = load(6, cost=[0.0, math.nan, math.inf, -9.0, 2.0, 2.0], slack=np.zeros(6))
    actual = scheduling.priority(jnp.ones(6), broken, jnp.zeros(6, jnp.int32), **GAINS)
    assert actual.tolist() == [4, 4, 0, 4, 1, 1]
    light = load(3, cost=np.array([0.04, 0.05, 0.055]) / GAINS["cost"], slack=np.zeros(3))
    actual = scheduling.priority(jnp.full(3, 0.1), light, jnp.zeros(3, jnp.int32), **GAINS)
    np.testing.assert_allclose(actual, 0.1 / np.array([0.05, 0.05, 0.055]), rtol=1e-6)


def test_the_law_is_what_its_formula_says():
    rng = np.random.default_rng(1)
    entropies = rng.gamma(2.0, 1.0, (60, 5)).astype(np.float32)
    rows = load(5, **{name: rng.random(5) for name in ("cost", "memory", "slack")})
    emitted = np.asarray(serve(Scheduling(2, prior=PRIOR, **GAINS), rows, entropies, all_emitting(60, 5))[0])
    wait, last = np.zeros(5), np.full(5, np.nan)
    for step in range(59):
        wait = np.where(emitted[step], 0, wait + 1)
        last = np.where(emitted[step], entropies[step], last)
        mean, scale, correlation = np.transpose(exact_ar1(entropies[: step + 1], emitted[: step + 1]))
        d = (1 - correlation) * np.nan_to_num(last - mean)
        below = np.vectorize(math.erfc)(-d / scale / 2**0.5) / 2
        drop = d * below + scale * np.exp(-((d / scale) ** 2) / 2) / (2 * np.pi) ** 0.5
        best = np.argsort(-exact_priority(drop, rows, wait, **GAINS))[:2]
        assert set(np.flatnonzero(emitted[step + 1])) == set(best)


@settings(max_examples=60)
@given(
    arrays(np.float32, 7, elements=st.sampled_from([0.0, 0.5, 2.0, 9.0])),
    arrays(np.int32, 7, elements=st.integers(0, 3)),
    arrays(bool, 7),
    st.sampled_from([1, 3, 9]),
)
def test_the_greatest_are_chosen(score, wait, runnable, width):
    order = sorted(np.flatnonzero(runnable), key=lambda row: (-score[row], -wait[row], row))
    actual = scheduling.select_rows(jnp.asarray(score), jnp.asarray(wait), jnp.asarray(runnable), width)
    assert set(np.flatnonzero(actual)) == set(order[:width])


# Who waits, and for how long.


def longest_wait(emitted, runnable) -> int:
    longest = wait = np.zeros(emitted.shape[1], int)
    for waits in runnable & ~np.asarray(emitted):
        wait = np.where(waits, wait + 1, 0)
        longest = np.maximum(longest, wait)
    return int(longest.max())


def feed_the_favourite(state, emitting, entropy):
    """An adversary: rows served twice in a row stay attractive, and waiting rows gain nothing when served."""
    return jnp.where(state.wait > 0, 0.0, entropy)


ENTROPIES = st.sampled_from([0, 1, 3, 11, 12, math.nan, math.inf])


@pytest.mark.slow
@settings(max_examples=80)
@given(
    arrays(np.float32, (150, 6), elements=ENTROPIES, fill=st.nothing()),
    arrays(np.float32, (3, 6), elements=st.floats(0, 1, width=32)),
    arrays(np.int32, 6, elements=st.integers(0, 30)),
    st.sampled_from([1, 2, 4]),
    st.floats(0.1, 4.0),
    st.integers(1, 40),
    st.booleans(),
)
def test_no_one_waits_longer_than_promised(entropies, loads, begins, width, bound, rounds, adaptive):
    law = Scheduling(width, bound=jnp.float32(bound), ageing=jnp.float32(bound / rounds))
    rows = load(6, cost=loads[0], memory=loads[1], slack=loads[2])
    runnable = np.arange(150)[:, None] >= begins
    emitted, _ = serve(law, rows, entropies, runnable, adversary=feed_the_favourite if adaptive else None)
    assert longest_wait(emitted, runnable) <= rounds + 1e-3 + math.ceil(6 / width)
    waiting = np.minimum(runnable.sum(1), width)
    assert (np.asarray(emitted).sum(1)[41:] == waiting[41:]).all()  # and no place stays empty


def test_the_printed_law_starves_and_the_corrected_one_does_not():
    entropies, arrived = (
        np.random.default_rng(0).choice(np.float32([1, 3]), (10_000, 2)),
        all_emitting(10_000, 2),
    )
    rows = load(2, cost=[0.1, 1.0], memory=[0.1, 1.0], slack=[1.0, 0.0])  # the second is in haste, and dear
    emitted, _ = serve(PaperScheduling(1), rows, entropies, arrived)
    assert np.asarray(emitted).sum(0).tolist() == [10_000, 0]
    emitted, _ = serve(Scheduling(1), rows, entropies, arrived, adversary=feed_the_favourite)
    assert np.asarray(emitted).sum(0)[1] >= 10_000 / (80 + 2)
    # The promise is not an idle one: an adversary may take nearly all of it.
    law = Scheduling(1, bound=1.0, ageing=0.01)
    rows = rows._replace(slack=jnp.zeros(2))
    emitted, _ = serve(law, rows, entropies, arrived, adversary=feed_the_favourite)
    assert 95 <= longest_wait(emitted, arrived) <= 102


def test_the_urgent_go_first_unless_by_the_printed_law():
    entropies = np.full((1, 2), 2.0, np.float32)
    rows = load(2, slack=[1.0, 0.1])
    second = lambda law: serve(law, rows, entropies, all_emitting(1, 2))[1][0].tolist()
    assert second(Scheduling(1, ageing=0.0)) == [0, 1]
    assert second(PaperScheduling(1)) == [1, 0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_where_all_fit_nothing_changes(name):
    with pytest.raises(ValueError, match="width must be an integer of at least 1; got 0"):
        SCHEDULES[name](0).init(plain_action(jnp.ones(2)))
    law, action = SCHEDULES[name](3), plain_action(jnp.array([0.5, 1.0, 1.0, 1.0]))
    update, signal = jax.jit(law.schedule), measured([True, False, True, True], [True] * 4)
    chex.assert_trees_all_equal(update(signal, action, law.init(action))[0], action)
    crowded, state = update(signal._replace(runnable=jnp.ones(4, bool)), action, law.init(action))
    assert crowded.quota.sum() == 3
    chex.assert_trees_all_equal(update(signal, crowded, state)[0], action)  # and back again


ORDERS = {"fcfs": [1, 3, 0, 2], "shortest-job": [3, 1, 0, 2], "shortest-remaining": [0, 2, 3, 1]}


@pytest.mark.parametrize(("name", "order"), ORDERS.items())
def test_baselines_do_what_their_names_say(name, order):
    rows = load(4, arrival=[2, 0, 3, 1], true_end=[9, 4, 12, 2], expected_end=[1, 9, 2, 5])
    emitted, _ = serve(SCHEDULES[name](1), rows, np.ones((40, 4), np.float32), all_emitting(40, 4))
    assert np.asarray(emitted).sum(0).tolist() == [9, 4, 12, 2]
    assert np.argsort(ends(emitted)).tolist() == order


def test_what_found_no_page_does_not_hold_its_place():
    law, action = Scheduling(1, ageing=1.0), plain_action(jnp.ones(2))
    update, state = jax.jit(law.schedule), law.init(action)
    rounds = []
    for _ in range(40):
        rounds.append(action.quota[1])
        advanced = jnp.array([False, True]) & (action.quota > 0)  # the first never does
        action, state = update(measured([True, True], advanced), action, state)
    assert sum(rounds) >= 15


def test_the_predictor_observes_tokens_and_not_steps():
    law, action = Scheduling(1), plain_action(jnp.ones(2))
    state = law.init(action)
    signal = measured([True, True], [True, False], entropy=jnp.array([2.0, 5.0]))
    for count in (1, 2, 3):  # as in a pass that emits three
        action, state = update_rows(law, signal, action, state)
        assert state.predictor.num_tokens.tolist() == [count, 0]
    _, after = law.schedule(signal, action, state)
    chex.assert_trees_all_equal(after.predictor, state.predictor)


def test_a_new_demand_is_found_in_any_state_and_forgets_who_left():
    busy = jax.tree.map(jnp.ones_like, chain(Scheduling(1)).init(plain_action(jnp.ones(3))))
    coming = load(3, arrival=[1, 9, 1], cost=[0.1, 0.2, 0.3])
    (after,) = scheduling.with_load(busy, coming)
    chex.assert_trees_all_equal(after.load, coming)
    assert after.predictor.num_tokens.tolist() == [1, 0, 1] and after.wait.tolist() == [1, 0, 1]
    jax.tree.map(lambda x: x.delete(), after)
    assert coming.arrival.tolist() == [1, 9, 1]  # the caller's arrays are not those of the state


@pytest.mark.slow
@pytest.mark.parametrize("alike", [False, True])
def test_mean_completion_time_of_the_laws(alike):
    rng = np.random.default_rng(5)
    seeds, steps = 16, 700
    lengths = np.clip(rng.lognormal(3, 1, (seeds, 12)), 2, 300).astype(np.int32)  # a few long, many short
    lengths = np.full_like(lengths, 60) if alike else lengths
    expected = (lengths * rng.lognormal(0, 0.5, lengths.shape)).astype(np.int32)
    entropies = rng.gamma(2, 1, (seeds, steps, 12)).astype(np.float32)  # says nothing of the length
    mean = {}
    for name, law in SCHEDULES.items():
        rows = jax.vmap(lambda true, guess: load(12, true_end=true, expected_end=guess))(lengths, expected)
        emitted, _ = jax.vmap(lambda *job: serve(law(3), *job, all_emitting(steps, 12)))(rows, entropies)
        assert (np.asarray(emitted).sum(1) == lengths).all()  # everyone came to an end
        mean[name] = np.array([ends(job).mean() for job in emitted])
    assert all((mean["shortest-job"] <= 1.02 * other).all() for other in mean.values())  # a lower bound
    if alike:  # there is nothing to know, and taking turns makes everybody late
        assert mean["fcfs"].mean() < 0.8 * mean["entropic"].mean()
    else:  # the short ones need not wait for the long
        assert mean["shortest-remaining"].mean() < mean["entropic"].mean() < mean["fcfs"].mean()


BASELINES = {name: law for name, law in SCHEDULES.items() if name not in ("entropic", "paper")}
TABLE = {
    "entropic": lambda gain: Scheduling(2, ageing=gain, bound=4 * gain),
    "entropic, cost": lambda gain: Scheduling(2, cost=gain),
    "entropic, prior": lambda gain: Scheduling(2, prior=AR1(gain, 1.0, 0.1)),
    "paper": lambda gain: PaperScheduling(2, cost=gain),
    **{name: lambda gain, law=law: law(2) for name, law in BASELINES.items()},
    "chained": lambda gain: chain(Scheduling(2, memory=gain), chain()),
}


def quotas(controller):
    def body(carry, entropy):
        action, state = carry
        signal = measured([True] * 4, action.quota > 0, entropy=entropy)
        action, state = controller.schedule(signal, action, state)
        return (action, state), action.quota

    action = plain_action(jnp.ones(4))
    entropies = np.random.default_rng(2).gamma(2, 1, (25, 4)).astype(np.float32)
    return jax.lax.scan(body, (action, controller.init(action)), entropies)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_contract(name):
    make, action = TABLE[name], plain_action(jnp.ones(4))
    before = (action, make(0.5).init(action))
    update = lambda gain: make(gain).schedule(measured([True] * 4, [True] * 4), *before)
    after = update(0.5)
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    assert not any(x.weak_type for x in jax.tree.leaves((before, after)))
    chex.assert_trees_all_close(jax.jit(update)(0.5), after)
    gains = jnp.array([0.1, 0.5, 2.0])
    jitted = jax.jit(lambda gain: quotas(make(gain)))
    alone = [jitted(gain) for gain in gains]
    assert jitted._cache_size() == 1  # new gains do not retrace
    np.testing.assert_array_equal(jax.vmap(lambda g: quotas(make(g)))(gains), alone)
