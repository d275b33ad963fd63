"""The Dirichlet sampler: formulas against float64, the fit against its equations, and the law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import digamma

from entropic_jax import entropy
from entropic_jax.methods import dslider
from entropic_jax.sampling.randomness import row_keys
from entropic_jax.state import plain_action, quiet_signal
from tests import tiny

ALPHAS = [(1.0, 1.0), (0.3, 2.0, 5.0), (4.0, 0.5, 0.5, 1.5), (20.0, 30.0, 50.0)]


def draws(alpha, count: int = 400_000) -> np.ndarray:
    x = np.random.default_rng(0).dirichlet(alpha, count)
    return np.maximum(x, 1e-300)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_expected_entropy_and_varentropy(alpha):
    x = draws(alpha)
    each = -(x * np.log(x)).sum(-1)
    spread = (x * np.log(x) ** 2).sum(-1) - each**2
    fitted = jnp.asarray(alpha, jnp.float32)
    np.testing.assert_allclose(dslider.expected_entropy(fitted), each.mean(), atol=5 * each.std() / 600)
    np.testing.assert_allclose(
        dslider.expected_varentropy(fitted), spread.mean(), atol=5 * spread.std() / 600
    )


@pytest.mark.parametrize("alpha", ALPHAS[1:])
def test_the_density_integrates_to_one_and_has_the_gradient_of_its_moments(alpha):
    """By importance sampling from a uniform Dirichlet; and d ln Z/dα = E[ln x]."""
    n = len(alpha)
    x = draws(np.ones(n))
    even = np.log(float(np.prod(range(1, n))))  # ln (n − 1)!, its density
    weight = np.exp(
        np.asarray(dslider.log_density(jnp.log(jnp.asarray(x, jnp.float32)), jnp.asarray(alpha))) - even
    )
    np.testing.assert_allclose(weight.mean(), 1, atol=6 * weight.std() / 600)
    at = jnp.asarray(alpha, jnp.float32)
    slope = jax.grad(lambda a: dslider.log_density(jnp.zeros(n), a))(at)
    np.testing.assert_allclose(-slope, np.log(draws(alpha)).mean(0), rtol=2e-2, atol=2e-2)


def test_trigamma_is_the_derivative_of_digamma():
    x = jnp.asarray([0.02, 0.3, 1.0, 2.5, 9.0, 120.0], jnp.float32)
    np.testing.assert_allclose(dslider.trigamma(x), jax.scipy.special.polygamma(1, x), rtol=2e-6)


def test_slopes_of_the_entropy_against_differences_in_float64():
    z = np.random.default_rng(1).standard_normal(50) * 2

    def at(t: float) -> float:
        p = np.exp(z / t - (z / t).max())
        p /= p.sum()
        return float(-(p * np.log(p)).sum())

    for t in (0.5, 1.0, 1.7):
        first, second = dslider.entropy_slopes(jnp.asarray(z, jnp.float32), jnp.float32(t))
        h = 1e-3
        np.testing.assert_allclose(first, (at(t + h) - at(t - h)) / (2 * h), rtol=1e-4)
        np.testing.assert_allclose(second, (at(t + h) - 2 * at(t) + at(t - h)) / h**2, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [3, 40])
def test_the_fit_solves_its_equations_and_finds_what_was_drawn_from(size):
    rng = np.random.default_rng(size)
    alpha = rng.gamma(1.0, 2.0, (2, size)) + 0.2
    log_mean = np.stack([np.log(np.maximum(rng.dirichlet(a, 50_000), 1e-30)).mean(0) for a in alpha])
    target = jnp.asarray(log_mean, jnp.float32)
    fitted = dslider.fit(target, jnp.ones((2, size)), iterations=60)
    residual = digamma(fitted) - digamma(fitted.sum(-1, keepdims=True)) - target
    np.testing.assert_allclose(residual, 0, atol=1e-3)
    np.testing.assert_allclose(fitted, alpha, rtol=0.1)
    # From close by, as from step to step, three iterations are enough.
    near = dslider.fit(target, fitted * 1.1)
    np.testing.assert_allclose(near, fitted, rtol=2e-2)


def test_a_single_distribution_is_fitted_by_a_finite_alpha():
    log_p = jax.nn.log_softmax(jnp.asarray([[3.0, 1.0, 0.0, -20.0]]))
    fitted = dslider.fit(log_p, jnp.ones((1, 4)), iterations=100)
    assert np.isfinite(fitted).all() and (fitted > 0).all()
    np.testing.assert_allclose((fitted / fitted.sum())[0, :2], jnp.exp(log_p[0, :2]), rtol=0.1)


def signal(logits: np.ndarray, step: int = 0):
    rows = len(logits)
    return quiet_signal(rows)._replace(
        emitting=jnp.ones(rows, bool),
        logits=jnp.asarray(logits, jnp.float32),
        key=row_keys(jax.random.key(0), jnp.arange(rows), jnp.full(rows, step)),
    )


def undecided(rows: int, temperature: float = 1.0):
    return plain_action(jnp.full(rows, temperature))._replace(token=jnp.full(rows, -1))


def test_running_means_begin_with_what_is_seen_and_follow_it():
    law = dslider.DSlider(vocabulary=8)
    state, update = law.init(undecided(1)), jax.jit(law.update)
    rng = np.random.default_rng(0)
    entropies = []
    for step in range(5):
        logits = rng.standard_normal((1, 8)).astype(np.float32)
        entropies.append(float(entropy.entropy_statistics(jnp.asarray(logits)).entropy[0]))
        _, state = update(signal(logits, step), undecided(1), state)
    want = entropies[0]
    for value in entropies[1:]:
        want = 0.15 * value + 0.85 * want
    np.testing.assert_allclose(state.entropy[0], want, rtol=1e-5)
    assert int(state.seen[0]) == 5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert float(state.surprisal_variance[0]) >= 0


def test_an_even_stream_is_taken_from_the_head_and_a_burst_is_brought_to_its_target():
    law = dslider.DSlider(vocabulary=64)
    state, update = law.init(undecided(200)), jax.jit(law.update)
    sharp = np.zeros((200, 64), np.float32)
    sharp[:, 5] = 6.0
    for step in range(6):
        action, state = update(signal(sharp, step), undecided(200), state)
        assert (np.asarray(action.token) == 5).all()
    flat = 0.3 * np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32).repeat(200, 0)
    action, after = update(signal(flat, 9), undecided(200), state)
    levels = state.surprisal + state.adapted_surprisal + state.entropy + state.adapted_entropy
    goal = 0.15 * levels + 1.2 / state.temperature + 0.1
    reached = entropy.at_temperature(jnp.asarray(flat), action.temperature).entropy
    np.testing.assert_allclose(reached, goal, atol=2e-3)
    assert len(set(np.asarray(action.token).tolist())) > 3
    assert float(after.entropy[0]) > float(state.entropy[0])


def test_the_pull_towards_the_mean_fades_with_the_divergence():
    base, factor = dslider.DSlider(vocabulary=4).pull
    near, far = (1 - base ** (-factor / gap) for gap in (0.01, 5.0))
    assert 0 <= far < 0.1 < 0.9 < near <= 1


@pytest.mark.slow
def test_greedy_rows_are_left_alone_and_generation_is_reproducible():
    law = dslider.DSlider(vocabulary=96)
    texts = tiny.prompts(9, 14)
    outs = [
        tiny.finish(tiny.begin(texts, controller=law), steps=steps, controller=law)[0] for steps in (64, 5)
    ]
    assert outs[0] == outs[1]
    plain, _, _ = tiny.finish(tiny.begin(texts, temperature=0.0))
    assert tiny.finish(tiny.begin(texts, controller=law, temperature=0.0), controller=law)[0] == plain
    short = dslider.DSlider(vocabulary=96, support=32)
    out, _, _ = tiny.finish(tiny.begin(texts, controller=short), controller=short)
    assert all(len(text) == 20 for text in out)
