"""The requested temperature is the ceiling of the temperature laws that hold a set-point."""

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.control import chain
from entropic_jax.control.laws import LAWS
from entropic_jax.control.temperature import Normalised
from entropic_jax.methods.presets import preset
from entropic_jax.state import plain_action
from tests import tiny
from tests.control.test_temperature import GREEDY, ROWS, act, random_logits, seen


def test_no_law_is_hotter_than_the_request_unless_its_ceiling_is_set():
    logits = random_logits(6.0)  # certain rows, which a set-point of 3 nats heats
    requested = np.geomspace(0.05, 1.5, ROWS).astype(np.float32)  # some below the lowest temperature
    requested[GREEDY] = 0
    action = plain_action(jnp.asarray(requested))
    signal = seen(logits, jnp.ones(ROWS))._replace(requested_temperature=action.temperature)
    for name in ("integral", "normalised", "exact"):
        law = LAWS[name](target_entropy=3.0)
        temperatures = np.asarray(act(law, signal, action).temperature)
        np.testing.assert_array_equal(temperatures, requested)
        hotter = LAWS[name](target_entropy=3.0, highest_temperature=9.0)
        temperatures = np.asarray(act(hotter, signal, action).temperature)
        assert (np.delete(temperatures, GREEDY) > np.delete(requested, GREEDY)).all()
        cooler = np.asarray(act(LAWS[name](target_entropy=0.1), signal, action).temperature)
        assert (cooler <= requested).all() and (cooler < requested).any(), "it is no bound of cooling"


def test_only_the_preset_paper_may_be_hotter_than_the_request():
    ceilings = {
        name: preset(name).controller.controllers[0].highest_temperature
        for name in ("micro", "full", "paper")
    }
    assert ceilings == {"micro": 0.0, "full": 0.0, "paper": 1.2}


@pytest.mark.slow
def test_rows_of_a_batch_have_the_ceilings_of_their_requests():
    controller = chain(Normalised(jnp.float32(9.0)))  # a set-point that no row reaches
    begun = tiny.begin(tiny.prompts(4, 4, 4), controller=controller, temperature=[1.0, 0.0, 0.6])
    _, _, (trace,) = tiny.finish(begun, controller=controller)
    for row, requested in enumerate((1.0, 0.0, 0.6)):
        np.testing.assert_array_equal(trace.temperature[:20, row], np.float32(requested))
