"""Mixture of experts: all implementations agree with the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.models.block_spec import RouterSpec
from entropic_jax.models.experts import (
    ExpertRule,
    Projections,
    _combine,
    _sort_by_expert,
    expert_sum,
    gate_product,
)
from entropic_jax.models.router import Router, exponential, sigmoid, softmax

EXPERTS, HIDDEN, INNER, CHOICES = 5, 8, 12, 2


def inputs(tokens: int, spread: float = 1.0):
    random = np.random.default_rng(tokens)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    kernels = normal(EXPERTS, HIDDEN, INNER), normal(EXPERTS, HIDDEN, INNER), normal(EXPERTS, INNER, HIDDEN)
    preference = normal(tokens, EXPERTS) * spread + jnp.arange(EXPERTS, dtype=jnp.float32) * (1.0 - spread)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(preference), CHOICES)
    return normal(tokens, HIDDEN), chosen, weights, *kernels


def summed(x, chosen, weights, *kernels, backend=None, **rule):
    rule = ExpertRule(**rule)
    return jax.jit(lambda *a: expert_sum(*a, rule, backend))(x, chosen, weights, Projections(kernels))


def by_definition(x, chosen, weights, gate, up, down, weighted_inputs=False):
    out = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for expert, weight in zip(chosen[t], weights[t], strict=True):
            before, after = (weight, 1.0) if weighted_inputs else (1.0, weight)
            inner = np.asarray(before * x[t] @ gate[expert])
            inner = inner / (1 + np.exp(-inner)) * np.asarray(before * x[t] @ up[expert])
            out[t] += float(after) * (inner @ np.asarray(down[expert]))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("spread", [1.0, 0.0], ids=["spread", "all to two experts"])
def test_agrees_with_the_definition(backend, tokens, spread):
    arguments = inputs(tokens, spread)
    actual = summed(*arguments, backend=backend)
    np.testing.assert_allclose(actual, by_definition(*arguments), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", [None, "xla"])
def test_weighted_inputs(backend):
    arguments, rule = inputs(7), {"weighted_inputs": True}
    expected = by_definition(*arguments, **rule)
    np.testing.assert_allclose(summed(*arguments, backend=backend, **rule), expected, rtol=2e-5, atol=2e-5)


def test_experts_are_chosen_by_logit():
    """Sigmoids of large logits are equal, and the first experts would be chosen."""
    router = Router(HIDDEN, EXPERTS, CHOICES, RouterSpec("sigmoid", by_logit=True))
    router.kernel[...] = jnp.eye(HIDDEN, EXPERTS)
    weights, chosen = router(jnp.array([[30.0, 31.0, 40.0, 50.0, -3.0, 0.0, 0.0, 0.0]]))
    assert chosen.tolist() == [[3, 2]] and weights.tolist() == [[1.0, 1.0]]


def test_a_token_does_not_depend_on_its_neighbours():
    x, chosen, weights, *kernels = inputs(8)
    others = jnp.arange(1, 8)
    changed = x.at[others].set(x[others[::-1]] * 2), chosen.at[others].set(chosen[others[::-1]])
    before = summed(x, chosen, weights, *kernels)
    after = summed(*changed, weights, *kernels)
    np.testing.assert_array_equal(before[0], after[0])


def test_unread_experts_may_hold_anything():
    """Only the selected experts are read; the others hold NaN."""
    x, chosen, weights, *kernels = inputs(3, spread=0.0)
    unread = jnp.asarray([e for e in range(EXPERTS) if e not in np.unique(chosen)])
    assert unread.size
    poisoned = [kernel.at[unread].set(jnp.nan) for kernel in kernels]
    expected = summed(x, chosen, weights, *kernels)
    np.testing.assert_array_equal(summed(x, chosen, weights, *poisoned), expected)


def test_rows_without_an_expert_add_nothing_whatever_they_hold():
    """What is behind the last group was never written: it may be NaN."""
    expert_ids = jnp.array([[0, EXPERTS], [EXPERTS, EXPERTS], [1, 0]])
    rows, sizes, order = _sort_by_expert(jnp.ones((3, HIDDEN)), expert_ids, EXPERTS)
    outputs = jnp.where(jnp.arange(6)[:, None] < 3, rows, jnp.nan)
    weights = jnp.array([[0.25, 0.0], [0.0, 0.0], [0.5, 1.0]])
    summed_up = _combine(outputs, order, weights, sizes, all_read=False)
    np.testing.assert_array_equal(summed_up, weights.sum(1)[:, None] * jnp.ones(HIDDEN))


@pytest.mark.parametrize("wrt", [0, 2, 3, 5], ids=["x", "weights", "gate", "down"])
def test_gradients_are_those_of_the_definition(wrt):
    def densely(x, chosen, weights, gate, up, down):
        inner = gate_product(jnp.einsum("th,ehi->tei", x, gate), jnp.einsum("th,ehi->tei", x, up))
        share = (weights[:, :, None] * jax.nn.one_hot(chosen, EXPERTS)).sum(1)
        return jnp.einsum("tei,eih,te->th", inner, down, share)

    arguments = inputs(3)
    slope = lambda function: jax.jit(jax.grad(lambda *a: jnp.sin(function(*a)).sum(), wrt))(*arguments)
    actual = slope(lambda x, chosen, weights, *kernels: expert_sum(x, chosen, weights, Projections(kernels)))
    np.testing.assert_allclose(actual, slope(densely), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_router_weights(normalise):
    """The router weights of a token sum to one if normalised, and to less otherwise."""
    router = Router(HIDDEN, EXPERTS, CHOICES, RouterSpec(normalise=normalise))
    router.kernel[...] = jnp.asarray(np.random.default_rng(0).standard_normal((HIDDEN, EXPERTS)), jnp.float32)
    weights, _ = router(jnp.ones((4, HIDDEN)))
    total = np.asarray(weights.sum(-1))
    assert np.allclose(total, 1, atol=1e-6) == normalise and (total < 1 + 1e-6).all()


@pytest.mark.parametrize("function", [softmax, sigmoid])
@pytest.mark.parametrize("experts", [8, 60, 256])
def test_scores_of_a_token_do_not_depend_on_the_others(function, experts):
    logits = jnp.asarray(3 * np.random.default_rng(experts).standard_normal((200, experts)), jnp.float32)
    scores = jax.jit(function)(logits)
    wide = np.exp(np.asarray(logits, np.float64))
    expected = wide / wide.sum(1, keepdims=True) if function is softmax else wide / (1 + wide)
    np.testing.assert_allclose(scores, expected, rtol=3e-6)
    for n in (1, 2, 7, 33):
        np.testing.assert_array_equal(jax.jit(function)(logits[:n]), scores[:n])


@pytest.mark.slow
def test_the_exponential_and_its_slope():
    x = jnp.linspace(-90, 89, 4001)
    expected = np.exp(np.clip(np.asarray(x, np.float64), -87, 88))
    np.testing.assert_allclose(exponential(x), expected, rtol=2e-7)
    slope = jax.vmap(jax.grad(exponential))(x)
    inside = np.asarray((x > -60) & (x < 87))
    np.testing.assert_allclose(slope[inside], expected[inside], rtol=1e-5)
    assert np.isnan(exponential(jnp.array([jnp.nan]))).all()
