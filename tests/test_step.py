"""Steps that compute a subset of the rows: each row gets the same result as alone, and others do not move."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import Action, Signal, chain, generate
from entropic_jax.control import Every, PerRow, When, pytree
from entropic_jax.control.temperature import Normalised
from entropic_jax.loop import step, tokens_first
from entropic_jax.state import FAILED, RUNNING, SchedulingSignal, Trace
from entropic_jax.state.row_subset import Shared, where_rows
from tests import tiny
from tests.marks import exhaustive

TEXTS = tiny.prompts(9, 5, 12, 7)
PENALTIES = dict(presence_penalty=[0.0, 0.5, 0.0, 0.3], temperature=[0.0, 0.9, 0.7, 1.1])


@pytree
class Counter:
    """Adds its gain to the temperature whenever it runs."""

    gain: Any = 0.125

    def init(self, action: Action) -> jax.Array:
        return jnp.zeros_like(action.temperature)

    def update(self, signal: Signal, action: Action, state: jax.Array) -> tuple[Action, jax.Array]:
        return action._replace(temperature=action.temperature + self.gain), state + 1


@pytree
class Tabulated:
    """Looks temperatures up in a table that all rows share, and counts the steps in which it did."""

    table: Any

    def init(self, action: Action) -> Shared:
        return Shared((jnp.array(self.table), jnp.int32(0)))

    def update(self, signal: Signal, action: Action, state: Shared) -> tuple[Action, Shared]:
        table, steps = state.value
        temperature = table[signal.length % table.size]
        return action._replace(temperature=temperature), Shared((table, steps + 1))


@pytree
class FirstRows:
    """Schedules two running rows at a time, those with the fewest tokens first."""

    def init(self, action: Action) -> tuple[()]:
        return ()

    def schedule(
        self, signal: SchedulingSignal, action: Action, state: tuple[()]
    ) -> tuple[Action, tuple[()]]:
        assert isinstance(signal, SchedulingSignal)
        order = jnp.argsort(jnp.where(signal.runnable, signal.length, 10**6))
        quota = jnp.zeros_like(action.quota).at[order[:2]].set(1)
        return action._replace(quota=jnp.where(signal.runnable.sum() <= 2, 1, quota)), state


def tokens_of(controller: Any, width: int | None, texts=TEXTS, **options: Any):
    m, state = tiny.model(), tiny.begin(texts, controller=controller, max_tokens=10, **options)
    traces = []
    for _ in range(8):
        state, trace = generate(m.decoder, m.params, controller, state, 8, capacity=8, width=width)
        traces.append(jax.device_get(trace))
    rows = range(len(texts))
    tokens = [[t for x in traces for t in x.token[x.emitted[:, r], r].tolist()] for r in rows]
    temperature = [[t for x in traces for t in x.temperature[x.emitted[:, r], r].tolist()] for r in rows]
    return tokens, temperature, jax.device_get(state)


@pytest.mark.slow
@pytest.mark.parametrize("width", [3, *exhaustive(1)])
def test_a_narrow_step_gives_every_row_the_tokens_of_a_wide_one(width):
    wide, _, wide_state = tokens_of(chain(), None, **PENALTIES)
    narrow, _, state = tokens_of(chain(), width, **PENALTIES)
    assert narrow == wide
    for name in ("token", "length", "status", "history", "seed"):
        chex.assert_trees_all_equal(getattr(state, name), getattr(wide_state, name))
    chex.assert_trees_all_close(state.measured, wide_state.measured, rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_close(state.ledger.entropic_time, wide_state.ledger.entropic_time, rtol=1e-4)


@pytest.mark.slow
def test_every_counts_the_tokens_of_its_own_row():
    controller = chain(Every(Counter(), 3), FirstRows())
    tokens, temperature, _ = tokens_of(controller, 2)
    for row, text in enumerate(TEXTS):
        alone, expected, _ = tokens_of(chain(Every(Counter(), 3)), None, [text], seeds=[row])
        assert tokens[row] == alone[0]
        np.testing.assert_allclose(temperature[row], expected[0], rtol=1e-6)
    changes = np.diff(temperature[0], prepend=1.0) != 0
    assert changes.tolist() == [True, False, False, True, False, False, True, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "controller",
    [
        chain(Every(Every(Counter(), 2), 3)),
        chain(When(lambda signal, action: signal.entropy > 1, Every(Counter(), 3))),
        chain(When(lambda signal, action: signal.logits.max(-1) > 1, Normalised(1.0))),
        chain(Every(FirstRows(), 2), When(lambda signal, action: signal.length > 6, Counter())),
        chain(PerRow(Counter(jnp.array([0.1, 0.2, 0.3, 0.4])))),
    ],
    ids=["every every", "when every", "when logits", "every schedule", "per row"],
)
@pytest.mark.parametrize("width", [None, 2])
def test_the_structure_of_the_state_stands_still(controller, width):
    m, state = tiny.model(), tiny.begin(TEXTS, controller=controller)
    after = jax.eval_shape(lambda s: step(m.decoder, m.params, controller, s, width=width)[0], state)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)


@pytest.mark.slow
def test_gains_per_row_go_with_their_rows():
    gains = jnp.array([0.1, 0.2, 0.3, 0.4])
    _, wide, _ = tokens_of(PerRow(Counter(gains)), None)
    _, narrow, _ = tokens_of(PerRow(Counter(gains)), 2)
    for row in range(4):
        np.testing.assert_allclose(wide[row], 1 + float(gains[row]) * np.arange(1, 11), rtol=1e-5)
        np.testing.assert_allclose(narrow[row], wide[row], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [4, *exhaustive(3)])
def test_what_rows_share_is_not_gathered_even_if_it_is_as_long_as_the_batch(entries):
    table = np.float32([0.5, 0.75, 1.25, 1.5])[:entries]
    tokens, temperature, state = tokens_of(chain(Tabulated(table)), None)
    narrow_tokens, narrow_temperature, narrow_state = tokens_of(chain(Tabulated(table)), 2)
    assert narrow_tokens == tokens and narrow_temperature == temperature
    for row, text in enumerate(TEXTS):
        expected = table[(len(text) - 1 + np.arange(10)) % entries]
        np.testing.assert_array_equal(narrow_temperature[row], expected)
    for final, steps in ((state, 10), (narrow_state, 20)):  # four rows, ten tokens each
        (shared,) = final.control
        np.testing.assert_array_equal(shared.value[0], table)
        assert shared.value[1] == steps


def test_shared_state_changes_where_the_law_ran_for_any_row():
    rows = where_rows(
        jnp.array([False, True]), (jnp.ones(2), Shared(jnp.ones(3))), (jnp.zeros(2), Shared(jnp.zeros(3)))
    )
    chex.assert_trees_all_equal(rows, (jnp.array([0.0, 1.0]), Shared(jnp.ones(3))))
    none = where_rows(jnp.zeros(2, bool), Shared(jnp.ones(2)), Shared(jnp.zeros(2)))
    chex.assert_trees_all_equal(none, Shared(jnp.zeros(2)))


def test_state_that_is_neither_per_row_nor_declared_as_shared_is_refused():
    @pytree
    class Undeclared(Tabulated):
        def init(self, action: Action) -> Any:
            return super().init(action).value

    message = r"must hold arrays with one entry for each of the 4 rows, or `Shared` values; got shape \(3,\)"
    with pytest.raises(ValueError, match=message):
        tiny.begin(TEXTS, controller=Undeclared(np.ones(3, np.float32)))


@pytest.mark.slow
def test_a_row_that_emits_nothing_keeps_what_it_measured_and_what_it_obeys():
    m, controller = tiny.model(), Counter()
    state = tiny.begin(TEXTS, controller=controller)
    state, _ = generate(m.decoder, m.params, controller, state, 3, capacity=4)
    layer = state.cache.layers[0]
    broken = layer._replace(values=layer.values.at[state.cache.table[1, 0]].set(jnp.nan))
    state = state._replace(cache=state.cache._replace(layers=(broken, *state.cache.layers[1:])))
    waiting = state._replace(action=state.action._replace(quota=jnp.array([1, 1, 0, 1])))
    after, trace = jax.jit(lambda s: step(m.decoder, m.params, controller, s))(waiting)
    assert trace.emitted.tolist() == [True, False, False, True]
    assert after.status.tolist() == [RUNNING, FAILED, RUNNING, RUNNING]
    for row in (1, 2):
        kept = lambda x, row=row: np.asarray(x)[row]
        for name in ("measured", "control", "token", "history"):
            before = jax.tree.map(kept, getattr(waiting, name))
            chex.assert_trees_all_equal(before, jax.tree.map(kept, getattr(after, name)))
        assert after.action.temperature[row] == waiting.action.temperature[row]
    assert (np.asarray(after.control)[[0, 3]] == 4).all()


def test_a_launch_has_room_for_as_many_tokens_as_steps():
    m, state = tiny.model(), tiny.begin(TEXTS, max_tokens=6)
    _, trace = generate(m.decoder, m.params, chain(), state, 6, capacity=6)
    assert np.asarray(trace.num_tokens).tolist() == [6] * 4 and np.asarray(trace.emitted).all()
    assert (np.asarray(trace.entropy) > 0).all()


@pytest.mark.slow
def test_the_tokens_of_a_row_come_first_in_the_trace():
    emitted = jnp.array([[True, False], [False, True], [True, True]])
    number = jnp.arange(6.0).reshape(3, 2)
    fields = {name: number for name in Trace._fields if name != "top_logprobs"}
    compact = tokens_first(Trace(**{**fields, "emitted": emitted}))
    assert compact.emitted.tolist() == [[True, True], [True, True], [False, False]]
    assert compact.entropy.tolist() == [[0.0, 3.0], [4.0, 5.0], [0.0, 0.0]]
