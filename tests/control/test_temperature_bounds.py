"""No law by name makes a row greedy or a greedy row random, nor does one written as CONTRIBUTING says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.control import Every, PerRow, When, chain, pytree, update_rows
from entropic_jax.control.laws import LAWS
from entropic_jax.control.temperature_bounds import set_temperature
from entropic_jax.serving.engine.row_controllers import Switched
from entropic_jax.state import Action, Signal, plain_action, quiet_signal
from entropic_jax.state.pytree import Gain
from tests import tiny

REQUESTED = np.array([0.7, 0.0, 1.5, 0.2], np.float32)
ROWS, GREEDY = len(REQUESTED), REQUESTED == 0


@pytree
class Clipped:
    """A law of someone else: cools above the set-point and clips to the fields as they are."""

    target_entropy: Gain
    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 0.0
    gain: Gain = 0.5

    def init(self, action: Action) -> tuple[()]:
        """See `Controller`."""
        return ()

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`: writes `temperature`."""
        temperature = action.temperature * jnp.exp(self.gain * (self.target_entropy - signal.entropy))
        temperature = jnp.clip(temperature, self.lowest_temperature, self.highest_temperature)
        return action._replace(temperature=jnp.where(action.temperature > 0, temperature, 0.0)), state


@pytree
class Ended(Clipped):
    """The same law, ending as CONTRIBUTING says."""

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`: writes `temperature`."""
        temperature = action.temperature * jnp.exp(self.gain * (self.target_entropy - signal.entropy))
        bounds = self.lowest_temperature, self.highest_temperature
        return set_temperature(action, temperature, *bounds), state


TABLE = {**LAWS, "clipped": Clipped, "ended": Ended}
GAINS = {name: {} if name in ("edt", "dynatemp") else {"target_entropy": 1.2} for name in TABLE}


def switched(law: Any) -> PerRow:
    """The law as a server runs it, with its gains in arrays `[rows]`."""
    return jax.tree.map(lambda x: jnp.full(ROWS, x), PerRow(chain(Switched(True, law))))


RUN_BY = {
    "itself": lambda law: law,
    "a chain": chain,
    "every second token": lambda law: Every(law, 2),
    "a condition": lambda law: When(lambda signal, action: signal.emitting, law),
    "a server": switched,
}


def seen(seed: int) -> Signal:
    logits = 3 * jax.random.normal(jax.random.key(seed), (ROWS, 40))
    return quiet_signal(ROWS)._replace(
        logits=logits,
        entropy=jnp.array([4.0, 3.0, 0.1, 0.0]),
        varentropy=jnp.ones(ROWS),
        tempered_entropy=jnp.array([4.0, 3.0, 0.1, 0.0]),
        tempered_varentropy=jnp.ones(ROWS),
        surprisal=jnp.ones(ROWS),
        emitting=jnp.ones(ROWS, bool),
        requested_temperature=jnp.asarray(REQUESTED),
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", RUN_BY)
@pytest.mark.parametrize("name", TABLE)
def test_no_law_moves_a_row_to_or_from_temperature_zero(name, place):
    controller = RUN_BY[place](TABLE[name](**GAINS[name]))
    action = plain_action(jnp.asarray(REQUESTED))
    state = controller.init(action)
    update = jax.jit(update_rows)
    for step in range(3):
        action, state = update(controller, seen(step), action, state)
        temperature = np.asarray(action.temperature)
        assert (temperature[GREEDY] == 0).all() and (temperature[~GREEDY] > 0.01).all(), temperature


@pytest.mark.slow
def test_a_law_that_clips_plainly_holds_to_each_request_in_the_loop():
    controller = chain(Clipped(target_entropy=jnp.float32(9.0)))  # a set-point that no row reaches
    requested = [1.0, 0.0, 0.6]
    begun = tiny.begin(tiny.prompts(4, 4, 4), controller=controller, temperature=requested)
    _, _, (trace,) = tiny.finish(begun, controller=controller)
    np.testing.assert_array_equal(trace.temperature[:20], np.tile(np.float32(requested), (20, 1)))


def test_a_stated_upper_bound_is_kept_row_by_row():
    action, signal = plain_action(jnp.asarray(REQUESTED)), seen(0)
    law = Clipped(target_entropy=9.0, highest_temperature=1.25)
    after = update_rows(law, signal, action, ())[0].temperature
    np.testing.assert_array_equal(after, np.float32([1.25, 0, 1.25, 1.25]))
    by_row = Clipped(target_entropy=9.0, highest_temperature=jnp.array([0.0, 0.0, 1.25, 1.25]))
    after = update_rows(by_row, signal, action, ())[0].temperature
    np.testing.assert_array_equal(after, np.float32([0.7, 0, 1.25, 1.25]))
