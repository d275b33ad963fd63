"""`replay` differentiated with respect to gains, against difference quotients of the same launch."""

import dataclasses
from functools import cache as once
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, parameters, replay, start
from entropic_jax.control import chain
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.control.scheduling import Moments, Scheduling, predicted_drop, priority
from entropic_jax.control.temperature import Integral, Normalised
from entropic_jax.pallas.paged_attention import Rules
from entropic_jax.selection import Selection
from tests import tiny

STEPS = 12
HARD = Selection(rules=Rules(sink=1, recent=1, least=0), dense_layers=0)
SOFT = dataclasses.replace(HARD, softness=0.5)
TEXTS = tiny.prompts(60, 52)


@once
def begun(selection: Selection | None) -> Any:
    """A state of two rows that have read all but their last tokens, under no law."""
    m = tiny.model()
    return start(
        m.decoder,
        m.params,
        chain(),
        allocate(m.decoder.shape, 2, 64, page_size=4),
        [t[:-STEPS] for t in TEXTS],
        key=jax.random.key(0),
        max_tokens=STEPS + 1,
        sample=parameters(2, temperature=1.0),
        selection=selection,
    )


@pytest.fixture(autouse=True)
def outside_of_traces():
    for selection in (None, SOFT, HARD):
        begun(selection)


def run(law: Any, selection: Selection | None = None) -> tuple[Any, Any]:
    """The state and the trace of the two rows under a law."""
    m, state = tiny.model(), begun(selection)
    tails = jnp.array([t[-STEPS:] for t in TEXTS], jnp.int32)
    return replay(m.decoder, m.params, law, state._replace(control=law.init(state.action)), tails)


def slopes_agree(
    loss: Any, gains: dict[str, float], width: float = 0.02, rtol: float = 0.03
) -> dict[str, float]:
    """Check the gradient of a loss in each gain; all difference quotients come from one vmapped launch."""
    names = list(gains)
    centre = jnp.array([gains[n] for n in names], jnp.float32)
    whole = lambda vector: loss(dict(zip(names, vector, strict=True)))
    slope = jax.jit(jax.grad(whole))(centre)
    near = width * np.eye(len(names), dtype=np.float32)
    grid = jnp.concatenate([centre + near, centre - near])
    values = np.asarray(jax.jit(jax.vmap(whole))(grid), float)
    numeric = (values[: len(names)] - values[len(names) :]) / (2 * width)
    for name, found, wanted in zip(names, np.asarray(slope), numeric, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=5e-3, err_msg=name)
    return dict(zip(names, np.asarray(slope).tolist(), strict=True))


@pytest.mark.slow
def test_gains_of_temperature():
    weights = jnp.linspace(0.5, 1.5, STEPS)[:, None]

    def loss(given):
        _, trace = run(Integral(**given))
        return (weights * (trace.temperature + trace.tempered_entropy)).mean()

    found = slopes_agree(loss, {"target": 2.0, "rate": 0.1, "lowest": 0.3, "highest": 3.0}, rtol=0.05)
    assert min(abs(found["target"]), abs(found["rate"])) > 1e-3


@pytest.mark.slow
def test_at_a_clip_the_clip_is_what_acts():
    loss = lambda given: run(Integral(**given, rate=5.0))[1].temperature[4:].mean()
    found = slopes_agree(loss, {"target": 0.01, "lowest": 0.9, "highest": 1.1})
    assert found["lowest"] == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_the_gain_of_pruning_through_the_soft_relaxation():
    def loss(given):
        _, trace = run(FixedPruning(**given), SOFT)
        return 10 * trace.surprisal.mean() + 10 * trace.kept_fraction.mean()

    found = slopes_agree(loss, {"drop": 0.4}, rtol=0.1)
    assert abs(found["drop"]) > 1e-3


@pytest.mark.slow
def test_gains_of_the_schedule_where_it_is_smooth():
    gains = {"cost": 0.5, "memory": 0.25, "slack": 0.25, "ageing": 0.05, "bound": 40.0}
    prior = {"mean": 2.0, "scale": 1.5, "correlation": 0.2}
    ages = jnp.array([3, 7], jnp.int32)

    def loss(given):
        moments = Moments(*(given[n] for n in prior))
        law = Scheduling(2, prior=moments, **{n: given[n] for n in gains})
        state, _ = run(law)
        # Of a shorter memory the prior speaks as well.
        seen = state.control.predictor._replace(count=jnp.full(2, 5, jnp.int32))
        drop = predicted_drop(seen, moments)
        return priority(drop, state.control.demand, ages, **{n: given[n] for n in gains}).mean()

    found = slopes_agree(loss, {**gains, **prior}, rtol=0.05)
    assert {n for n, slope in found.items() if abs(slope) > 1e-4} >= {"cost", "slack", "ageing", *prior}


def test_the_hard_choice_of_pages_has_gradient_zero():
    loss = lambda drop: run(FixedPruning(drop), HARD)[1].surprisal.mean()
    assert jax.grad(loss)(jnp.float32(0.4)) == 0


def test_a_grid_of_gains_in_one_launch_equals_launches_one_by_one():
    entropy = lambda target: run(Normalised(target=target))[1].tempered_entropy
    targets = jnp.array([0.5, 1.5, 3.0])
    together = jax.jit(jax.vmap(entropy))(targets)
    for one, target in zip(together, targets, strict=True):
        np.testing.assert_allclose(one, entropy(target), rtol=2e-4, atol=2e-4)
    assert np.diff(np.asarray(together)[:, -4:].mean((1, 2))).min() > 0  # a higher target, a higher entropy
