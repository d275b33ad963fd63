"""The contract that every controller keeps, tested from one table."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import entropy
from entropic_jax.control import Every, When, chain, pytree, update_rows
from entropic_jax.control.laws import LAWS
from entropic_jax.control.temperature import EDT, DynaTemp, Exact, Integral, Mirostat, Normalised, Paper
from entropic_jax.state import Action, SchedulingSignal, Signal, plain_action, quiet_signal
from tests import tiny

START = (0.5, 1.5, 2.0, 0.0)  # the last row is greedy
ROWS = len(START)
LOGITS = 2 * np.random.default_rng(0).standard_normal((ROWS, 24)).astype(np.float32)


@pytree
class Nudge:
    """Adds its gain and the entropies seen so far to the temperature."""

    gain: Any

    def init(self, action: Action) -> jax.Array:
        return jnp.zeros_like(action.temperature)

    def update(self, signal: Signal, action: Action, state: jax.Array) -> tuple[Action, jax.Array]:
        state = state + signal.entropy
        return action._replace(temperature=action.temperature + self.gain * (1 + state)), state


def warm(signal: Signal, action: Action) -> jax.Array:
    return action.temperature > 1


TABLE: dict[str, Callable[[Any], Any]] = {
    "null": lambda gain: chain(),
    "one": Nudge,
    "chain": lambda gain: chain(Nudge(gain), Nudge(0.5)),
    "every": lambda gain: Every(Nudge(gain), 2),
    "when": lambda gain: When(warm, Nudge(gain)),
    "nested": lambda gain: chain(Every(When(warm, Nudge(gain)), 3), Nudge(gain)),
    "paper": lambda gain: Paper(1.2, gain, highest_temperature=50.0),  # finite differences end at a clip
    "integral": lambda gain: Integral(1.2, gain, highest_temperature=2.0),
    "normalised": lambda gain: Normalised(1.2, gain, highest_temperature=2.0),
    "exact": lambda gain: Exact(1.2 + gain, highest_temperature=2.0),
    "mirostat": lambda gain: Mirostat(1.2, gain),
    "edt": lambda gain: EDT(theta=gain),
    "dynatemp": lambda gain: DynaTemp(exponent=1 + gain),
    "two laws": lambda gain: chain(Every(Normalised(1.2, gain), 2), Mirostat(1.2 + gain)),
}


def signal(measured: Any, temperature: Any) -> Signal:
    """A signal whose logits are sharper the larger the stated entropy is."""
    logits = (1 + jnp.float32(measured)) * LOGITS
    belief, tempered = entropy.entropy_statistics(logits), entropy.at_temperature(logits, temperature)
    return quiet_signal(ROWS)._replace(
        entropy=jnp.full(ROWS, measured),
        varentropy=belief.varentropy,
        tempered_entropy=tempered.entropy,
        tempered_varentropy=tempered.varentropy,
        surprisal=belief.entropy,
        emitting=jnp.ones(ROWS, bool),
        logits=logits,
    )


def run(controller: Any, steps: int = 5) -> Action:
    action = plain_action(jnp.array(START))

    def body(carry, measured):
        action, state = carry
        action, state = controller.update(signal(measured, action.temperature), action, state)
        return (action, state), action

    _, actions = jax.lax.scan(body, (action, controller.init(action)), jnp.linspace(0, 1, steps))
    return actions


def total(controller: Any) -> jax.Array:
    """One number that depends on every action."""
    trace = run(controller)
    limit = jnp.where(jnp.isfinite(trace.surprisal_limit), trace.surprisal_limit, 0.0)
    return trace.temperature.sum() + limit.sum() + trace.dropped_mass_limit.sum()


@pytest.mark.parametrize("name", TABLE)
def test_structure_and_types_stand_still(name):
    controller = TABLE[name](0.1)
    action = plain_action(jnp.array(START))
    state = controller.init(action)
    after = controller.update(signal(1.0, action.temperature), action, state)
    chex.assert_trees_all_equal_shapes_and_dtypes((action, state), after)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(after))


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_jit_vmap_and_grad(name):
    make = TABLE[name]
    jitted = jax.jit(lambda gain: run(make(gain)))
    with jax.disable_jit():
        eager = run(make(0.1))
    chex.assert_trees_all_close(jitted(0.1), eager, rtol=1e-5)
    gains = jnp.array([0.0, 0.1, 0.2])
    many = jax.jit(jax.vmap(lambda gain: run(make(gain))))(gains)
    for index, gain in enumerate(gains):
        single = jax.tree.map(lambda x: x[index], many)
        chex.assert_trees_all_close(single, jitted(gain), rtol=1e-5)
    value = jax.jit(lambda gain: total(make(gain)))
    gradient = jax.jit(jax.grad(lambda gain: total(make(gain))))(0.1)
    numeric = (value(0.11) - value(0.09)) / 0.02
    np.testing.assert_allclose(gradient, numeric, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_every_gain_of_a_law_has_a_finite_gradient(name):
    law = jax.tree.map(jnp.float32, TABLE[name](0.1))
    slopes = jax.jit(jax.grad(total))(law)
    assert np.isfinite(jax.tree.leaves(slopes)).all()
    value = jax.jit(total)
    for field in dataclasses.fields(law):
        gain, near = getattr(law, field.name), 0.01
        ends = [value(dataclasses.replace(law, **{field.name: gain + s * near})) for s in (1, -1)]
        numeric = (ends[0] - ends[1]) / (2 * near)
        slope = getattr(slopes, field.name)
        np.testing.assert_allclose(slope, numeric, rtol=2e-2, atol=2e-3, err_msg=field.name)


@pytest.mark.parametrize("name", ["one", *LAWS])
def test_new_gains_do_not_retrace(name):
    chex.clear_trace_counter()
    jitted = jax.jit(chex.assert_max_traces(run, n=1))
    for gain in (0.1, 0.2, 0.3):
        jitted(jax.tree.map(jnp.float32, TABLE[name](gain)))


def test_the_null_controller_changes_nothing():
    before = jax.tree.map(lambda x: jnp.tile(x, (5, 1)), plain_action(jnp.array(START)))
    chex.assert_trees_all_equal(run(chain()), before)


def test_every_acts_at_the_first_step_and_each_nth_after():
    changes = np.diff(np.asarray(run(Every(Nudge(1.0), 2)).temperature)[:, 0], prepend=0.5) != 0
    assert changes.tolist() == [True, False, True, False, True]


def test_every_keeps_the_state_of_its_law_between_its_tokens():
    action, subject = plain_action(jnp.array(START)), Every(Nudge(0.1), 2)
    state = subject.init(action)
    for number in range(5):
        _, state = subject.update(signal(0.5, action.temperature), action, state)
        assert state.controller.tolist() == [0.5 * (number // 2 + 1)] * ROWS


@pytest.mark.parametrize("n", [0, -1, 1.5, float("inf"), float("nan")])
def test_a_period_is_a_number_of_tokens(n):
    with pytest.raises(ValueError, match=f"n must be an integer of at least 1; got {n}"):
        Every(Nudge(1.0), n)


@pytree
class Quota:
    """Lets every row advance by one more token than before."""

    def init(self, action: Action) -> None:
        return None

    def update(self, signal: Signal, action: Action, state: None) -> tuple[Action, None]:
        return action, state

    def schedule(self, signal: SchedulingSignal, action: Action, state: None) -> tuple[Action, None]:
        return action._replace(quota=action.quota + 1), state


def test_a_law_across_rows_acts_at_the_first_step_and_each_nth_after():
    law, action = Every(Quota(), 3), plain_action(jnp.array(START))
    state, quotas = law.init(action), []
    nothing = SchedulingSignal(*(None,) * len(SchedulingSignal._fields))
    for _ in range(7):
        action, state = law.schedule(nothing, action, state)
        quotas.append(int(action.quota[0]))
    assert quotas == [2, 2, 2, 3, 3, 3, 4] and state.steps.tolist() == [7] * ROWS


def test_the_controllers_of_a_chain_agree_on_what_they_observe():
    def observing(what: Any) -> Any:
        law = Once()
        object.__setattr__(law, "observes", what)
        return law

    assert chain(Nudge(1.0), Once()).observes is None
    assert chain(Nudge(1.0), observing("a"), Every(observing("a"), 2)).observes == "a"
    assert When(warm, observing("b")).observes == "b"
    with pytest.raises(ValueError, match="observes must be the same for all controllers"):
        _ = chain(observing("a"), observing("b")).observes


def test_when_leaves_the_other_rows_alone():
    temperatures = np.asarray(run(When(warm, Nudge(0.1))).temperature)
    assert (temperatures[:, 0] == 0.5).all()
    assert (np.diff(temperatures[:, 1]) > 0).all()


def test_when_keeps_the_state_of_the_other_rows():
    action = plain_action(jnp.array(START))
    subject = When(warm, Nudge(0.1))
    state = subject.init(action)
    for number in (1, 2):
        changed, state = subject.update(signal(0.5, action.temperature), action, state)
        assert state.tolist() == [0.0, 0.5 * number, 0.5 * number, 0.0]  # two rows are warm
        assert (changed.temperature != action.temperature).tolist() == [False, True, True, False]


def test_rows_that_emit_nothing_keep_their_action_and_state():
    action = plain_action(jnp.array(START))
    subject = chain(Nudge(0.1), Every(Nudge(0.1), 2))
    emitting = jnp.array([True, False, True, False])
    quiet = signal(0.5, action.temperature)._replace(emitting=emitting)
    before = subject.init(action)
    changed, after = update_rows(subject, quiet, action, before)
    assert ((changed.temperature != action.temperature) == emitting).all()
    states = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    differing = [new != old for old, new in states]
    assert all((leaf <= emitting).all() for leaf in differing)
    assert (differing[0] == emitting).all()


def test_a_period_of_one_row_does_not_depend_on_the_others():
    action = plain_action(jnp.array(START))
    subject = Every(Nudge(0.1), 2)
    alone = signal(0.5, action.temperature)._replace(emitting=jnp.arange(ROWS) == 0)
    _, state = update_rows(subject, alone, action, subject.init(action))  # row 0 is one token ahead
    changed, _ = update_rows(subject, signal(0.5, action.temperature), action, state)
    assert (changed.temperature != action.temperature).tolist() == [False, *[True] * (ROWS - 1)]


def test_when_asks_its_condition_of_no_signal_that_its_controller_does_not_act_on():
    action = plain_action(jnp.array(START))
    subject = When(lambda signal, action: signal.requested_temperature > 1, Nudge(0.1))
    state, other = subject.init(action), SchedulingSignal(*(None,) * len(SchedulingSignal._fields))
    changed, after = subject.schedule(other, action, state)  # which has no requested temperature
    assert changed is action and after is state


@pytree
class Once:
    """Chooses token 7 at the first step, and none after it."""

    def init(self, action: Action) -> jax.Array:
        return jnp.zeros(action.temperature.shape, bool)

    def update(self, signal: Signal, action: Action, state: jax.Array) -> tuple[Action, jax.Array]:
        return action._replace(token=jnp.where(state, action.token, 7)), state | signal.emitting


@pytest.mark.slow
def test_a_token_that_a_controller_chooses_is_of_one_step():
    tokens, state, _ = tiny.finish(tiny.begin(tiny.prompts(8, 12), controller=Once()), controller=Once())
    plain = tiny.finish(tiny.begin([[*text, 7] for text in tiny.prompts(8, 12)], max_tokens=19))[0]
    assert [text[0] for text in tokens] == [7, 7] and [text[1:] for text in tokens] == plain
    assert (state.action.token == -1).all()


@pytest.mark.slow
def test_the_loop_obeys_its_controller():
    texts = tiny.prompts(8, 12)
    controller = Nudge(jnp.float32(0.05))
    _, state, (trace,) = tiny.finish(tiny.begin(texts, controller=controller), controller=controller)
    entropy = trace.entropy[:20, 0]
    expected = 1 + 0.05 * np.cumsum(1 + np.cumsum(entropy))
    np.testing.assert_allclose(trace.temperature[:20, 0], expected, rtol=1e-4)
    assert (np.asarray(state.ledger.steps) == 20).all()
    falls = np.maximum(0, -np.diff(entropy)).sum()
    np.testing.assert_allclose(state.ledger.entropic_time[0], falls, rtol=1e-4)


def test_laws_with_as_many_gains_have_different_structures():
    @pytree
    class First:
        gain: Any

    @pytree
    class Other:
        gain: Any

    assert jax.tree.structure(First(1.0)) != jax.tree.structure(Other(1.0))
    assert jax.tree.structure(First(1.0)) == jax.tree.structure(First(2.0))
