"""Every back end of paged attention and of page selection, against float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_jax.pallas import paged_attention
from entropic_jax.pallas.paged_attention import PageSummary, SelectionRules

from ..marks import sample

SIZES = [(3, 2, 2, 16, 8, 5), (1, 1, 7, 64, 16, 9), (2, 4, 1, 32, 4, 3), (1, 2, 3, 16, 64, 40)]


def case(seed: int, rows: int, kv_heads: int, group: int, head_dim: int, page: int, per_row: int):
    """A pool with NaN in all pages that no row owns and in all slots past a row's end.

    Half of the cases list every page. In the others, unlisted pages hold NaN too.
    """
    rng = np.random.default_rng(seed)
    pages = rows * per_row
    shape = (pages + 1, kv_heads, page, head_dim)
    keys, values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((rows, kv_heads, group, head_dim)).astype(np.float32) * head_dim**-0.5
    table = rng.permutation(pages).reshape(rows, per_row).astype(np.int32)
    last = rng.integers(0, per_row * page + 1, rows).astype(np.int32)
    first = np.minimum(rng.integers(0, per_row * page, rows), np.maximum(last - 1, 0)).astype(np.int32)
    first = np.where(rng.random(rows) < 0.5, 0, first).astype(np.int32)
    for row in range(rows):
        for entry in range(per_row):
            held = np.clip(last[row] - entry * page, 0, page)
            keys[table[row, entry], :, held:] = np.nan
            values[table[row, entry], :, held:] = np.nan
    keys[-1] = values[-1] = np.nan
    if seed % 2:
        return q, keys, values, table, None, None, first, last
    index = np.zeros((rows, kv_heads, per_row), np.int32)
    count = rng.integers(0, -(-last // page)[:, None] + 1, (rows, kv_heads)).astype(np.int32)
    for row in range(rows):
        for head in range(kv_heads):
            n = count[row, head]
            index[row, head, :n] = np.sort(rng.permutation(-(-last[row] // page))[:n])
            for entry in set(range(per_row)) - set(index[row, head, :n].tolist()):
                keys[table[row, entry], head] = values[table[row, entry], head] = np.nan
    return q, keys, values, table, index, count, first, last


def exact(q, keys, values, table, index, count, first, last):
    out, log_sum_exp = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    page = keys.shape[2]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            listed = range(table.shape[1]) if index is None else index[row, head, : count[row, head]]
            positions = [p for entry in listed for p in range(entry * page, (entry + 1) * page)]
            positions = [p for p in positions if first[row] <= p < last[row]]
            if not positions:
                continue
            k, v = (
                np.stack([x[table[row, p // page], head, p % page] for p in positions])
                for x in (keys, values)
            )
            score = q[row, head].astype(float) @ k.astype(float).T
            weight = np.exp(score - score.max(-1, keepdims=True))
            out[row, head] = weight / weight.sum(-1, keepdims=True) @ v.astype(float)
            log_sum_exp[row, head] = score.max(-1) + np.log(weight.sum(-1))
    return out, log_sum_exp


@pytest.mark.slow
@pytest.mark.parametrize("name", paged_attention.DECODE.backends)
@pytest.mark.parametrize("sizes", sample(SIZES, 0, 3))
def test_back_ends_agree_with_float64(name, sizes):
    for seed in range(4):
        arguments = case(seed, *sizes)
        try:
            actual = jax.jit(paged_attention.DECODE.backends[name])(*arguments)
        except NotImplementedError as declined:
            pytest.skip(str(declined))
        for x, expected in zip(actual, exact(*arguments), strict=True):
            np.testing.assert_allclose(x, expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "xla"])
def test_scores_of_order_100_do_not_overflow(name):
    """Three pieces of a list, whose largest scores differ by more than float32's exponential can hold."""
    q, keys, values, table, *lists, first, last = case(1, 1, 2, 3, 16, 64, 40)
    last, first = np.full_like(last, 2500), np.zeros_like(first)
    keys, values = np.nan_to_num(keys), np.nan_to_num(values)
    keys[table[0, 3]] *= 4  # the largest scores are in the first piece
    arguments = 40 * q, keys, values, table, *lists, first, last
    expected = exact(*arguments)
    assert expected[1].min() > 200
    try:
        result = jax.jit(paged_attention.DECODE.backends[name])(*arguments)
    except NotImplementedError as declined:
        pytest.skip(str(declined))
    for x, y in zip(result, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=3e-4)


