"""Sparse prefill: the estimate, the budgets and the page lists, each against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_jax import allocate, chain, parameters, replay, start
from entropic_jax.methods.criti_prefill import CritiPrefill
from entropic_jax.methods.criticality import attention_entropy, expected_attention
from entropic_jax.methods.entropy_prefill import AS_RELEASED, EntropyPrefill, HeadBudgets
from entropic_jax.methods.method import Method
from entropic_jax.methods.oracle import Oracle, attention_received
from entropic_jax.methods.policies import LayerQueries, page_list, top_mask
from entropic_jax.methods.uniform_budget import UniformBudget
from entropic_jax.state import State
from tests import tiny

POLICIES = (EntropyPrefill, CritiPrefill, UniformBudget, Oracle)
PAGE, SEGMENT = 4, 16
# The attention of the last layer leaves nothing in the cache: of two layers the first must be sparse.
SMALL = dict(segment=SEGMENT, dense_below=2 * SEGMENT, dense_layers=0, page_size=PAGE)


def started(page_policy=None, lengths=(97, 61), unused=jnp.nan) -> State:
    """Prefilled prompts of the given lengths, with unused memory filled as stated."""
    model = tiny.model()
    pool = allocate(model.decoder.shape, len(lengths), 128, page_size=PAGE)
    pool = pool._replace(layers=jax.tree.map(lambda x: jnp.full_like(x, unused), pool.layers))
    return start(
        model.decoder,
        model.params,
        chain(),
        pool,
        tiny.prompts(*lengths),
        key=jax.random.key(0),
        max_tokens=8,
        sample=parameters(len(lengths), temperature=0.0),
        page_policy=page_policy,
    )


def surprisal(state: State) -> np.ndarray:
    """Surprisals of a fixed continuation; equal caches give equal ones."""
    model = tiny.model()
    tokens = np.random.default_rng(1).integers(0, 96, (state.token.shape[0], 4))
    _, trace = replay(model.decoder, model.params, chain(), state, jnp.asarray(tokens, jnp.int32))
    return np.asarray(trace.surprisal)


def layer_queries(
    seed: int, *, pages: int = 12, group: int = 2, n: int = 8, start: int = 30, num_queries: int = 8
) -> LayerQueries:
    """Random queries of one row over shuffled pages, with two KV heads and NaN in unused memory."""
    rng = np.random.default_rng(seed)
    held = -(-(start + num_queries) // PAGE)
    keys = rng.standard_normal((pages + 1, 2, PAGE, 8)).astype(np.float32)
    order = rng.permutation(pages)
    keys[order[held:]] = np.nan
    keys[-1] = np.nan
    blank = np.zeros((pages + 1, 2), np.float32)
    from entropic_jax.state.cache import Layer

    layer = Layer(*(jnp.asarray(x) for x in (keys, keys, keys.min(2), keys.max(2), keys.sum(2), blank)))
    return LayerQueries(
        jnp.asarray(rng.standard_normal((1, 2, group, n, 8)), jnp.float32),
        jnp.arange(n)[None] < num_queries,
        jnp.array([start], jnp.int32),
        ((jnp.arange(pages) + 1) * PAGE <= start)[None],
        layer,
        jnp.asarray(order[None], jnp.int32),
    )


def observed(s: LayerQueries, scaled: bool) -> np.ndarray:
    """The observation matrix in float64, one product at a time."""
    q = np.asarray(s.q, np.float64)[0][:, :, np.asarray(s.valid)[0]] * (1 if scaled else np.sqrt(8))
    earlier = int(np.asarray(s.prior_pages).sum())
    out = np.zeros((2, s.table.shape[1]))
    for head in range(2):
        scores = np.zeros(earlier)
        for page in range(earlier):
            tile = np.asarray(s.layer.keys, np.float64)[int(s.table[0, page]), head]
            top, low = tile.max(0), tile.min(0)
            for queries in q[head]:
                q_max, q_min = queries.max(0), queries.min(0)
                s_max = (q_max @ top + q_min @ top) / 2
                s_min = (q_max @ low + q_min @ low) / 2
                scores[page] += max(s_max, s_min) / len(q[head])
        weight = np.exp(scores - scores.max())
        out[head, :earlier] = weight / weight.sum()
    return out


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("num_queries", [8, 3])
def test_the_observation_is_what_it_is_said_to_be(scaled, num_queries):
    s = layer_queries(num_queries, num_queries=num_queries)
    np.testing.assert_allclose(expected_attention(s, scaled)[0], observed(s, scaled), rtol=2e-5, atol=1e-7)


def test_entropy_is_that_of_the_distribution():
    share = np.random.default_rng(0).dirichlet(np.ones(7), 3)
    share[0] = np.eye(7)[2]
    expected = -(share * np.log(np.where(share > 0, share, 1))).sum(-1)
    np.testing.assert_allclose(attention_entropy(jnp.asarray(share, jnp.float32)), expected, atol=1e-6)


def budgets(entropies: list[float], policy: EntropyPrefill) -> list[float]:
    """The budget of every segment by the recurrence, one segment at a time."""
    budget, before, rigid, out = float(policy.base), None, True, []
    for entropy in entropies:
        rigid = rigid and entropy < policy.rigid_below
        change = 0.0 if before is None else min(max((entropy - before) / before, 0.0), 1 + policy.tolerance)
        target = budget + policy.growth * policy.base * (change - policy.tolerance)
        budget = policy.base if rigid else min(max(target, policy.base), policy.most * policy.base)
        before = entropy
        out.append(budget)
    return out


@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12),
    st.sampled_from([EntropyPrefill(base=64), EntropyPrefill(base=64, rigid_below=0.05), AS_RELEASED]),
)
def test_budgets_follow_the_recurrence(entropies, policy):
    state = HeadBudgets(
        jnp.zeros((1, 1)),
        jnp.full((1, 1), float(policy.base)),
        jnp.ones((1, 1), bool),
        jnp.zeros((1, 1), jnp.int32),
    )
    result = []
    for entropy in entropies:
        state = policy.update_budgets(state, jnp.full((1, 1), entropy, jnp.float32))
        result.append(float(state.budget[0, 0]))
    np.testing.assert_allclose(result, budgets(entropies, policy), rtol=2e-4)
    assert all(policy.base <= b <= 3 * policy.base for b in result)


def test_matched_budgets_are_the_base_on_average_and_released_ones_those_of_the_widest_head():
    s = layer_queries(3)
    state = EntropyPrefill().init(1, 2, 12)
    state = state._replace(
        entropy=jnp.array([[0.3, 0.9]]), num_segments=state.num_segments + 1, rigid=~state.rigid
    )
    state = state._replace(budget=jnp.array([[4000.0, 3000.0]]))
    plain, _, _ = EntropyPrefill().score_pages(s, state, None)
    matched, _, _ = EntropyPrefill(matched=True).score_pages(s, state, None)
    widest, _, _ = EntropyPrefill(per_head=False).score_pages(s, state, None)
    np.testing.assert_allclose(matched.budget.mean(), 2048, rtol=1e-5)
    ratio = np.asarray(plain.budget[0, 0] / plain.budget[0, 1])
    assert ratio != 1
    np.testing.assert_allclose(matched.budget[0, 0] / matched.budget[0, 1], ratio, rtol=1e-5)
    np.testing.assert_allclose(widest.budget, plain.budget.max())


def test_criticality_is_passed_on_from_the_second_layer_on():
    policy, s = CritiPrefill(), [layer_queries(i) for i in range(4)]
    share = [np.asarray(expected_attention(x)) for x in s]
    expected = [share[0], share[1], 0.25 * share[1] + 0.75 * share[2]]
    expected.append(0.25 * expected[2] + 0.75 * share[3])
    below = None
    for x, target in zip(s, expected, strict=True):
        verdict, _, below = policy.score_pages(x, (), below)
        np.testing.assert_allclose(verdict.scores, target, rtol=1e-5, atol=1e-7)


def test_the_oracle_knows_the_attention():
    s = layer_queries(5, num_queries=5)
    keys = np.asarray(s.layer.keys, np.float64)[np.asarray(s.table[0])].swapaxes(0, 1).reshape(2, -1, 8)
    expected = np.zeros(keys.shape[:2])
    for head in range(2):
        for group in range(2):
            for i in range(5):
                score = keys[head, : 30 + i + 1] @ np.asarray(s.q, np.float64)[0, head, group, i]
                weight = np.exp(score - score.max())
                expected[head, : 30 + i + 1] += weight / weight.sum() / 2
    np.testing.assert_allclose(attention_received(s)[0], expected, rtol=2e-5, atol=1e-7)


@given(st.data())
def test_the_best_are_the_best(data):
    worth = np.array(
        data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=6, max_size=6)), np.float32
    )
    among = np.array(data.draw(st.lists(st.booleans(), min_size=6, max_size=6)))
    many = data.draw(st.integers(0, 7))
    flags = np.asarray(top_mask(jnp.asarray(worth), jnp.asarray(among), jnp.int32(many)))
    order = sorted(np.flatnonzero(among), key=lambda i: (-worth[i], i))[:many]
    assert sorted(order) == np.flatnonzero(flags).tolist()
    index, count = page_list(jnp.asarray(flags))
    assert index[: int(count)].tolist() == sorted(order)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_budget_is_dense(policy):
    dense = started()
    full = started(Method(policy(base=1024, **SMALL)))
    np.testing.assert_allclose(surprisal(full), surprisal(dense), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_budget_reads_less_and_not_what_is_unused(policy):
    small, poisoned = (started(Method(policy(base=8, **SMALL)), unused=x) for x in (0.0, jnp.nan))
    full = started(Method(policy(base=1024, **SMALL)))
    assert (
        np.asarray(small.page_policy_state.prefill_cost.products)
        < np.asarray(full.page_policy_state.prefill_cost.products)
    ).all()
    assert np.abs(surprisal(small) - surprisal(full)).max() > 1e-3
    np.testing.assert_array_equal(surprisal(small), surprisal(poisoned))


@pytest.mark.slow
def test_short_prompts_are_read_densely():
    policy = EntropyPrefill(base=8, **{**SMALL, "dense_below": 64})
    short = Method(policy)
    dense = surprisal(started(None, (64, 20)))  # in one piece, and so with another rounding
    np.testing.assert_allclose(surprisal(started(short, (64, 20))), dense, atol=2e-5)


def test_what_is_spent_is_counted():
    """A uniform budget of two pages, on two layers of which the first is dense."""
    state = started(Method(UniformBudget(base=8, **{**SMALL, "dense_layers": 1})), (97, 33))
    for row, length in enumerate((96, 32)):
        products = positions = 0
        for layer in range(2):
            for begin in range(0, length, SEGMENT):
                count = min(SEGMENT, length - begin)
                full = layer == 0 or begin < 2 * SEGMENT or begin + count == length
                earlier = begin if full else 8
                looked = begin // PAGE  # two KV heads of two query heads each
                products += 4 * (count * earlier + count * (count + 1) // 2 + looked)
                positions += 2 * (earlier + count + looked)
        assert float(state.page_policy_state.prefill_cost.products[row]) == products
        assert float(state.page_policy_state.prefill_cost.positions[row]) == positions


@pytest.mark.slow
def test_a_neighbour_changes_nothing():
    method = Method(EntropyPrefill(base=8, **SMALL))
    together, alone = surprisal(started(method, (97, 61))), surprisal(started(method, (97,)))
    np.testing.assert_allclose(together[:, 0], alone[:, 0], atol=1e-5)


def test_criti_prefill_reads_its_lowest_layer_densely_as_its_release_does():
    assert CritiPrefill().dense_layers == 1


def test_normalised_entropies_as_measured_leave_every_budget_at_its_base():
    policy = EntropyPrefill(base=64)
    growing = [0.62, 0.62 * 1.374, 0.84, 0.95, 0.7, 0.7 * 1.374, 1.0]  # the greatest growth measured is 0.374
    assert budgets(growing, policy) == [64.0] * len(growing)
    assert max(budgets([0.84, 0.5, 0.95], policy)) > 64  # beyond 0.4 the law does act
