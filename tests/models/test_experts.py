"""Mixture of experts: all implementations agree with the definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.models.block_spec import RouterSpec
from entropic_jax.models.experts import Router, grouped, in_blocks

EXPERTS, HIDDEN, INNER, CHOICES = 5, 8, 12, 2


def inputs(tokens: int, spread: float = 1.0):
    random = np.random.default_rng(tokens)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    kernels = normal(EXPERTS, HIDDEN, INNER), normal(EXPERTS, HIDDEN, INNER), normal(EXPERTS, INNER, HIDDEN)
    preference = normal(tokens, EXPERTS) * spread + jnp.arange(EXPERTS, dtype=jnp.float32) * (1.0 - spread)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(preference), CHOICES)
    return normal(tokens, HIDDEN), chosen, weights, *kernels


def by_definition(x, chosen, weights, gate, up, down, weighted_inputs=False):
    out = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for expert, weight in zip(chosen[t], weights[t], strict=True):
            before, after = (weight, 1.0) if weighted_inputs else (1.0, weight)
            inner = np.asarray(before * x[t] @ gate[expert])
            inner = inner / (1 + np.exp(-inner)) * np.asarray(before * x[t] @ up[expert])
            out[t] += float(after) * (inner @ np.asarray(down[expert]))
    return out


@pytest.mark.parametrize("way", [in_blocks, grouped])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("spread", [1.0, 0.0], ids=["spread", "all to two experts"])
def test_agrees_with_the_definition(way, tokens, spread):
    arguments = inputs(tokens, spread)
    np.testing.assert_allclose(jax.jit(way)(*arguments), by_definition(*arguments), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("way", [in_blocks, grouped])
def test_weighted_inputs(way):
    arguments, rule = inputs(7), {"weighted_inputs": True}
    expected = by_definition(*arguments, **rule)
    np.testing.assert_allclose(jax.jit(partial(way, **rule))(*arguments), expected, rtol=2e-5, atol=2e-5)


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
    before = jax.jit(in_blocks)(x, chosen, weights, *kernels)
    after = jax.jit(in_blocks)(*changed, weights, *kernels)
    np.testing.assert_array_equal(before[0], after[0])


def test_unread_experts_may_hold_anything():
    """Only the selected experts are read; the others hold NaN."""
    x, chosen, weights, *kernels = inputs(3, spread=0.0)
    unread = jnp.asarray([e for e in range(EXPERTS) if e not in np.unique(chosen)])
    assert unread.size
    poisoned = [kernel.at[unread].set(jnp.nan) for kernel in kernels]
    expected = jax.jit(in_blocks)(x, chosen, weights, *kernels)
    np.testing.assert_array_equal(jax.jit(in_blocks)(x, chosen, weights, *poisoned), expected)


def test_grouped_is_differentiable():
    x, *rest = inputs(3)
    slope = jax.jit(jax.grad(lambda x: grouped(x, *rest).sum()))(x)
    assert np.isfinite(slope).all() and np.abs(slope).max() > 0


@pytest.mark.parametrize("normalise", [True, False])
def test_router_weights(normalise):
    """The router weights of a token sum to one if normalised, and to less otherwise."""
    router = Router(HIDDEN, EXPERTS, CHOICES, RouterSpec(normalise=normalise))
    router.kernel[...] = jnp.asarray(np.random.default_rng(0).standard_normal((HIDDEN, EXPERTS)), jnp.float32)
    weights, _ = router(jnp.ones((4, HIDDEN)))
    total = np.asarray(weights.sum(-1))
    assert np.allclose(total, 1, atol=1e-6) == normalise and (total < 1 + 1e-6).all()
