"""The draft-length law: most probable tokens first, prefixes only, the pass with the best rate."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.speculation import Draft, PassCosts, registry
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


def test_positions_cost_more_where_a_batch_has_too_many_for_the_caches():
    costs = PassCosts((1, 4), (1.0, 2.0), (1, 2), (0.1, 0.2))
    batch = costs._replace(near_positions=100, farther=((300, (0.3, 0.5)),))
    near, far = costs.law(1, (1, 2)), batch.law(1, (1, 2))
    base = np.asarray(near.costs)
    for positions, slopes in ((100, [0.1, 0.2]), (200, [0.2, 0.35]), (300, [0.3, 0.5]), (900, [0.3, 0.5])):
        expected = base + positions * np.array(slopes)
        np.testing.assert_allclose(far.pass_costs(jnp.float32(positions)), expected, rtol=1e-5)
        np.testing.assert_allclose(
            near.pass_costs(jnp.float32(positions)), base + positions * np.array([0.1, 0.2]), rtol=1e-5
        )
    # One structure, so that costs that are measured later retrace nothing.
    signature = lambda law: jax.tree.map(jax.typeof, law)
    assert signature(near) == signature(far) == signature(draft_length(1, widths=(1, 2)))


def test_costs_of_a_batch_have_to_be_as_many_as_sizes():
    costs = PassCosts((1, 4), (1.0, 2.0), (1, 2), (0.1, 0.2))
    costs = costs._replace(near_positions=100)
    assert costs._replace(farther=((300, (0.3, 0.5)), (400, (0.3, 0.5)))).valid()
    point = 300, (0.3, 0.5)
    for points in ((300, (0.3,)),), ((100, (0.3, 0.5)),), ((300, (0.3, float("nan"))),), (point, point):
        assert not costs._replace(farther=points).valid()
    assert not costs._replace(farther=tuple((n, (0.3, 0.5)) for n in (200, 300, 400))).valid()


def test_positions_are_interpolated_between_all_points():
    costs = PassCosts((1, 4), (1.0, 2.0), (1, 2), (0.1, 0.2), near_positions=100)
    law = costs._replace(farther=((300, (0.3, 0.5)), (500, (0.4, 0.8)))).law(1, (1, 2))
    for positions, slopes in ((50, [0.1, 0.2]), (300, [0.3, 0.5]), (400, [0.35, 0.65]), (900, [0.4, 0.8])):
        expected = np.asarray(law.costs) + positions * np.array(slopes)
        np.testing.assert_allclose(law.pass_costs(jnp.float32(positions)), expected, rtol=1e-5)


def test_emission_costs_the_same_for_all_passes_with_drafts_and_that_of_a_step_without():
    costs = PassCosts((1, 8), (1.0, 2.0), (1, 2, 4), (0.1, 0.2, 0.3))
    emitting = costs._replace(emission=(0.5, 0.1), step_emission=(0.2, 0.05))
    for rows, of_step, of_pass in ((1, 0.2, 0.5), (4, 0.35, 0.8)):
        without, law = costs.law(rows, (1, 2, 4)), emitting.law(rows, (1, 2, 4))
        added = np.array([of_step, of_pass, of_pass])
        np.testing.assert_allclose(law.costs, np.asarray(without.costs) + added, rtol=1e-6)


def test_a_draft_has_to_be_worth_more_than_a_plain_step():
    """A pass of two tokens is worth it beside a pass of one, and not beside a step that decides nothing."""
    costs = PassCosts((1, 8), (1.0, 1.0), (1, 2), (0.0, 0.0))
    for step, number in ((0.6, 1), (0.1, 0)):
        law = costs._replace(emission=(0.6, 0.0), step_emission=(step, 0.0)).law(1, (1, 2))
        offered, none = drafts(np.full((1, 1), 0.4)), jnp.zeros(1, jnp.int32)
        assert law.choose(offered, jnp.ones(1, bool), law.init(1), none)[0].tolist() == [number]


def test_costs_cover_passes_and_batches_up_to_those_that_were_timed():
    costs = PassCosts((1, 4), (1.0, 2.0), (1, 2), (0.1, 0.2))
    batch = costs._replace(near_positions=100, farther=((300, (0.3, 0.5)),))
    assert costs.covers(4, None) and not costs.covers(5, None) and not costs.covers(4, (2, 150))
    assert batch.covers(4, (2, 150)) and batch.covers(2, None) and not batch.covers(4, (2, 151))


def test_costs_between_measured_sizes_are_interpolated():
    costs = PassCosts((1, 2, 4), (1.0, 2.0, 3.0), (1, 4), (0.1, 0.4))
    law = costs.law(2, (1, 2, 3))
    assert law.widths == (1, 2, 3)
    np.testing.assert_allclose(law.costs, [2.0, 3.0, 4.5])
    np.testing.assert_allclose(law.position_costs, [0.1, 0.2, 0.3])


def test_passes_on_a_cpu_are_larger_where_kernels_multiply_them(monkeypatch):
    assert registry.pass_widths(32, 15) == (1, 2, 4) and registry.pass_widths(8, 15) == (1, 2, 4, 8, 16)
    monkeypatch.setattr(cpu_runtime, "num_processors", lambda: cpu_runtime.MAX_THREADS + 1)
    assert registry.pass_widths(32, 15) == (1, 2) and registry.pass_widths(64, 15) == (1,)
