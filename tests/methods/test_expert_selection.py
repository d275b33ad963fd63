"""Expert policies: numbers of experts, their limits, and what a step reads and is charged for."""

from functools import cache as once
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, models, start
from entropic_jax.loop import replay
from entropic_jax.methods.expert_selection import (
    ExpectedReductionExperts,
    FixedExperts,
    TopPExperts,
    features,
)
from entropic_jax.models.block_spec import RouterSpec
from entropic_jax.models.experts import ExpertRule, Projections, expert_sum
from entropic_jax.models.router import Router
from entropic_jax.phases.expert_reader import ExpertReader
from entropic_jax.speculation import check_speculation, speculator
from entropic_jax.state import Measured
from tests.tiny import model as dense
from tests.tiny import prompts

MOST, LAYERS = 3, 2
ROUTERS = {
    "normalised": RouterSpec(normalise=True),
    "as probabilities": RouterSpec(),
    "sigmoid": RouterSpec("sigmoid", normalise=True),
    "by logit": RouterSpec(by_logit=True),
}


@once
def model(per_token: int = MOST) -> models.Model:
    """A Mixtral of two layers with five experts, of which tokens choose `per_token`."""
    config = models.Config(
        architecture="MixtralForCausalLM",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        num_local_experts=5,
        num_experts_per_tok=per_token,
    )
    return models.Model(config, jax.tree.map(lambda x: 3 * x, models.initialise(config, 0).params))


def begin(policy: Any, per_token: int = MOST, rows: int = 2, **options: Any):
    m = model(per_token)
    pool = allocate(m.decoder.shape, rows, 64, page_size=8)
    options = {"key": jax.random.key(0), "max_tokens": 40, "expert_policy": policy, **options}
    return start(m.decoder, m.params, chain(), pool, [[1]] * rows, **options)


def replayed(policy: Any, per_token: int = MOST):
    """State and trace of twelve tokens under a policy."""
    m, tokens = model(per_token), jnp.asarray(prompts(12, 12), jnp.int32)
    return replay(m.decoder, m.params, chain(), begin(policy, per_token), tokens)


def weights(*values: float) -> jax.Array:
    return jnp.broadcast_to(jnp.array(values, jnp.float32), (LAYERS, MOST - 1, 6))


def before(entropy: jax.Array) -> Measured:
    return Measured(entropy, *jnp.zeros((5, *entropy.shape)))


@once
def plain(per_token: int = MOST):
    return replayed(None, per_token)


@once
def limited(count: int):
    return replayed(FixedExperts(count))


@pytest.mark.slow
def test_a_policy_that_leaves_nothing_out_changes_no_bit():
    assert plain()[1].experts_read == ()
    np.testing.assert_array_equal(plain()[1].surprisal, limited(MOST)[1].surprisal)
    np.testing.assert_array_equal(limited(MOST)[1].experts_read, MOST)
    for charged, expected in zip(limited(MOST)[0].ledger, plain()[0].ledger, strict=True):
        np.testing.assert_allclose(charged, expected, rtol=1e-6)


