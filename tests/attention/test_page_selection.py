"""Page selection in the loop: limits in which it equals dense attention, and the certified bound."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import (
    allocate,
    chain,
    generate,
    parameters,
    replay,
    start,
)
from entropic_jax.attention import attend, page_selection
from entropic_jax.attention.page_reader import LayerPages, PageGates
from entropic_jax.attention.page_selection import Selection
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.pallas.paged_attention import PageSummary, SelectionRules, reference
from entropic_jax.state import cache
from entropic_jax.state.cache import ModelShape
from tests import tiny
from tests.marks import exhaustive

pytestmark = pytest.mark.slow

KINDS = ("value", "mass", "surprisal", "mahalanobis")
BOTH = dict(refresh=3, layers_per_list=2)
RARELY = exhaustive(*(("value", dict([change])) for change in BOTH.items()), *((kind, {}) for kind in KINDS))
LOOSE = SelectionRules(sink_pages=1, recent_pages=1, min_pages=2, bound_weight=0.5)
SHAPE = ModelShape(layers=1, heads=4, kv_heads=2, head_dim=16, vocabulary=8, hidden=32)


def begin(texts, choice: Selection | None, drop: float = 0.0, page_size: int = 4, tokens: int = 40):
    m = tiny.model()
    controller = FixedPruning(jnp.float32(drop)) if choice else chain()
    pool = allocate(m.decoder.shape, len(texts), 128, page_size=page_size, moments=True, surprisal=True)
    state = start(
        m.decoder,
        m.params,
        controller,
        pool,
        texts,
        key=jax.random.key(3),
        max_tokens=tokens,
        sample=parameters(len(texts), temperature=0.9),
        page_policy=choice,
    )
    return controller, state


def run(texts, choice: Selection | None, drop: float = 0.0, **sizes):
    m = tiny.model()
    controller, state = begin(texts, choice, drop, **sizes)
    return generate(m.decoder, m.params, controller, state, 40, capacity=40)


@pytest.mark.parametrize("kind", ["value", *exhaustive(*KINDS[1:])])
def test_nothing_dropped_is_dense_token_for_token(kind):
    texts = tiny.prompts(50, 9)
    _, dense = run(texts, None)
    choice = Selection(information=kind, rules=LOOSE, dense_layers=0)
    _, trace = run(texts, choice, 0.0)
    np.testing.assert_array_equal(trace.token, dense.token)
    assert (np.asarray(trace.kept_fraction)[np.asarray(trace.emitted)] == 1).all()
    assert (np.asarray(trace.certificate) == 0).all()


@pytest.mark.parametrize(("kind", "change"), [("surprisal", {}), ("value", BOTH), *RARELY])
def test_less_is_read_and_generation_goes_on(kind, change):
    texts = tiny.prompts(60, 33)
    choice = dataclasses.replace(Selection(information=kind, rules=LOOSE, dense_layers=0), **change)
    state, trace = run(texts, choice, 0.5)
    kept = np.asarray(trace.kept_fraction)
    assert trace.emitted.all() and np.isfinite(trace.entropy).all()
    # The first step reads everything: no controller has run before it.
    assert (kept[0] == 1).all() and (kept[4:] < 0.95).all() and (kept > 0).all()
    spent = np.asarray(state.ledger.bytes_read)
    dense, _ = run(texts, None)
    assert (spent < np.asarray(dense.ledger.bytes_read)).all()
    cache.check(state.cache)


def test_a_list_that_is_kept_between_refreshes_reads_the_pages_that_begin():
    texts = tiny.prompts(60)
    never = Selection(rules=LOOSE, dense_layers=0, refresh=1000)
    _, trace = run(texts, never, 0.9)
    # The list of the first step held everything, and stays; what begins later is read as well.
    np.testing.assert_array_equal(trace.kept_fraction, 1)


def filled(length: int, page: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    pool = cache.allocate(SHAPE, 2, 256, page_size=page)
    k, v = rng.standard_normal((2, 2, length, 2, 16)).astype(np.float32)
    pool, _ = cache.grant(pool, jnp.full(2, length, jnp.int32))
    span = attend.TokenSpan(jnp.zeros(2, jnp.int32), jnp.full(2, length, jnp.int32))
    layer = attend.write(pool.layers[0], pool.table, span, jnp.asarray(k), jnp.asarray(v))
    q = (rng.standard_normal((2, 2, 2, 16)) * rng.uniform(0.2, 3)).astype(np.float32)
    return pool._replace(layers=(layer,)), layer, jnp.asarray(q)


@pytest.mark.parametrize("guard", [0.0, *exhaustive(0.5, 1.0)])
def test_the_certificate_is_never_violated(guard):
    violated, informative = [], 0
    for seed in range(6):
        pool, layer, q = filled(200 - seed, 8, seed)
        first, last = jnp.zeros(2, jnp.int32), jnp.full(2, 200 - seed, jnp.int32)
        for drop in (0.01, 0.2, 0.7):
            choice = Selection(rules=LOOSE._replace(bound_weight=guard), dense_layers=0)
            reader = choice.reader(pool, jnp.full(2, drop), (), first)
            out = reader.read(layer, q, first, last)
            dense = choice.reader(pool, jnp.zeros(2), (), first).read(layer, q, first, last)
            change = np.linalg.norm(np.asarray(out - dense), axis=-1).max((1, 2))
            bound = np.asarray(reader.total().certificate)
            violated += list(change[change > bound + 1e-5])
            informative += (change > 1e-4).sum()
    assert not violated
    assert informative > 10  # else nothing was put to the test


def test_shared_lists_certify_nothing_they_do_not_know():
    pool, layer, q = filled(200, 8)
    choice = Selection(rules=LOOSE, dense_layers=0, layers_per_list=2)
    last, zero = jnp.full(2, 200, jnp.int32), jnp.zeros(2, jnp.int32)

    @jax.jit
    def read(q):
        reader = choice.reader(pool, jnp.full(2, 0.7), (), zero)
        reader.read(layer, q, zero, last)
        out = reader.read(layer, -q, zero, last)  # the list was made for the opposite query
        dense = choice.reader(pool, jnp.zeros(2), (), zero).read(layer, -q, zero, last)
        return out - dense, reader.layer_stats[1].certificate

    difference, certificate = read(q)
    change = np.linalg.norm(np.asarray(difference), axis=-1).max((1, 2))
    assert (change <= np.asarray(certificate)).all()


def test_soft_selection_becomes_the_hard_one_but_for_the_page_at_the_floor():
    pool, layer, q = filled(200, 8)
    last, drop = jnp.full(2, 200, jnp.int32), jnp.full(2, 0.4)
    inputs = (q, PageSummary(layer.key_min, layer.key_max, layer.key_sum), layer.value_norm, pool.table, last)
    rules = LOOSE._replace(min_pages=0)
    choice = reference.select_pages(*inputs, drop, 8, rules)
    known = reference.estimate_pages(*inputs, 8, rules)
    gate = np.asarray(reference.page_gates(known.weight, known.always_kept, drop, 1e-4))
    for row, head in np.ndindex(2, 2):
        kept = np.zeros(gate.shape[-1])
        kept[np.asarray(choice.page_list[row, head, : choice.num_pages[row, head]])] = 1
        real = np.asarray(known.in_use[row, 0])
        assert (np.abs(gate[row, head] - kept)[real] > 0.05).sum() <= 1
    reached = (gate * np.asarray(known.weight)).sum(-1)
    np.testing.assert_allclose(reached, 0.6, atol=1e-4)


def test_the_dropped_mass_of_soft_selection_is_that_of_the_hard_one():
    pool, layer, q = filled(200, 8)
    zero, last, drop = jnp.zeros(2, jnp.int32), jnp.full(2, 200, jnp.int32), jnp.full(2, 0.6)
    rules = LOOSE._replace(min_pages=0)

    @partial(jax.jit, static_argnums=0)
    def dropped(softness, q):
        reader = Selection(rules=rules, dense_layers=0, softness=softness).reader(pool, drop, (), zero)
        reader.read(layer, q, zero, last)
        return reader.total().dropped_mass

    hard = np.asarray(dropped(0.0, q))
    assert (hard > 0.2).all()
    np.testing.assert_allclose(dropped(1e-4, q), hard, atol=0.08)  # one page may be open in part


@pytest.mark.parametrize("length", [17, 24, 33])
def test_pages_far_from_the_mean_value_weigh_more(length):
    """Mahalanobis: the mean over dimensions and positions of (v − mean)² / variance, per page and head."""
    rng, page = np.random.default_rng(length), 8
    v = rng.standard_normal((1, length, 2, 16)).astype(np.float32) * rng.uniform(0.2, 3, (1, 1, 2, 16))
    v = v.astype(np.float32)
    pool = cache.allocate(SHAPE, 1, 64, page_size=page, moments=True)
    pool, _ = cache.grant(pool, jnp.array([length], jnp.int32))
    span = attend.TokenSpan(jnp.zeros(1, jnp.int32), jnp.array([length], jnp.int32))
    layer = attend.write(pool.layers[0], pool.table, span, jnp.asarray(v), jnp.asarray(v))
    _, weight, table = page_selection.weigh_pages("mahalanobis", layer, pool, jnp.array([length], jnp.int32))
    far = (v[0] - v[0].mean(0)) ** 2 / v[0].var(0)
    for number, start_ in enumerate(range(0, length, page)):  # the last page may have one position
        expected = far[start_ : start_ + page].mean((0, 2))
        np.testing.assert_allclose(weight[table[0, number]], expected, rtol=2e-3)


def test_rows_that_share_pages_weigh_them_by_their_values_alone():
    """A fork with very different values after the shared pages, beside its source and by itself."""
    rng, page, lengths = np.random.default_rng(0), 8, jnp.array([30, 40], jnp.int32)
    v = rng.standard_normal((2, 40, 2, 16)).astype(np.float32)
    v[1, :24], v[1, 24:] = v[0, :24], 20 * v[1, 24:]
    pool = cache.allocate(SHAPE, 2, 64, page_size=page, moments=True, surprisal=True)
    pool, _ = cache.grant(pool, jnp.array([24, 0], jnp.int32))
    ends = jnp.array([24, 0], jnp.int32)
    span = attend.TokenSpan(jnp.zeros(2, jnp.int32), ends)
    layer = attend.write(pool.layers[0], pool.table, span, jnp.asarray(v), jnp.asarray(v))
    pool = pool._replace(surprisal=jnp.arange(17, dtype=jnp.float32), layers=(layer,))
    pool, _ = cache.fork(pool, jnp.array([0]), jnp.array([1]), jnp.array([24], jnp.int32))
    pool, _ = cache.grant(pool, lengths)
    span, rest = attend.TokenSpan(jnp.full(2, 24, jnp.int32), lengths - 24), jnp.asarray(v[:, 24:])
    layer = attend.write(pool.layers[0], pool.table, span, rest, rest)
    assert pool.table[0, :3].tolist() == pool.table[1, :3].tolist()
    _, weight, table = page_selection.weigh_pages("mahalanobis", layer, pool, lengths)
    for row, length in enumerate(lengths.tolist()):
        values = v[row, :length].astype(np.float64)
        far = (values - values.mean(0)) ** 2 / values.var(0)
        for number, begin_ in enumerate(range(0, length, page)):
            expected = far[begin_ : begin_ + page].mean((0, 2))
            np.testing.assert_allclose(weight[table[row, number]], expected, rtol=2e-3)
    q = jnp.asarray(rng.standard_normal((2, 2, 2, 16)), jnp.float32)
    for kind in KINDS:
        step = Selection(information=kind, rules=LOOSE, dense_layers=0)
        choose = lambda last, q=q, step=step: step.reader(
            pool, jnp.full(2, 0.5), (), jnp.zeros(2, jnp.int32)
        ).chooser.choose(0, layer, q, last)
        both = choose(lengths)
        for row in (0, 1):  # the other row holds nothing
            alone = choose(jnp.zeros(2, jnp.int32).at[row].set(lengths[row]))
            assert pages(both, row) == pages(alone, row)
            np.testing.assert_array_equal(both.dropped_mass[row], alone.dropped_mass[row])


def chosen(choice: Selection, number: int, limit, memory=(), tokens=(0, 0), last=(200, 200), sign: int = 1):
    """What a step with these limits chooses for a layer, and the lists that it leaves."""
    pool, layer, q = filled(200, 8)
    step = choice.reader(pool, jnp.array(limit, jnp.float32), memory, jnp.array(tokens, jnp.int32)).chooser
    for earlier in range(number):
        step.choose(earlier, layer, sign * q, jnp.array(last, jnp.int32))
    return step.choose(number, layer, sign * q, jnp.array(last, jnp.int32)), step.memory()


def pages(choice, row: int) -> list[list[int]]:
    return [list_[:n].tolist() for list_, n in zip(choice.page_list[row], choice.num_pages[row], strict=True)]


def test_the_first_layer_that_chooses_may_drop_more():
    plain = Selection(rules=LOOSE, dense_layers=0)
    scaled = dataclasses.replace(plain, first_layer_scale=2.0, dense_layers=1)
    assert chosen(scaled, 0, (0.3, 0.3))[0] is None
    assert page_selection.MAX_DROPPED_MASS == 0.95
    alone = {limit: chosen(plain, 0, (limit, limit))[0] for limit in (0.3, 0.6, 0.95)}
    assert len({pages(choice, 0).__repr__() for choice in alone.values()}) == 3
    for number, limit, same in ((1, 0.3, 0.6), (2, 0.3, 0.3), (1, 0.6, 0.95)):
        (choice, memory), expected = chosen(scaled, number, (limit, limit)), alone[same]
        assert isinstance(choice, LayerPages) and memory == ()
        assert [pages(choice, row) for row in (0, 1)] == [pages(expected, row) for row in (0, 1)]
        np.testing.assert_array_equal(choice.dropped_mass, expected.dropped_mass)


def test_the_first_layer_that_chooses_drops_no_more_than_the_most():
    rules = LOOSE._replace(sink_pages=0, recent_pages=1, min_pages=1)
    plain, scaled = (Selection(rules=rules, dense_layers=0, first_layer_scale=scale) for scale in (1.0, 4.0))
    capped, most, all_of_it = (
        chosen(choice, 0, (limit, limit))[0]
        for choice, limit in ((scaled, 0.9), (plain, page_selection.MAX_DROPPED_MASS), (plain, 3.6))
    )
    assert [pages(capped, row) for row in (0, 1)] == [pages(most, row) for row in (0, 1)]
    assert (most.num_pages > all_of_it.num_pages).any()  # without the bound, fewer would be read


def test_layers_of_a_group_take_the_lists_of_its_first():
    shared = Selection(rules=LOOSE, dense_layers=0, layers_per_list=2)
    first, follower = (chosen(shared, number, (0.5, 0.5))[0] for number in (0, 1))
    assert pages(follower, 0) == pages(first, 0) and follower.log_bound is None
    assert first.is_new.all() and not follower.is_new.any() and not follower.summaries_read.any()


@pytest.mark.parametrize(
    ("rules", "limit", "read"),
    [
        (LOOSE, (0.5, 0.0), [True, False]),
        (LOOSE._replace(min_pages=25), (0.5, 0.5), [False, False]),
        (LOOSE._replace(min_pages=24), (0.5, 0.5), [True, True]),
        (LOOSE._replace(sink_pages=12, recent_pages=13), (0.5, 0.5), [False, False]),
    ],
)
def test_summaries_are_read_where_a_page_may_be_left_out(rules, limit, read):
    choice, _ = chosen(Selection(rules=rules, dense_layers=0), 0, limit)  # of 25 pages
    assert choice.summaries_read.tolist() == read


def test_lists_are_kept_between_refreshes_with_the_pages_that_begin():
    pool, _, q = filled(200, 8)
    kept, anew = (Selection(rules=LOOSE, dense_layers=0, refresh=n) for n in (2, 1))
    memory = kept.memory(SHAPE, pool)
    assert anew.memory(SHAPE, pool) == () and len(memory) == 1
    assert [x.shape for x in memory[0]] == [(2, 2, pool.table.shape[1]), (2, 2), (2,), (2, 2)]
    assert not any(np.asarray(x).any() for x in memory[0])
    limit, ends = (0.5, 0.5), (184, 184)  # 23 pages
    before, memory = chosen(kept, 0, limit, memory, tokens=(2, 4), last=ends)
    expected, _ = chosen(anew, 0, limit, last=ends)
    assert [pages(before, row) for row in (0, 1)] == [pages(expected, row) for row in (0, 1)]
    after, memory = chosen(kept, 0, limit, memory, tokens=(4, 1), sign=-1)
    assert after.is_new.tolist() == [True, False] and after.summaries_read.tolist() == [True, False]
    assert pages(after, 0) == pages(chosen(anew, 0, limit, sign=-1)[0], 0)
    assert pages(after, 1) == [[*list_, 23, 24] for list_ in pages(before, 1)]
    for list_, n in zip(after.page_list[1], after.num_pages[1], strict=True):
        assert not list_[int(n) :].any()
    assert after.log_bound.shape == q.shape[:3] and np.isinf(after.log_bound[1]).all()
    assert memory[0].row_pages.tolist() == [25, 25]
    assert memory[0].num_pages.tolist() == after.num_pages.tolist()


def test_gates_are_open_where_nothing_may_be_dropped():
    soft = Selection(rules=LOOSE._replace(min_pages=0), dense_layers=0, softness=0.2)
    choice, _ = chosen(soft, 0, (0.0, 0.6))
    assert (
        isinstance(choice, PageGates) and (choice.gate[0] == 1).all() and (choice.dropped_mass[0] == 0).all()
    )
    assert (choice.gate[1] < 0.9).any()


def test_pages_without_tokens_have_no_information():
    pool = cache.allocate(SHAPE, 1, 64, page_size=8, moments=True, surprisal=True)
    pool, length = cache.grant(pool, jnp.array([17], jnp.int32))[0], jnp.array([17], jnp.int32)
    pool = pool._replace(surprisal=jnp.full(9, 8.0))
    _, weight, table = page_selection.weigh_pages("surprisal", pool.layers[0], pool, length)
    expected = np.zeros(8)
    expected[:3] = [1, 1, 8]
    np.testing.assert_allclose(weight[table[0]], np.broadcast_to(expected[:, None], (8, 2)))
    mass = page_selection.weigh_pages("mass", pool.layers[0], pool, length)
    np.testing.assert_array_equal(mass.weight, 1)
    span, v = attend.TokenSpan(jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)), jnp.ones((1, 1, 2, 16))
    layer = attend.write(pool.layers[0], pool.table, span, v, v)
    alone = page_selection.weigh_pages("mahalanobis", layer, pool, jnp.ones(1, jnp.int32))
    assert not alone.weight.any()  # a single value is the mean


def test_layers_share_lists_in_groups():
    choice = Selection(dense_layers=2, layers_per_list=2)
    assert [choice.groups(layers) for layers in (1, 2, 3, 4, 5, 8)] == [0, 0, 1, 1, 2, 3]
    assert [Selection().groups(layers) for layers in (2, 3, 4)] == [0, 1, 2]  # by default, one a layer


def test_the_gradient_of_soft_selection_is_the_difference_quotient():
    m = tiny.model()
    (text,) = tiny.prompts(60)
    choice = Selection(rules=LOOSE, dense_layers=0, softness=0.2)

    def loss(drop):
        _, state = begin([text[:40]], choice)
        _, trace = replay(m.decoder, m.params, FixedPruning(drop), state, jnp.array([text[40:]], jnp.int32))
        return trace.surprisal.mean()

    gradient = jax.grad(loss)(jnp.float32(0.5))
    numeric = (loss(jnp.float32(0.502)) - loss(jnp.float32(0.498))) / 0.004
    assert abs(gradient) > 1e-6
    np.testing.assert_allclose(gradient, numeric, rtol=0.05, atol=1e-4)


def test_the_surprisals_of_a_page_are_those_of_its_tokens():
    m = tiny.model()
    (text,) = tiny.prompts(30)
    _, state = begin([text], None, page_size=4, tokens=9)
    state, trace = generate(m.decoder, m.params, chain(), state, 9, capacity=9)
    _, fresh = begin([text[:1]], None, page_size=4, tokens=60)
    tokens = text[1:] + np.asarray(trace.token[:-1, 0]).tolist()
    _, scored = replay(m.decoder, m.params, chain(), fresh, jnp.array([tokens], jnp.int32))
    expected = np.concatenate([[0.0], np.asarray(scored.surprisal[:, 0])])
    sums = np.asarray(state.cache.surprisal)[np.asarray(state.cache.table[0])]
    for entry in range(-(-len(expected) // 4)):
        np.testing.assert_allclose(sums[entry], expected[4 * entry : 4 * entry + 4].sum(), rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(information="taste"), "information must be one of value, mass, .*; got 'taste'"),
        (dict(refresh=0), "refresh must be at least 1; got 0"),
        (dict(layers_per_list=0), "layers_per_list must be at least 1; got 0"),
        (dict(dense_layers=-1), "dense_layers must be at least 0; got -1"),
        (dict(first_layer_scale=0.0), "first_layer_scale must be above 0; got 0.0"),
        (dict(rules=SelectionRules(bound_weight=2.0)), "bound_weight between 0 and 1; got"),
        (dict(rules=SelectionRules(min_pages=-1)), "min_pages of at least 0"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Selection(**change)


def test_information_that_the_cache_does_not_keep_is_refused():
    pool, layer, q = filled(20, 8)
    for kind in ("surprisal", "mahalanobis"):
        with pytest.raises(ValueError, match=kind):
            page_selection.weigh_pages(kind, layer, pool, jnp.full(2, 20, jnp.int32))