@pytest.mark.slow
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_the_chosen_back_end_on_random_lengths(seed):
    arguments = case(seed, 3, 2, 2, 16, 8, 5)
    for x, expected in zip(paged_attention.decode(*arguments), exact(*arguments), strict=True):
        np.testing.assert_allclose(x, expected, atol=2e-5)


@pytest.mark.parametrize("backend", ["cpu", "xla"])
@pytest.mark.parametrize("seed", sample(range(4), 0))
def test_the_share_of_each_page(seed, backend):
    arguments = case(seed, 3, 2, 2, 16, 8, 5)
    q, keys, values, table, index, count, first, last = arguments
    by_page = jax.jit(paged_attention.decode_by_page, static_argnames="backend")
    full, share = by_page(*arguments, backend=backend)
    out, log_sum_exp = exact(*arguments)
    np.testing.assert_allclose(full.out, out, atol=2e-5)
    np.testing.assert_allclose(full.log_sum_exp, log_sum_exp, atol=2e-5)
    for page in range(5):  # one page of all that are read, by itself
        low, high = np.maximum(first, 8 * page), np.minimum(last, 8 * (page + 1))
        alone = exact(q, keys, values, table, index, count, low, high)[1]
        expected = np.exp(alone - np.where(np.isfinite(log_sum_exp), log_sum_exp, 0))
        np.testing.assert_allclose(share[..., page], expected, atol=2e-5)
    np.testing.assert_allclose(np.asarray(share).sum(-1), np.isfinite(log_sum_exp), atol=2e-5)