def test_fewer_experts_are_those_of_a_model_that_chooses_fewer():
    state, trace = limited(1)
    smaller = plain(1)
    np.testing.assert_allclose(trace.surprisal, smaller[1].surprisal, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(trace.experts_read, 1)
    for name in ("flops", "bytes_read", "seconds"):
        charged, expected = (getattr(ledger, name) for ledger in (state.ledger, smaller[0].ledger))
        np.testing.assert_allclose(charged, expected, rtol=1e-5, err_msg=name)


def test_new_gains_do_not_compile_again():
    limited(1)
    programs = replay.program._cache_size()
    limited(2)
    assert replay.program._cache_size() == programs


@pytest.mark.parametrize(
    "policy", [FixedExperts(0), TopPExperts(0.0), ExpectedReductionExperts(weights(*[0.0] * 6), 1.0)]
)
def test_never_fewer_than_one_expert(policy: Any):
    reader = ExpertReader(policy, begin(None))
    counts = [reader(jnp.full((2, 5), 0.2), MOST) for _ in range(LAYERS)]
    np.testing.assert_array_equal(counts, 1)
    np.testing.assert_array_equal(reader.total().counts, 1)
    np.testing.assert_allclose(reader.total().fraction, 1 / MOST, rtol=1e-6)


@pytest.mark.parametrize("p", [0.0, 0.4, 0.8, 0.97, 1.0])
def test_top_p_is_the_smallest_set_that_reaches_p(p: float):
    probability = jax.nn.softmax(2 * jax.random.normal(jax.random.key(3), (20, 6)))
    counts = TopPExperts(p).num_experts(probability, 0, before(jnp.zeros(20)), jnp.zeros(20, jnp.int32))
    for count, row in zip(counts.tolist(), np.asarray(probability), strict=True):
        ranked = np.sort(row)[::-1]
        assert 1 <= count <= 6
        assert p >= 0.999 or ranked[:count].sum() >= p - 1e-6
        assert count == 1 or ranked[: count - 1].sum() < p


def test_features_of_a_router():
    probability = jnp.array([[0.1, 0.5, 0.4], [1.0, 0.0, 0.0]])
    values = features(probability, jnp.array([2.0, 1.0]), 2)
    router = -(0.1 * np.log(0.1) + 0.5 * np.log(0.5) + 0.4 * np.log(0.4))
    share = 0.4 / 0.9
    np.testing.assert_allclose(
        values[0, 0], [1, share, router, 2, share * router, share * 2], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(values[0, 1, :2], [1, 0.1], rtol=1e-5)
    np.testing.assert_allclose(values[1], [[1, 0, 0, 1, 0, 0]] * 2, atol=1e-6)


def test_the_expected_reduction_reads_more_where_the_token_before_was_uncertain():
    probability = jnp.full((3, 5), 0.2)
    policy = ExpectedReductionExperts(weights(0, 0, 0, 1, 0, 0), 1.0)
    counts = policy.num_experts(probability, 1, before(jnp.array([0.5, 1.5, 1.0])), jnp.zeros(3, jnp.int32))
    assert counts.tolist() == [1, MOST, 1]


def test_an_expert_after_one_that_is_not_worth_its_price_is_not_read():
    rising = weights(0, 0, 0, 0, 0, 0).at[:, 1, 0].set(2.0)
    counts = ExpectedReductionExperts(rising, 1.0).num_experts(
        jnp.full((1, 5), 0.2), 0, before(jnp.zeros(1)), jnp.zeros(1, jnp.int32)
    )
    assert counts.tolist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS)
def test_unread_experts_add_nothing(backend: str | None, spec: RouterSpec):
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    kernels, x = (normal(5, 8, 12), normal(5, 8, 12), normal(5, 12, 8)), normal(7, 8)
    router, counts = Router(8, 5, MOST, spec), jnp.array([1, 2, 3, 1, 2, 3, 1])
    router.kernel[...] = normal(8, 5)
    weight, ids = router(x, lambda probability, most: counts)
    assert (ids < 5).sum(1).tolist() == counts.tolist()
    poisoned = [k.at[4].set(jnp.where((ids == 4).any(), k[4], jnp.nan)) for k in kernels]
    kernels, poisoned, rule = (
        Projections(tuple(kernels)),
        Projections(tuple(poisoned)),
        ExpertRule(all_read=False),
    )
    out = jax.jit(lambda *a: expert_sum(*a, rule, backend))(x, ids, weight, poisoned)
    for count in (1, 2, 3):
        fewer = Router(8, 5, count, spec)
        fewer.kernel[...] = router.kernel[...]
        expected = expert_sum(x, *fewer(x)[::-1], kernels, backend=backend)
        rows = counts == count
        np.testing.assert_allclose(out[rows], expected[rows], rtol=2e-5, atol=2e-5)


def test_what_cannot_be_combined_is_refused():
    with pytest.raises(ValueError, match="expert_policy must be None or an expert policy"):
        begin(object())
    m = dense()
    pool = allocate(m.decoder.shape, 1, 64, page_size=8)
    with pytest.raises(ValueError, match="expert_policy must be None for a model without experts"):
        start(
            m.decoder,
            m.params,
            chain(),
            pool,
            [[1]],
            key=jax.random.key(0),
            max_tokens=4,
            expert_policy=FixedExperts(1),
        )
    state = begin(FixedExperts(1))._replace(text=jnp.zeros((2, 64), jnp.int32))
    with pytest.raises(ValueError, match="expert_policy must be None where tokens are drafted"):
        check_speculation(speculator(1), chain(), state)
