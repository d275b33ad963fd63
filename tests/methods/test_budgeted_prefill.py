"""Budgeted prefill: how a budget is shared, against NumPy, and its limits: dense, and uniform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.long_context.head_budgets.measure import LEAST, PAGE, shared
from entropic_jax.methods.budgeted_prefill import BudgetedPrefill, share_pages
from entropic_jax.methods.criticality import attention_entropy, expected_attention
from entropic_jax.methods.head_needs import HeadNeeds, save_head_needs
from entropic_jax.methods.method import Method
from entropic_jax.methods.presets import preset
from entropic_jax.methods.registry import METHODS, add_method
from entropic_jax.methods.uniform_budget import UniformBudget
from entropic_jax.parameter_tables.prefill_options import PREFILL_OPTIONS
from tests import tiny
from tests.methods.test_prefill import SMALL, layer_queries, started, surprisal

SHAPE = (2, 4, 2, 8, 32, 96)  # of the tiny model
UNEVEN = ((10.0, 1.0), (2.0, 30.0))


def needs(table=UNEVEN) -> HeadNeeds:
    return HeadNeeds(*SHAPE, 256, 32, 16, 512, 0, table)


def policy(table=UNEVEN, **options) -> BudgetedPrefill:
    return BudgetedPrefill(needs(table), **{**SMALL, **options})


@pytest.mark.parametrize("mean_pages", [4, 16, 64])
def test_a_budget_is_shared_as_the_benchmark_shares_it(mean_pages):
    rng = np.random.default_rng(mean_pages)
    differing = 0
    for _ in range(40):
        weight = rng.dirichlet(np.full(10, 0.2)).astype(np.float32) + np.float32(1e-6)
        prior = int(rng.integers(0, 200))
        (pages,) = np.asarray(share_pages(jnp.asarray(weight)[None], mean_pages, jnp.array([prior]), LEAST))
        assert pages.sum() == min(mean_pages, prior) * 10
        assert pages.max() <= prior and pages.min() >= int(min(LEAST * mean_pages, prior))
        expected = shared(weight.astype(float), mean_pages * PAGE, prior)
        assert np.abs(pages - expected).max() <= 1  # remainders that are equal but for rounding
        differing += (pages != expected).any()
    assert differing <= 4


@pytest.mark.parametrize("prior", [0, 3, 5, 1000])
def test_equal_weights_and_the_largest_least_share_give_equal_budgets(prior):
    rng = np.random.default_rng(0)
    for weight, least in ((np.full(7, 0.3), 0.05), (rng.random(7) + 0.1, 1.0)):
        pages = share_pages(jnp.asarray(weight[None], jnp.float32), 5, jnp.array([prior]), least)
        assert pages.tolist() == [[min(5, prior)] * 7]


def test_rows_share_their_own_budgets_over_the_heads_of_all_sparse_layers():
    pages = policy(base=40, dense_layers=0).pages_of_heads(jnp.array([100, 12]), None, 4)
    assert pages.shape == (2, 2, 2) and pages.sum((1, 2)).tolist() == [40, 40]
    np.testing.assert_array_equal(pages[0].reshape(-1), shared_by_hand(np.array([10, 1, 2, 30.0]), 10, 100))
    np.testing.assert_array_equal(pages[1].reshape(-1), shared_by_hand(np.array([10, 1, 2, 30.0]), 10, 12))
    above = policy(base=40, dense_layers=1).pages_of_heads(jnp.array([100]), None, 4)
    assert above[0, 0].tolist() == [0, 0] and above[0, 1].sum() == 20


def test_needs_are_weighed_by_the_entropy_of_the_segment_before():
    entropy = np.array([[[0.0, 3.0], [1.0, 0.5]]], np.float32)
    pages = policy(base=40, dense_layers=0, entropy=True).pages_of_heads(
        jnp.array([100]), jnp.asarray(entropy), 4
    )
    weight = np.array([10, 1, 2, 30.0]) * np.exp(entropy.reshape(-1))
    np.testing.assert_array_equal(pages[0].reshape(-1), shared_by_hand(weight, 10, 100))


def shared_by_hand(weight: np.ndarray, mean_pages: int, prior: int) -> np.ndarray:
    """λ by bisection, then largest remainders."""
    least, total = 0.05 * mean_pages, mean_pages * len(weight)
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        short = np.minimum(prior, least + middle * weight).sum() < total
        low, high = (middle, high) if short else (low, middle)
    quota = np.minimum(prior, least + high * weight)
    pages = np.floor(quota + 1e-9).astype(int)
    pages[np.argsort(pages - quota, kind="stable")[: total - pages.sum()]] += 1
    return pages


def test_the_entropy_of_the_segment_before_multiplies_the_table():
    plain, weighed = policy(base=40), policy(base=40, entropy=True)
    entropy = jnp.array([[[0.0, 1.5], [3.0, 0.5]]])
    prior = jnp.array([100])
    weight = np.array(UNEVEN) * np.exp(entropy[0])
    expected = shared_by_hand(weight.reshape(-1).astype(float), 10, 100)
    np.testing.assert_array_equal(weighed.pages_of_heads(prior, entropy, 4).reshape(-1), expected)
    without = plain.pages_of_heads(prior, None, 4)
    assert (np.asarray(without).reshape(-1) != expected).any()
    zero = weighed.pages_of_heads(prior, jnp.zeros((1, 2, 2)), 4)
    np.testing.assert_array_equal(zero, without)  # of the first segment nothing is known


def test_layers_pass_the_budget_on_and_keep_their_entropy():
    s = layer_queries(3)
    method = policy(base=8, entropy=True)
    states = tuple(method.init(1, 2, 12) for _ in range(2))
    below, budgets = method.begin_segment(states), []
    for state in states:
        page_scores, after, below = method.score_pages(s, state, below)
        budgets.append(np.asarray(page_scores.budget[0]))
        np.testing.assert_allclose(after, attention_entropy(expected_attention(s)), rtol=1e-6)
    assert below.layer == 2
    np.testing.assert_array_equal(np.stack(budgets), below.pages[0] * 4)
    assert np.stack(budgets).sum() == 4 * 8 and budgets[1][1] > budgets[0][1]
    padded = s._replace(valid=jnp.zeros_like(s.valid))
    _, unchanged, _ = method.score_pages(padded, jnp.full((1, 2), 7.0), method.begin_segment(states))
    assert (unchanged == 7).all()


@pytest.mark.slow
def test_a_flat_table_is_the_uniform_method_to_the_bit():
    for base in (8, 24):
        uniform, flat = (
            started(Method(method))
            for method in (UniformBudget(base=base, **SMALL), policy(((3.0, 3.0), (3.0, 3.0)), base=base))
        )
        np.testing.assert_array_equal(surprisal(flat), surprisal(uniform))
        for flat_cost, cost in zip(
            flat.page_policy_state.prefill_cost, uniform.page_policy_state.prefill_cost, strict=True
        ):
            np.testing.assert_array_equal(flat_cost, cost)


@pytest.mark.slow
def test_a_budget_of_the_context_is_dense():
    dense, full = started(), started(Method(policy(base=1024)))
    np.testing.assert_allclose(surprisal(full), surprisal(dense), atol=2e-5)
    uniform = started(Method(UniformBudget(base=1024, **SMALL)))
    np.testing.assert_array_equal(surprisal(full), surprisal(uniform))


@pytest.mark.slow
def test_another_table_makes_other_choices_at_the_same_cost():
    uneven, shuffled, weighed = (
        started(Method(method), lengths=(97,))
        for method in (
            policy(base=16),
            policy((UNEVEN[0][::-1], UNEVEN[1][::-1]), base=16),
            policy(base=16, entropy=True),
        )
    )
    assert np.abs(surprisal(uneven) - surprisal(shuffled)).max() > 1e-3
    assert np.ptp(np.stack(weighed.page_policy_state.prefill)) > 0  # the entropies that weigh the needs
    for state in (shuffled, weighed):
        np.testing.assert_array_equal(
            state.page_policy_state.prefill_cost.positions, uneven.page_policy_state.prefill_cost.positions
        )


@pytest.mark.slow
def test_pages_that_a_head_does_not_read_may_hold_anything():
    blank, poisoned = (started(Method(policy(base=8)), unused=x) for x in (0.0, jnp.nan))
    np.testing.assert_array_equal(surprisal(blank), surprisal(poisoned))
    together, alone = surprisal(blank), surprisal(started(Method(policy(base=8)), (97,)))
    np.testing.assert_allclose(together[:, 0], alone[:, 0], atol=1e-5)


def test_a_table_of_another_model_is_refused():
    other = policy()
    other = BudgetedPrefill(other.needs._replace(kv_heads=3))
    with pytest.raises(ValueError, match="another model: kv_heads must be 2, as the model has; got 3"):
        started(Method(other))


def test_options_reach_the_policies(tmp_path):
    save_head_needs(needs(), tmp_path)
    values = {
        "segment": 128,
        "dense_below": 0,
        "tolerance": 0.1,
        "growth": 2,
        "rigid_below": 0.5,
        "table": str(tmp_path),
        "entropy": True,
        "least_share": 0.25,
    }
    for name in METHODS:
        options = {key: value for key, value in values.items() if name in PREFILL_OPTIONS[key].methods}
        assert bool(options) == (METHODS[name].prefill is not None)
        if options:
            prefill = add_method(name, preset("off"), prefill_options=options).page_policy.prefill
            for key, value in options.items():
                assert (prefill.needs == needs()) if key == "table" else (getattr(prefill, key) == value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("budgeted-prefill", {}, "table must be set with the method budgeted-prefill: a file that"),
        (
            "budgeted-prefill",
            {"table": "no.json"},
            r"table must be a table of head needs: .*no\.json does not",
        ),
        ("budgeted-prefill", {"table": 3}, "table must be the path of a file; got 3"),
        ("uniform-prefill", {"segment": 100}, "segment must be a power of two between 64 and 32768; got 100"),
        ("uniform-prefill", {"segment": 32}, "segment must be a power of two between 64 and 32768; got 32"),
        (
            "uniform-prefill",
            {"dense_below": -1},
            "dense_below must be an integer between 0 and 2147483647; got",
        ),
        ("uniform-prefill", {"growth": 1.0}, "growth must not be set with the method uniform-prefill, which"),
        (
            "entropy-as-released",
            {"tolerance": 0.1},
            "tolerance must not be set with the method entropy-as-rel",
        ),
        ("entropy-prefill", {"tolerance": -0.1}, "tolerance must be a number between 0 and 10; got -0.1"),
        ("entropy-prefill", {"rigid_below": 1.5}, "rigid_below must be a number between 0 and 1; got 1.5"),
        ("entropy-prefill", {"table": "a"}, "table must not be set with the method entropy-prefill"),
        ("snapkv", {"segment": 256}, "segment must not be set with the method snapkv"),
        ("dense", {"segment": 256}, "segment must not be set with the method dense"),
        ("uniform-prefill", {"segmnt": 256}, "prefill_options must have no keys but segment, dense_below, "),
    ],
)
def test_an_error_names_the_option(name, options, message):
    with pytest.raises(ValueError, match=message):
        add_method(name, preset("off"), prefill_options=options)


def test_policies_are_static():
    assert jax.tree.leaves(Method(policy())) == [] and hash(policy()) == hash(policy())
    assert policy() != policy(((1.0, 1.0), (1.0, 1.0)))
    policy().check_model(tiny.model().decoder.shape)