def test_a_row_has_the_same_bits_whatever_its_neighbours():
    q, keys, values, table, *lists, first, last = case(1, 3, 2, 2, 16, 8, 5)
    last[0], first[0] = 31, 0
    keys, values = np.nan_to_num(keys), np.nan_to_num(values)
    together = paged_attention.decode(q, keys, values, table, *lists, first, last)
    last[1:] = 0
    alone = paged_attention.decode(q, keys, values, table, *lists, first, last)
    np.testing.assert_array_equal(together.out[0], alone.out[0])


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ([0, 0, 2], r"entries below 5; got \[0, 0, 2\]"),
        ([2, 1, 3], r"entries below 5; got \[2, 1, 3\]"),
        ([0, 1, 5], r"entries below 5; got \[0, 1, 5\]"),
        ([-1, 1, 2], r"entries below 5; got \[-1, 1, 2\]"),
    ],
)
def test_lists_out_of_order_or_with_repeats_are_refused(listed, said):
    q, keys, values, table, _, _, first, last = case(0, 3, 2, 2, 16, 8, 5)
    index = np.tile(np.arange(3, dtype=np.int32), (3, 2, 1))
    count = np.full((3, 2), 3, np.int32)
    paged_attention.decode(q, keys, values, table, index, count, first, last)
    index[1, 1] = listed
    with pytest.raises(ValueError, match=rf"page_list\[1, 1\] must be ascending and distinct {said}"):
        paged_attention.decode(q, keys, values, table, index, count, first, last)
    count[1, 1] = 0  # what is not listed may be anything
    paged_attention.decode(q, keys, values, table, index, count, first, last)
    count[1, 1] = 4
    with pytest.raises(ValueError, match=r"num_pages\[1, 1\] must be between 0 and 3; got 4"):
        paged_attention.decode(q, keys, values, table, index, count, first, last)
    with pytest.raises(ValueError, match="both be None; got page_list without num_pages"):
        paged_attention.decode(q, keys, values, table, index, None, first, last)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_are_those_of_the_gathered_form(seed):
    q, keys, values, *places = case(seed, 2, 2, 2, 16, 4, 3)
    keys, values = np.nan_to_num(keys), np.nan_to_num(values)

    def loss(attend):
        def total(*x):
            out, log_sum_exp = attend(*x, *places)
            return jnp.square(out).sum() + jnp.where(jnp.isfinite(log_sum_exp), log_sum_exp, 0).sum()

        return jax.jit(jax.grad(total, (0, 1, 2)))(q, keys, values)

    chex.assert_trees_all_close(
        loss(paged_attention.decode), loss(paged_attention.reference.decode_gathered), atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_of_prefill_are_those_of_the_gathered_form(seed):
    q, keys, values, table, index, count, _, last = case(seed, 2, 2, 2, 16, 4, 3)
    keys, values = np.nan_to_num(keys), np.nan_to_num(values)
    q = np.repeat(q[:, :, :, None], 5, 3) * np.arange(1, 6, dtype=np.float32)[:, None]
    last = np.maximum(last, 5)
    query = last - 5
    places = jax.tree.map(jnp.asarray, (table, index, count, np.zeros((2, 5), np.int32), query, last))
    q, keys, values = map(jnp.asarray, (q, keys, values))

    def gradients(attend):
        total = lambda *x: jnp.square(attend(*x, *places)).sum()
        return jax.jit(jax.grad(total, (0, 1, 2)))(q, keys, values)

    actual = gradients(paged_attention.prefill)
    expected = gradients(lambda *x: paged_attention.reference.prefill_gathered(*x).out)
    chex.assert_trees_all_close(actual, expected, atol=1e-5)
    assert all(np.abs(x).max() > 0 for x in actual)
    exact_forward = paged_attention.prefill(q, keys, values, *places)
    chex.assert_trees_all_close(
        exact_forward, paged_attention.reference.prefill_gathered(q, keys, values, *places).out, atol=1e-5
    )


@pytest.mark.slow
def test_gradients_of_write_are_those_of_the_reference():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    tiles = (normal(5, 2, 4, 16), normal(5, 2, 4, 16))
    summaries = (normal(5, 2, 16), normal(5, 2, 16), normal(5, 2, 16), np.abs(normal(5, 2)))
    k, v = normal(3, 2, 16), normal(3, 2, 16)
    page, slot = jnp.array([1, 4, 0]), jnp.array([0, 2, 3])

    def gradients(write):
        total = lambda *x: sum(jnp.square(y).sum() for part in write(*x, page, slot) for y in part)
        return jax.jit(jax.grad(total, (0, 1, 2, 3)))(tiles, summaries, k, v)

    actual = gradients(paged_attention.write)
    chex.assert_trees_all_close(actual, gradients(paged_attention.write_reference.write), rtol=1e-6)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(actual))


def summarised(seed: int, rows: int, kv_heads: int, group: int, head_dim: int, page: int, per_row: int):
    """Arguments of `select_pages`, and the keys they summarise; memory that no row holds is NaN."""
    q, keys, _, table, *_, last = case(seed, rows, kv_heads, group, head_dim, page, per_row)
    keys = np.where(np.isnan(keys), np.random.default_rng(seed).standard_normal(keys.shape), keys)
    keys = keys.astype(np.float32)
    for row in range(rows):
        for entry in range(per_row):
            keys[table[row, entry], :, max(0, np.clip(last[row] - entry * page, 0, page)) :] = np.nan
    keys[-1] = np.nan
    with np.errstate(invalid="ignore"), jax.debug_nans(False):
        written = ~np.isnan(keys)
        summary = PageSummary(
            np.where(written, keys, np.inf).min(2),
            np.where(written, keys, -np.inf).max(2),
            np.where(written, keys, 0).sum(2),
        )
    empty = ~written.any((1, 2, 3))
    for x in summary:
        x[empty] = np.nan
    information = np.random.default_rng(seed).uniform(0.5, 2, keys.shape[:2]).astype(np.float32)
    drop = np.random.default_rng(seed).uniform(0.05, 0.6, rows).astype(np.float32)
    return (3 * q, summary, information, table, last, drop), keys


