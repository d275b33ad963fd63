"""Cutoffs that depend on the entropy of what is left, and XTC, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.sampling import parameters, sample, truncate

ROWS, VOCABULARY = 6, 97
OFF = dict(epsilon_cutoff=0.0, eta_cutoff=0.0, top_h=1.0, xtc_probability=0.0)


def logits_of(seed: int) -> np.ndarray:
    """Rows from nearly certain to nearly even, with ties and masked tokens."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((ROWS, VOCABULARY)) * np.linspace(0.2, 8, ROWS)[:, None]
    logits[:, 5] = logits[:, 7]
    logits[1, ::3] = -np.inf
    return logits.astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.float64(logits) - np.float64(logits).max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def kept(logits: np.ndarray, chance: float | None = None, **values: float) -> np.ndarray:
    drawn = None if chance is None else jnp.full(len(logits), chance)
    return np.isfinite(np.asarray(truncate(jnp.asarray(logits), parameters(len(logits), **values), drawn)))


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.6, 0.95])
def test_top_h_keeps_the_likeliest_tokens_whose_entropy_is_within_the_bound(fraction):
    logits = logits_of(0)
    actual, p = kept(logits, top_h=fraction), softmax(logits)
    for row in range(ROWS):
        expected, limit = p[row] == p[row].max(), fraction * entropy(p[row])
        for least in np.unique(p[row])[::-1]:
            inside = p[row] >= least
            if least == 0 or entropy(p[row][inside] / p[row][inside].sum()) > limit:
                break
            expected = inside
        np.testing.assert_array_equal(actual[row], expected)
    assert fraction < 0.3 or 1 <= actual.sum(1).min() < actual.sum(1).max()


@pytest.mark.parametrize("eta", [0.001, 0.01, 0.2])
def test_eta_keeps_less_likely_tokens_where_the_entropy_is_high(eta):
    logits = logits_of(1)
    p = softmax(logits)
    least = np.array([min(eta, np.sqrt(eta) * np.exp(-entropy(row))) for row in p])
    expected = (p >= least[:, None]) | (p == p.max(1, keepdims=True))
    np.testing.assert_array_equal(kept(logits, eta_cutoff=eta), expected)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.1, 0.5])
def test_xtc_leaves_out_all_choices_but_the_least_likely(threshold):
    logits = logits_of(2)
    p = softmax(logits)
    values = dict(xtc_probability=0.5, xtc_threshold=threshold)
    for row in range(ROWS):
        choices = (p[row] >= threshold) & (p[row] > 0)
        expected = np.isfinite(logits[row])
        if choices.any():
            expected &= p[row] <= p[row][choices].min()
        np.testing.assert_array_equal(kept(logits, 0.49, **values)[row], expected)
    np.testing.assert_array_equal(kept(logits, 0.5, **values), np.isfinite(logits))
    np.testing.assert_array_equal(kept(logits, **values), np.isfinite(logits))


def test_cutoffs_take_what_the_filters_before_them_leave():
    logits = logits_of(3)
    first = dict(top_k=40, typical_p=0.9)
    left = np.where(kept(logits, **first), logits, -np.inf)
    for later in (dict(epsilon_cutoff=0.02), dict(eta_cutoff=0.05), dict(top_h=0.5)):
        np.testing.assert_array_equal(kept(logits, **first, **later), kept(left, **later))
    later = dict(xtc_probability=1.0, xtc_threshold=0.02)
    np.testing.assert_array_equal(kept(logits, 0.0, **first, **later), kept(left, 0.0, **later))


def test_rows_that_ask_for_nothing_are_left_alone():
    logits = logits_of(4)
    requested = dict(epsilon_cutoff=0.1, eta_cutoff=0.1, top_h=0.3, xtc_probability=1.0)
    for name, value in requested.items():
        values = [OFF[name]] * (ROWS - 1) + [value]
        actual = np.asarray(
            truncate(
                jnp.asarray(logits), parameters(ROWS, xtc_threshold=1e-4, **{name: values}), jnp.zeros(ROWS)
            )
        )
        np.testing.assert_array_equal(actual[:-1], logits[:-1])
        assert np.isneginf(actual[-1]).sum() > np.isneginf(logits[-1]).sum()


def test_xtc_acts_as_often_as_it_is_asked_to_and_by_seed_and_position_alone():
    logits = np.full((ROWS, 8), -20.0, np.float32)
    logits[:, 2], logits[:, 3] = 1.0, 0.0  # two choices: 0.73 and 0.27
    share = np.float32([0.0, 0.1, 0.3, 0.6, 0.9, 1.0])
    params = parameters(ROWS, xtc_probability=share.tolist())

    @jax.jit
    def draw(position, seed):
        places = seed, jnp.full(ROWS, position)
        return sample(jnp.asarray(logits), params, jnp.ones(ROWS), jax.random.key(5), *places)

    seeds = jnp.arange(ROWS)
    tokens = np.asarray(jax.lax.map(lambda position: draw(position, seeds), jnp.arange(4000)))
    p = 1 / (1 + np.exp(-1.0))
    expected = (1 - share) * p  # of the likelier one
    error = 4 * np.sqrt(0.25 / len(tokens))
    np.testing.assert_allclose((tokens == 2).mean(0), expected, atol=error)
    same = jnp.full(ROWS, 3)
    alike = np.asarray(draw(17, same))
    assert (alike == np.asarray(draw(17, same))).all()
    assert (
        np.asarray(sample(jnp.asarray(logits), params, jnp.zeros(ROWS), jax.random.key(5), same, same)) == 2
    ).all()
