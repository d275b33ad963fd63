"""Entropy and its estimators against float64 in NumPy, and the inequalities of the bounds."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from entropic_jax import entropy

ROWS, VOCABULARY = 5, 67

entropy_statistics = jax.jit(entropy.entropy_statistics)
at_temperature = jax.jit(entropy.at_temperature)
surrogate = jax.jit(entropy.surrogate)


@partial(jax.jit, static_argnames="k")
def estimators(logits, k):
    head = entropy.top_k_summary(logits, k)
    middle = entropy.midpoint(head)
    return dict(
        truncated=entropy.truncated(head),
        tail_corrected=entropy.tail_corrected(head),
        upper=entropy.upper_bound(head),
        lower=entropy.lower_bound(head),
        middle=middle.entropy,
        error=middle.error,
        surrogate=entropy.surrogate(logits),
        head=head,
    )


def exact(logits, temperature=1.0) -> entropy.EntropyStatistics:
    """Entropies in float64, with 0 · ln 0 = 0."""
    z = np.asarray(logits, np.float64) / temperature
    highest = z.max(-1, keepdims=True)
    normaliser = highest[..., 0] + np.log(np.exp(z - highest).sum(-1))
    log_p = z - normaliser[..., None]
    p = np.exp(log_p)
    information = np.where(p > 0, -log_p, 0.0)
    mean = (p * information).sum(-1)
    variance = (p * (information - mean[..., None]) ** 2).sum(-1)
    return entropy.EntropyStatistics(normaliser, mean, variance)


def zipf(exponent: float, vocabulary: int = VOCABULARY) -> np.ndarray:
    return -exponent * np.log(np.arange(1, vocabulary + 1))


def random_logits(seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((ROWS, VOCABULARY))).astype(np.float32)


def assert_entropies_equal(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(actual.log_normaliser, expected.log_normaliser, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(actual.entropy, expected.entropy, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(actual.varentropy, expected.varentropy, rtol=2 * tolerance, atol=2 * tolerance)


finite_or_masked = st.one_of(
    st.floats(-50, 50, width=32, allow_subnormal=False), st.just(-np.inf), st.just(0.0)
)
rows_of_logits = arrays.arrays(np.float32, (ROWS, VOCABULARY), elements=finite_or_masked).map(
    lambda a: np.where(np.isneginf(a).all(1, keepdims=True), 0, a).astype(np.float32)
)

# The exact measure.


@settings(max_examples=60)
@given(rows_of_logits)
def test_measure_is_exact_and_within_its_range(logits):
    actual = entropy_statistics(logits)
    assert_entropies_equal(actual, exact(logits), 3e-5)
    assert (np.asarray(actual.entropy) >= 0).all()
    assert (np.asarray(actual.entropy) <= math.log(VOCABULARY) * (1 + 1e-6)).all()
    assert (np.asarray(actual.varentropy) >= 0).all()


@settings(max_examples=30)
@given(rows_of_logits, st.floats(-100, 100, width=32), st.randoms(use_true_random=False))
def test_a_shift_and_a_permutation_change_nothing(logits, shift, random):
    order = random.sample(range(VOCABULARY), VOCABULARY)
    # Quarters are exact in float32 whatever is added here.
    logits, shift = np.round(logits * 4) / 4, np.float32(np.round(shift * 4) / 4)
    actual, shifted, permuted = (
        entropy_statistics(logits),
        entropy_statistics(logits + shift),
        entropy_statistics(logits[:, order]),
    )
    assert_entropies_equal(shifted._replace(log_normaliser=shifted.log_normaliser - shift), actual, 2e-5)
    assert_entropies_equal(permuted, actual, 1e-5)


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_extremes(offset):
    logits = np.full((ROWS, VOCABULARY), offset, np.float32)
    logits[1, 1:] = -np.inf  # one-hot by masking
    logits[2, 1:] = offset - 300  # one-hot by underflow
    logits[3, 2:] = -np.inf  # a fair coin
    logits[4, 1:] = -3e38
    actual = entropy_statistics(logits)
    np.testing.assert_allclose(actual.entropy, [math.log(VOCABULARY), 0, 0, math.log(2), 0], rtol=1e-6)
    np.testing.assert_allclose(actual.varentropy, 0, atol=1e-6)


def test_what_is_no_distribution_is_nan_in_its_row_alone():
    logits = random_logits()
    expected = entropy_statistics(logits)
    logits[1, 3], logits[2], logits[3, 0] = np.nan, -np.inf, np.inf
    for actual in (
        entropy_statistics(logits),
        at_temperature(logits, jnp.ones(ROWS)),
        at_temperature(logits, jnp.array([1.0, 0.0, 0.0, 0.0, 1.0])),
    ):
        np.testing.assert_array_equal(np.isnan(actual.entropy), [False, True, True, True, False])
        np.testing.assert_array_equal(
            np.asarray(actual.entropy)[[0, 4]], np.asarray(expected.entropy)[[0, 4]]
        )
    negative = np.copysign(np.float32(np.nan), np.float32(-1))  # the NaN that x86 makes, which sorts last
    for nan in (np.float32(np.nan), negative):
        logits = random_logits()
        logits[1, 3] = nan
        actual = estimators(logits, 7)
        for name in ("truncated", "tail_corrected", "upper", "lower", "middle", "error", "surrogate"):
            np.testing.assert_array_equal(np.isnan(actual[name]), np.arange(ROWS) == 1, err_msg=name)


def test_half_precision_is_summed_in_float32():
    logits = jnp.asarray(random_logits(), jnp.bfloat16)
    actual = entropy_statistics(logits)
    assert actual.entropy.dtype == jnp.float32
    assert_entropies_equal(actual, exact(np.asarray(logits, np.float32)))


def test_any_leading_axes_and_vmap():
    logits = random_logits()
    expected = entropy_statistics(logits)
    for actual in (
        jax.vmap(entropy_statistics)(logits),
        jax.tree.map(lambda x: x[0], entropy_statistics(logits[None])),
    ):
        assert_entropies_equal(actual, expected, 1e-6)
    assert entropy_statistics(logits[0]).entropy.shape == ()


# At a temperature.


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0, 1e4])
def test_tempered_entropy(temperature):
    logits = random_logits(1)
    logits[:, ::5] = -np.inf
    actual = at_temperature(logits, jnp.full(ROWS, temperature))
    assert_entropies_equal(actual, exact(logits, temperature), 3e-5)


def test_temperature_zero_is_greedy_and_one_is_measure():
    logits = np.zeros((ROWS, VOCABULARY), np.float32)  # all tied, of which greedy takes the first
    actual = at_temperature(logits, jnp.array([0.0, 1.0, 1e-12, 0.0, 1.0]))
    np.testing.assert_array_equal(np.asarray(actual.entropy)[[0, 3]], 0)
    np.testing.assert_array_equal(np.asarray(actual.varentropy)[[0, 3]], 0)
    np.testing.assert_allclose(np.asarray(actual.entropy)[[1, 2, 4]], math.log(VOCABULARY), rtol=1e-6)
    logits = random_logits(2)
    assert_entropies_equal(at_temperature(logits, jnp.ones(ROWS)), entropy_statistics(logits), 1e-6)
    assert_entropies_equal(entropy.at_temperature(jnp.asarray(logits), 1.0), entropy_statistics(logits), 1e-6)


def test_the_slope_of_entropy_is_varentropy():
    """dH/d ln T = V_T."""
    logits = random_logits(3)
    logits[:, ::7] = -np.inf
    temperature = jnp.array([0.2, 0.6, 1.0, 2.0, 5.0])
    total = lambda log_temperature: at_temperature(logits, jnp.exp(log_temperature)).entropy.sum()
    slope = jax.grad(total)(jnp.log(temperature))
    np.testing.assert_allclose(slope, at_temperature(logits, temperature).varentropy, rtol=1e-4, atol=1e-5)


@jax.jit
def slope(logits, log_temperature):
    """dH/d ln T by automatic differentiation, `[rows]`."""
    total = lambda x: entropy.at_temperature(logits, jnp.exp(x)).entropy.sum()
    return jax.grad(total)(log_temperature)


@settings(max_examples=40)
@given(rows_of_logits, st.floats(0.125, 10, width=32))
def test_the_slope_of_entropy_is_varentropy_of_any_logits(logits, temperature):
    actual = slope(logits, jnp.full(ROWS, np.log(temperature), jnp.float32))
    expected = exact(logits, temperature).varentropy
    # What rounds is Σ p d², of which the variance is a part.
    scale = 1 + (logits.max() - np.where(np.isneginf(logits), 0, logits).min()) / temperature
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6 * scale**2)


def test_gradients_are_finite():
    logits = random_logits(4)
    logits[0, 1:] = -np.inf
    logits[1, ::2] = -np.inf
    logits[2, 0] = 400
    logits[3] = 0
    logits[4, 1:] = -3e38
    totals = lambda *arguments: jnp.stack([field.sum() for field in entropy.at_temperature(*arguments)])
    slopes = jax.jit(jax.jacrev(totals, (0, 1)))
    for temperature in (0.0, 1e-20, 1e-3, 1.0):
        for slope in slopes(jnp.asarray(logits), jnp.full(ROWS, temperature)):
            assert np.isfinite(slope).all(), temperature
    totals = lambda logits: jnp.stack([field.sum() for field in entropy.entropy_statistics(logits)])
    assert np.isfinite(jax.jit(jax.jacrev(totals))(jnp.asarray(logits))).all()


def test_the_gradient_of_entropy_is_its_formula():
    """dH/dz = −p (ln p + H)."""
    logits = random_logits(5)
    slope = jax.grad(lambda logits: entropy_statistics(logits).entropy.sum())(jnp.asarray(logits))
    belief = exact(logits)
    log_p = logits - belief.log_normaliser[:, None]
    np.testing.assert_allclose(slope, -np.exp(log_p) * (log_p + belief.entropy[:, None]), atol=2e-6)


def test_surprisal():
    logits = random_logits(6)
    logits[1, 4] = -np.inf
    token = jnp.array([0, 4, 2, int(logits[3].argmax()), VOCABULARY - 1])
    actual = entropy.surprisal(jnp.asarray(logits), token, entropy_statistics(logits).log_normaliser)
    expected = exact(logits).log_normaliser - logits[np.arange(ROWS), token]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert (np.asarray(actual) >= 0).all()
    certain = jnp.array([0.0, -200.0])
    assert entropy.surprisal(certain, jnp.array(0), entropy.entropy_statistics(certain).log_normaliser) == 0


# The surrogate.


@settings(max_examples=40)
@given(rows_of_logits)
def test_the_surrogate_is_the_information_of_the_likeliest(logits):
    actual, true = np.asarray(surrogate(logits)), exact(logits)
    np.testing.assert_allclose(actual, true.log_normaliser - logits.max(-1), rtol=1e-5, atol=1e-5)
    assert (actual >= 0).all()
    assert (actual <= true.entropy + 2e-5).all()


def test_the_surrogate_is_exact_for_uniform_and_one_hot_distributions():
    logits = np.full((3, VOCABULARY), 1e4, np.float32)
    logits[1, 1:] = -np.inf
    logits[2, 2:] = -np.inf
    np.testing.assert_allclose(surrogate(logits), [math.log(VOCABULARY), 0, math.log(2)], rtol=1e-6)
    bad = random_logits()
    bad[1, 3], bad[2], bad[3, 0] = np.nan, -np.inf, np.inf
    np.testing.assert_array_equal(np.isnan(surrogate(bad)), [False, True, True, True, False])


# Bounds from the head.


def adversarial() -> np.ndarray:
    """Heads with uniform tails, most concentrated tails, ties across the cut, masks, one-hot, and Zipf."""
    rng = np.random.default_rng(7)
    rows = [zipf(exponent) for exponent in (0.0, 0.5, 0.8, 1.0, 1.5, 3.0, 10.0)]
    for head, tail in ((5.0, 0.0), (0.5, 0.0), (20.0, 0.0), (100.0, 0.0), (1e-3, 0.0)):
        rows.append(
            np.where(np.arange(VOCABULARY) < 7, head, tail)
        )  # uniform tail: the upper bound is reached
    for capped in (8, 9, 20):
        rows.append(
            np.where(np.arange(VOCABULARY) < capped, 0.0, -np.inf)
        )  # concentrated: the lower bound is
        rows.append(np.where(np.arange(VOCABULARY) < capped, 0.0, -30.0))
    rows.append(np.where(np.arange(VOCABULARY) == 0, 0.0, -np.inf))
    rows.append(np.where(np.arange(VOCABULARY) < 3, 0.0, -np.inf))  # fewer tokens than the head holds
    rows.extend(scale * rng.standard_normal(VOCABULARY) for scale in (0.1, 1, 3, 10, 40))
    return np.stack([rng.permutation(row) for row in rows]).astype(np.float32)


def check_bounds(logits, k):
    actual, true = estimators(logits, k), exact(logits).entropy
    lower, upper, slack = np.asarray(actual["lower"]), np.asarray(actual["upper"]), 2e-5
    assert (lower <= true + slack).all()
    assert (upper >= true - slack).all()
    assert (upper <= math.log(VOCABULARY) + slack).all()
    assert (lower >= actual["truncated"] - slack).all()
    assert (actual["tail_corrected"] >= upper - slack).all()
    assert (np.abs(true - actual["middle"]) <= actual["error"] + slack).all()
    np.testing.assert_allclose(actual["head"].head_mass + actual["head"].tail_mass, 1, rtol=1e-6)
    return actual, true


@pytest.mark.parametrize("k", [1, 7, 30, VOCABULARY])
def test_bounds_hold_for_adversarial_families(k):
    actual, true = check_bounds(adversarial(), k)
    if k == VOCABULARY:
        np.testing.assert_allclose(actual["error"], 0, atol=1e-5)
        for name in ("truncated", "tail_corrected", "middle"):
            np.testing.assert_allclose(actual[name], true, atol=1e-5)


@settings(max_examples=60)
@given(rows_of_logits, st.sampled_from([1, 7, 30]))
def test_bounds_hold(logits, k):
    check_bounds(logits, k)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 8), st.floats(0.05, 50)), min_size=ROWS, max_size=ROWS),
    st.sampled_from([1, 7, 30]),
    st.randoms(use_true_random=False),
)
def test_bounds_hold_for_zipf_families(laws, k, random):
    """Zipf–Mandelbrot: p ∝ (rank + offset)^−exponent, in any order."""
    order = random.sample(range(VOCABULARY), VOCABULARY)
    rank = np.arange(1, VOCABULARY + 1)[order]
    check_bounds(np.stack([-s * np.log(rank + offset) for s, offset in laws]).astype(np.float32), k)


def test_bounds_are_reached():
    """A uniform tail reaches the upper one, and a tail of as few tokens as p_k allows the lower one."""
    uniform = np.where(np.arange(VOCABULARY) < 7, 2.0, 0.0).astype(np.float32)
    concentrated = np.where(np.arange(VOCABULARY) < 12, 0.0, -np.inf).astype(np.float32)
    concentrated[12] = math.log(0.4)
    logits = np.stack([uniform, concentrated])
    actual, true = estimators(logits, 7), exact(logits).entropy
    np.testing.assert_allclose(actual["upper"][0], true[0], rtol=1e-5)
    np.testing.assert_allclose(actual["lower"][1], true[1], rtol=1e-5)


def test_bounds_are_those_of_the_formula():
    logits = random_logits(8)
    k = 7
    actual = estimators(logits, k)
    p = np.sort(np.exp(logits - exact(logits).log_normaliser[:, None]))[:, ::-1]
    term = lambda x: np.where(x > 0, -x * np.log(np.where(x > 0, x, 1)), 0)
    m, rest = p[:, :k].sum(1), p[:, k:].sum(1)
    truncated = term(p[:, :k] / m[:, None]).sum(1)
    split, flat = term(m) + term(rest), rest * math.log(VOCABULARY - k)
    cap = np.minimum(1, p[:, k - 1] / rest)
    count = np.floor(1 / cap)
    lowest = count * term(cap) + term(1 - count * cap)
    expected = dict(
        truncated=truncated,
        tail_corrected=truncated + split + flat,
        upper=split + m * truncated + flat,
        lower=split + m * truncated + rest * lowest,
    )
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=2e-5, err_msg=name)


def test_the_printed_estimator_exceeds_the_largest_possible_entropy():
    """The example of the docstring: Zipf 0.8, 128256 tokens, k = 50."""
    logits = jnp.asarray(zipf(0.8, 128_256), jnp.float32)
    head = entropy.top_k_summary(logits, 50)
    assert round(float(entropy.tail_corrected(head)), 2) == 14.05
    assert round(float(entropy.entropy_statistics(logits).entropy), 2) == 10.20
    assert round(math.log(128_256), 2) == 11.76
    assert entropy.lower_bound(head) < 10.20 < entropy.upper_bound(head) < 11.76


def test_estimators_have_finite_gradients():
    names = ("truncated", "tail_corrected", "upper", "lower", "middle", "error", "surrogate")
    totals = lambda logits: jnp.stack([estimators(logits, 7)[name].sum() for name in names])
    slopes = jax.jit(jax.jacrev(totals))(jnp.asarray(adversarial()))
    for name, slope in zip(names, slopes, strict=True):
        assert np.isfinite(slope).all(), name


@pytest.mark.parametrize("k", [0, VOCABULARY + 1])
def test_k_outside_the_vocabulary_is_refused(k):
    with pytest.raises(
        ValueError, match=f"k must be between 1 and {VOCABULARY}, the size of the vocabulary; got {k}"
    ):
        entropy.top_k_summary(jnp.zeros(VOCABULARY), k)
