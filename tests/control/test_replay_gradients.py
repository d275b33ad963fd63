"""`replay` differentiated with respect to gains, against difference quotients of the same launch."""

import dataclasses
from functools import cache as once
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, parameters, replay, start
from entropic_jax.attention.page_selection import Selection
from entropic_jax.control import chain
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.control.temperature import Integral, Normalised
from entropic_jax.pallas.paged_attention import SelectionRules
from tests import tiny

STEPS = 12
HARD = Selection(rules=SelectionRules(sink_pages=1, recent_pages=1, min_pages=0), dense_layers=0)
SOFT = dataclasses.replace(HARD, softness=0.5)
TEXTS = tiny.prompts(60, 52)


@once
def begun(page_policy: Selection | None, head_dim: int) -> Any:
    """A state of two rows, prefilled up to their last tokens, without a law."""
    m = tiny.model(head_dim=head_dim)
    return start(
        m.decoder,
        m.params,
        chain(),
        allocate(m.decoder.shape, 2, 64, page_size=4 if head_dim < 128 else 8),
        [t[:-STEPS] for t in TEXTS],
        key=jax.random.key(0),
        max_tokens=STEPS + 1,
        sample=parameters(2, temperature=1.0),
        page_policy=page_policy,
    )


@pytest.fixture(autouse=True)
def outside_of_traces():
    for page_policy in (None, SOFT, HARD):
        begun(page_policy, 8)


def run(law: Any, page_policy: Selection | None = None, head_dim: int = 8) -> tuple[Any, Any]:
    """The state and the trace of the two rows under a law."""
    m, state = tiny.model(head_dim=head_dim), begun(page_policy, head_dim)
    tails = jnp.array([t[-STEPS:] for t in TEXTS], jnp.int32)
    return replay(m.decoder, m.params, law, state._replace(control=law.init(state.action)), tails)


def slopes_agree(
    loss: Any, gains: dict[str, float], width: float = 0.02, rtol: float = 0.03
) -> dict[str, float]:
    """Check the gradient of a loss in each gain; all difference quotients come from the same launch."""
    program = with_slopes(loss, tuple(gains))
    return quotients_agree(program, np.array([*gains.values()]), dict(enumerate(gains)), width, rtol)


def with_slopes(loss: Any, names: tuple[str, ...]) -> Any:
    """A loss and its gradient at many points `[points, names]` in one launch."""
    loss_of = lambda vector: loss(dict(zip(names, vector, strict=True)))
    return jax.jit(jax.vmap(jax.value_and_grad(loss_of)))


def quotients_agree(
    program: Any, centre: np.ndarray, names: dict[int, str], width: float, rtol: float, points: int = 0
) -> dict[str, float]:
    """Check the slopes of a program of `with_slopes` at `places`, in one launch."""
    near = width * np.eye(len(centre))[list(names)]
    grid = np.concatenate([centre[None], centre + near, centre - near])
    grid = np.pad(grid, ((0, max(0, points - len(grid))), (0, 0)), "edge").astype(np.float32)
    values, slopes = (np.asarray(x, float) for x in program(grid))
    above, below = np.split(values[1 : 1 + 2 * len(names)], 2)
    numeric = (above - below) / (2 * width)
    slopes_found = dict(zip(names.values(), slopes[0, list(names)].tolist(), strict=True))
    for (name, slope), expected in zip(slopes_found.items(), numeric, strict=True):
        np.testing.assert_allclose(slope, expected, rtol=rtol, atol=5e-3, err_msg=name)
    return slopes_found


@pytest.mark.slow
def test_at_a_clip_the_clip_is_what_acts():
    loss = lambda gains: run(Integral(**gains, rate=5.0))[1].temperature[4:].mean()
    slopes_found = slopes_agree(
        loss, {"target_entropy": 0.01, "lowest_temperature": 0.9, "highest_temperature": 1.1}
    )
    assert slopes_found["lowest_temperature"] == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_the_gain_of_pruning_through_the_soft_relaxation():
    def loss(gains):
        _, trace = run(FixedPruning(**gains), SOFT)
        return 10 * trace.surprisal.mean() + 10 * trace.kept_fraction.mean()

    slopes_found = slopes_agree(loss, {"dropped_mass_limit": 0.4}, rtol=0.1)
    assert abs(slopes_found["dropped_mass_limit"]) > 1e-3


MARKS = {"cpu": pytest.mark.slow, "xla": pytest.mark.exhaustive, "interpret": pytest.mark.exhaustive}


@pytest.mark.parametrize("kernels", [pytest.param(name, marks=mark) for name, mark in MARKS.items()])
def test_forward_mode_has_the_slopes_of_reverse_mode(kernels, monkeypatch):
    interpreted = kernels == "interpret"
    head_dim = 128 if interpreted else 8  # which the kernels for TPU ask for
    begun(SOFT, head_dim)
    monkeypatch.setenv("ENTROPIC_KERNELS", kernels)
    jax.clear_caches()  # the programs of another back end would serve

    def loss(gains):
        law = chain(Normalised(gains[0], highest_temperature=2.0), FixedPruning(gains[1]))
        _, trace = run(law, SOFT, head_dim)
        return jnp.stack([trace.surprisal.mean(), trace.tempered_entropy.mean(), trace.kept_fraction.mean()])

    def slopes(gains):
        if not interpreted:
            return jax.jacfwd(loss)(gains), jax.jacrev(loss)(gains)
        # The interpreter's callbacks are ordered, so `vmap`, on which both rest, does not support them.
        along = lambda direction: jax.jvp(loss, (gains,), (direction,))[1]
        pull = jax.vjp(loss, gains)[1]
        return jax.lax.map(along, jnp.eye(2)).T, jax.lax.map(lambda unit: pull(unit)[0], jnp.eye(3))

    gains = jnp.array([2.5, 0.4])
    forward, reverse = jax.jit(slopes)(gains)
    np.testing.assert_allclose(forward, reverse, rtol=1e-3, atol=1e-5)
    assert (np.abs(forward[[0, 1, 2], [1, 0, 1]]) > 1e-4).all(), "through attention, temperature and pages"
    if kernels == "cpu":
        value, tangent = jax.jit(lambda x: jax.jvp(loss, (x,), (jnp.ones(2),)))(gains)
        np.testing.assert_allclose(value, jax.jit(loss)(gains), rtol=1e-5)
        np.testing.assert_allclose(tangent, forward.sum(1), rtol=1e-3, atol=1e-5)


def test_the_hard_choice_of_pages_has_gradient_zero():
    loss = lambda drop: run(FixedPruning(drop), HARD)[1].surprisal.mean()
    assert jax.grad(loss)(jnp.float32(0.4)) == 0


def test_a_grid_of_gains_in_one_launch_equals_launches_one_by_one():
    entropy = lambda target: run(Normalised(target_entropy=target))[1].tempered_entropy
    targets = jnp.array([0.5, 1.5, 3.0])
    together = jax.jit(jax.vmap(entropy))(targets)
    for single, target in zip(together, targets, strict=True):
        np.testing.assert_allclose(single, entropy(target), rtol=2e-4, atol=2e-4)
    assert np.diff(np.asarray(together)[:, -4:].mean((1, 2))).min() > 0  # a higher target, a higher entropy