def exact_choice(q, summary, information, table, last, drop, page, rules, row, head):
    """Estimated mass, weight and bound of every page of one (row, head), in float64."""
    pages = -(-last[row] // page)
    ids = table[row, :pages]
    filled = np.minimum(last[row] - page * np.arange(pages), page).astype(float)
    low, high, total = (x[ids, head].astype(float) for x in summary)
    query = q[row, head].astype(float)
    bound = np.maximum(query[:, None] * low, query[:, None] * high).sum(-1) + np.log(filled)
    mean = query @ (total / filled[:, None]).T + np.log(filled)
    score = (1 - rules.bound_weight) * mean + rules.bound_weight * bound
    mass = np.exp(score - score.max(-1, keepdims=True))
    mass = (mass / mass.sum(-1, keepdims=True)).mean(0)
    weight = mass * information[ids, head]
    return mass, weight / weight.sum(), bound


@pytest.mark.slow
@pytest.mark.parametrize("name", paged_attention.SELECT_PAGES.backends)
@pytest.mark.parametrize(
    "rules",
    [
        SelectionRules(),
        SelectionRules(sink_pages=0, recent_pages=1, min_pages=1, bound_weight=0.0),
        SelectionRules(2, 3, 8, 1.0),
    ],
)
def test_the_choice_keeps_the_fewest_pages_that_reach_the_mass(name, rules):
    page, sizes = 8, (3, 2, 3, 16, 8, 20)
    for seed in range(3):
        arguments, keys = summarised(seed, *sizes)
        q, summary, information, table, last, drop = arguments
        try:
            choice = paged_attention.SELECT_PAGES.backends[name](
                *map(jnp.asarray, (q,)), summary, *arguments[2:], page, rules
            )
        except NotImplementedError as declined:
            pytest.skip(str(declined))
        index, count, dropped, log_bound = map(np.asarray, choice)
        for row in range(sizes[0]):
            for head in range(sizes[1]):
                pages = -(-last[row] // page)
                kept = index[row, head, : count[row, head]]
                assert (np.diff(kept) > 0).all() and (kept < max(pages, 1)).all()
                if pages == 0:
                    assert count[row, head] == 0
                    continue
                mass, weight, bound = exact_choice(*arguments, page, rules, row, head)
                forced = {p for p in range(pages) if p < rules.sink_pages or p >= pages - rules.recent_pages}
                worth = (weight >= 1e-12).sum()
                assert forced <= set(kept.tolist()) and len(kept) >= min(rules.min_pages, pages, worth)
                need = 1 - drop[row]
                if pages > max(rules.min_pages, rules.sink_pages + rules.recent_pages):
                    assert weight[kept].sum() >= need - 1e-4
                free = [p for p in kept if p not in forced]
                if free and len(kept) > rules.min_pages:  # without its least page it would not be enough
                    assert weight[kept].sum() - weight[free].min() < need + 1e-4
                left = np.setdiff1d(np.arange(pages), kept)
                if len(left) and free:
                    assert weight[left].max() <= weight[free].min() + 1e-6
                np.testing.assert_allclose(dropped[row, head], mass[left].sum(), atol=1e-4)
                if len(left):
                    flat = np.concatenate([keys[table[row, p], head] for p in left])
                    flat = flat[~np.isnan(flat).any(-1)]
                    true = np.log(np.exp(q[row, head].astype(float) @ flat.T.astype(float)).sum(-1))
                    assert (log_bound[row, head] >= true - 1e-4).all()
                    expected = np.log(np.exp(bound[:, left]).sum(-1))
                    np.testing.assert_allclose(log_bound[row, head], expected, atol=1e-3)
                else:
                    assert (log_bound[row, head] == -np.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", paged_attention.SELECT_PAGES.backends)
def test_nothing_is_dropped_where_nothing_may_be(name):
    (q, summary, information, table, last, _), _ = summarised(0, 3, 2, 3, 16, 8, 20)
    try:
        choice = paged_attention.SELECT_PAGES.backends[name](
            jnp.asarray(q), summary, information, table, last, jnp.zeros(3), 8, SelectionRules()
        )
    except NotImplementedError as declined:
        pytest.skip(str(declined))
    for row in range(3):
        pages = -(-last[row] // 8)
        assert (np.asarray(choice.num_pages[row]) == pages).all()
        np.testing.assert_array_equal(choice.page_list[row, :, :pages], np.tile(np.arange(pages), (2, 1)))
    assert (np.asarray(choice.dropped_mass) == 0).all() and (np.asarray(choice.log_bound) == -np.inf).all()
