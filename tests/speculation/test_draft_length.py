"""The draft-length law: most probable tokens first, prefixes only, the pass with the best rate."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.speculation import Draft, PassCosts
from entropic_jax.speculation.draft_length import DraftLength, draft_length


def drafts(acceptance: np.ndarray, num_tokens: list[int] | None = None) -> Draft:
    rows, k = acceptance.shape
    counts = jnp.full(rows, k) if num_tokens is None else jnp.asarray(num_tokens)
    return Draft(jnp.zeros((rows, k), jnp.int32), counts, jnp.asarray(acceptance, jnp.float32))


def best_by_trying(acceptance: np.ndarray, costs: dict[int, float]) -> float:
    """The largest rate of all shares of a pass among the rows."""
    rows, k = acceptance.shape
    reach = np.cumprod(acceptance, 1)
    rates = [
        (rows + sum(reach[row, :n].sum() for row, n in enumerate(counts))) / cost
        for width, cost in costs.items()
        for counts in itertools.product(range(k + 1), repeat=rows)
        if sum(counts) <= rows * (width - 1)
    ]
    return max(rates)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_share_of_a_pass_has_a_better_rate(seed):
    rng = np.random.default_rng(seed)
    acceptance = rng.uniform(0.05, 0.99, (2, 4))
    costs = {1: 1.0, 2: rng.uniform(1, 1.6), 3: rng.uniform(1.4, 2.2)}
    law = DraftLength(jnp.asarray(list(costs.values()), jnp.float32), widths=tuple(costs))
    count, index = law.choose(drafts(acceptance), jnp.ones(2, bool), law.init(2), jnp.zeros(2, jnp.int32))
    width, cost = list(costs.items())[int(index)]
    assert int(count.sum()) <= 2 * (width - 1)
    reach = np.cumprod(acceptance, 1)
    rate = (2 + sum(reach[row, : int(n)].sum() for row, n in enumerate(count))) / cost
    assert rate == pytest.approx(best_by_trying(acceptance, costs), rel=1e-5)


def test_nothing_is_verified_where_arithmetic_is_not_free():
    law = draft_length(2, marginal_cost=10.0)
    count, index = law.choose(
        drafts(np.full((2, 4), 0.6)), jnp.ones(2, bool), law.init(2), jnp.zeros(2, jnp.int32)
    )
    assert count.tolist() == [0, 0]
    assert int(index) == 0


def test_rows_that_are_not_active_and_tokens_that_are_not_offered_are_left_out():
    law = draft_length(3, marginal_cost=0.0)
    flags = jnp.asarray([True, False, True])
    count, _ = law.choose(
        drafts(np.full((3, 4), 0.9), [4, 4, 1]), flags, law.init(3), jnp.zeros(3, jnp.int32)
    )
    assert count.tolist() == [4, 0, 1]


def test_a_row_learns_from_its_record():
    law = draft_length(2)
    offered = drafts(np.full((2, 4), 0.8))
    shift = law.init(2)
    for _ in range(40):  # the first row accepts everything, the second nothing
        shift = law.learn(offered, shift, jnp.asarray([3, 3]), jnp.asarray([3, 0]))
    corrected = law.probabilities(offered, shift)
    assert (np.asarray(corrected[0]) > 0.9).all()
    assert (np.asarray(corrected[1]) < 0.4).all()


def test_a_row_without_a_pass_learns_nothing():
    law = draft_length(1)
    shift = law.learn(drafts(np.full((1, 3), 0.5)), law.init(1), jnp.asarray([0]), jnp.asarray([0]))
    assert shift.tolist() == [0.0]


def test_passes_grow_shorter_where_reading_the_context_is_what_costs():
    costs, positions = jnp.asarray([1.0, 1.05]), jnp.asarray([0.0, 0.01])
    law = DraftLength(costs, widths=(1, 2), position_costs=positions)
    choose = lambda length: law.choose(
        drafts(np.full((2, 1), 0.5)), jnp.ones(2, bool), law.init(2), jnp.asarray(length)
    )[0].tolist()
    assert choose([10, 10]) == [1, 1]
    assert choose([10, 90]) == [0, 0]


def test_costs_between_measured_sizes_are_interpolated():
    costs = PassCosts((1, 2, 4), (1.0, 2.0, 3.0), (1, 4), (0.1, 0.4))
    law = costs.law(2, (1, 2, 3))
    assert law.widths == (1, 2, 3)
    np.testing.assert_allclose(law.costs, [2.0, 3.0, 4.5])
    np.testing.assert_allclose(law.position_costs, [0.1, 0.2, 0.3])
