"""The contract that every controller keeps, from one table."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.control import Every, When, chain, pytree
from entropic_jax.state import Action, Signal, plain_action, quiet_signal
from tests import tiny

ROWS = 3


@pytree
class Nudge:
    """Adds its gain, plus what it has seen of the entropy, to the temperature."""

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
}


def signal(entropy: float) -> Signal:
    return quiet_signal(ROWS)._replace(entropy=jnp.full(ROWS, entropy), emitting=jnp.ones(ROWS, bool))


def run(controller: Any, steps: int = 5) -> jax.Array:
    action = plain_action(jnp.array([0.5, 1.5, 2.0]))

    def body(carry, entropy):
        action, state = carry
        action, state = controller.update(signal(entropy), action, state)
        return (action, state), action.temperature

    _, temperatures = jax.lax.scan(body, (action, controller.init(action)), jnp.linspace(0, 1, steps))
    return temperatures


@pytest.mark.parametrize("name", TABLE)
def test_structure_and_types_stand_still(name):
    controller = TABLE[name](0.1)
    action = plain_action(jnp.array([0.5, 1.5, 2.0]))
    state = controller.init(action)
    after = controller.update(signal(1.0), action, state)
    chex.assert_trees_all_equal_shapes_and_dtypes((action, state), after)


@pytest.mark.parametrize("name", TABLE)
def test_jit_vmap_and_grad(name):
    make = TABLE[name]
    np.testing.assert_allclose(jax.jit(run)(make(0.1)), run(make(0.1)), rtol=1e-6)
    gains = jnp.array([0.0, 0.1, 0.2])
    many = jax.vmap(lambda g: run(make(g)))(gains)
    for gain, one in zip(gains, many, strict=True):
        np.testing.assert_allclose(one, run(make(gain)), rtol=1e-6)
    gradient = jax.grad(lambda g: run(make(g)).sum())(0.1)
    numeric = (run(make(0.11)).sum() - run(make(0.09)).sum()) / 0.02
    np.testing.assert_allclose(gradient, numeric, rtol=1e-2, atol=1e-3)


def test_new_gains_do_not_retrace():
    jitted = jax.jit(chex.assert_max_traces(run, n=1))
    for gain in (0.1, 0.2, 0.3):
        jitted(Nudge(jnp.float32(gain)))


def test_the_null_controller_changes_nothing():
    np.testing.assert_array_equal(run(chain()), np.tile([0.5, 1.5, 2.0], (5, 1)).astype(np.float32))


def test_every_acts_at_the_first_step_and_each_nth_after():
    changes = np.diff(np.asarray(run(Every(Nudge(1.0), 2)))[:, 0], prepend=0.5) != 0
    assert changes.tolist() == [True, False, True, False, True]


def test_when_leaves_the_other_rows_alone():
    temperatures = np.asarray(run(When(warm, Nudge(0.1))))
    assert (temperatures[:, 0] == 0.5).all()
    assert (np.diff(temperatures[:, 1]) > 0).all()


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
