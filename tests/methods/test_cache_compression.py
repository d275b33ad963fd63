"""KV cache compression: rankings, kept entries, and released pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, parameters, replay, start
from entropic_jax.attention.page_selection import Selection
from entropic_jax.methods import cache_compression
from entropic_jax.methods.adakv import AdaKV, whole_pages
from entropic_jax.methods.entropy_prefill import EntropyPrefill
from entropic_jax.methods.h2o import H2O
from entropic_jax.methods.latent_compression import LatentCompression
from entropic_jax.methods.method import Method
from entropic_jax.methods.policies import top_mask
from entropic_jax.methods.presets import preset
from entropic_jax.methods.registry import add_method
from entropic_jax.methods.snapkv import SnapKV
from entropic_jax.methods.streaming_llm import StreamingLLM
from entropic_jax.methods.window import Window, update_window
from entropic_jax.pallas.paged_attention import SelectionRules
from entropic_jax.state import State
from entropic_jax.state import cache as pool_of
from tests import tiny
from tests.marks import exhaustive

PAGE, BUDGET = 4, 30
KINDS = {
    "snapkv": SnapKV(budget=BUDGET, window=8, pool=5),
    "latent": LatentCompression(budget=BUDGET, window=8, delay=5),
    "adakv": AdaKV(budget=BUDGET, window=8, pool=5),
    "h2o": H2O(budget=BUDGET),
    "streaming": StreamingLLM(budget=BUDGET),
}


def started(page_policy=None, lengths=(90, 41), controller=None, tokens=39) -> State:
    model = tiny.model()
    pool = allocate(model.decoder.shape, len(lengths), 128, page_size=PAGE)
    pool = pool._replace(layers=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool.layers))
    return start(
        model.decoder,
        model.params,
        chain() if controller is None else controller,
        pool,
        tiny.prompts(*lengths),
        key=jax.random.key(0),
        max_tokens=tokens,
        sample=parameters(len(lengths), temperature=0.0),
        page_policy=page_policy,
    )


def run(state: State, controller=None) -> tuple[list[list[int]], State]:
    """Generate to the end; the tokens of each row."""
    model = tiny.model()
    rows = state.token.shape[0]
    out: list[list[int]] = [[] for _ in range(rows)]
    while (np.asarray(state.status) == 0).any():
        state, trace = cache_compression.generate(
            model.decoder, model.params, chain() if controller is None else controller, state, 16
        )
        emitted, token = np.asarray(trace.emitted), np.asarray(trace.token)
        for row in range(rows):
            out[row] += token[emitted[:, row], row].tolist()
    return out, state


def surprisal(state: State) -> np.ndarray:
    model = tiny.model()
    tokens = np.random.default_rng(1).integers(0, 96, (state.token.shape[0], 6))
    _, trace = replay(model.decoder, model.params, chain(), state, jnp.asarray(tokens, jnp.int32))
    return np.asarray(trace.surprisal)


def entries(state: State, row: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values `[kv_heads, positions, head_dim]` that a row holds in a layer."""
    layer, table = state.cache.layers[number], np.asarray(state.cache.table[row])
    flat = lambda x: np.asarray(x)[table].swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3])
    return flat(layer.keys), flat(layer.values)


def attended(q: np.ndarray, keys: np.ndarray, length: int) -> np.ndarray:
    """In float64: mean attention of the newest queries `[kv_heads, group, window, head_dim]`."""
    window = q.shape[2]
    out = np.zeros(keys.shape[:2])
    for head in range(q.shape[0]):
        for queries in q[head].astype(np.float64):
            for i, query in enumerate(queries):
                held = length - window + i + 1
                score = keys[head, :held].astype(np.float64) @ query
                weight = np.exp(score - score.max())
                out[head, :held] += weight / weight.sum() / (q.shape[1] * window)
    return out


def neighbours(score: np.ndarray, size: int, how) -> np.ndarray:
    padded = np.pad(score, ((0, 0), (size // 2, size // 2)))
    return how(np.lib.stride_tricks.sliding_window_view(padded, size, 1), -1)


@pytest.mark.parametrize("kind", ["snapkv", "latent"])
def test_the_ranking_is_what_it_is_said_to_be(kind):
    policy = KINDS[kind]
    state = started(Method(compression=policy))
    for row, length in enumerate((89, 40)):
        for number in range(2):
            observed = state.page_policy_state.observed[number]
            keys = jnp.asarray(np.stack([entries(state, r, number)[0] for r in range(2)]))
            rank = np.asarray(policy.score_entries(observed, keys, state.length))[row]
            plain = attended(np.asarray(observed.q[row]), np.asarray(keys[row]), length)[:, :length]
            expected = neighbours(plain, policy.pool, np.max if policy.pooling == "max" else np.mean)
            old = length - policy.window
            np.testing.assert_allclose(rank[:, :old], expected[:, :old], rtol=2e-4, atol=1e-7)
            assert (rank[:, old:length] == np.inf).all() and (rank[:, length:] == -np.inf).all()


def test_the_window_holds_the_newest_queries_of_any_chunks():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, 2, 20, 8)).astype(np.float32)
    window = Window(jnp.zeros((2, 2, 2, 6, 8)), jnp.zeros(2, jnp.int32))
    done = np.zeros(2, int)
    for counts in ((8, 3), (0, 8), (1, 1), (8, 0)):
        piece = np.zeros((2, 2, 2, 8, 8), np.float32)
        for row, count in enumerate(counts):
            piece[row, :, :, :count] = q[row, :, :, done[row] : done[row] + count]
        done += counts
        seen = type(
            "LayerQueries", (), dict(q=jnp.asarray(piece), valid=jnp.arange(8) < jnp.array(counts)[:, None])
        )
        window = update_window(window, seen)
    for row in range(2):
        np.testing.assert_array_equal(window.q[row], q[row, :, :, done[row] - 6 : done[row]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latent", "streaming", *exhaustive("snapkv", "h2o")])
def test_what_is_kept_is_the_best_in_order_and_pages_come_back(kind):
    policy = KINDS[kind]
    before = started(Method(compression=policy), (90, 20))
    old = [entries(before, 0, number) for number in range(2)]
    free = int(before.cache.available)
    keys = [jnp.asarray(np.stack([entries(before, r, n)[0] for r in range(2)])) for n in range(2)]
    ranks = [
        np.asarray(policy.score_entries(o, k, before.length))
        for o, k in zip(before.page_policy_state.observed, keys, strict=True)
    ]
    state = cache_compression.compress(before, jnp.ones(2, bool))
    pool_of.check(state.cache)
    assert np.asarray(state.length).tolist() == [BUDGET, 19]
    assert np.asarray(state.evicted).tolist() == [89 - BUDGET, 0]
    # 90 positions in 23 pages of 4; 30 in 8. The other row holds less than the budget and is left alone.
    assert int(state.cache.available) == free + -(-89 // PAGE) - -(-BUDGET // PAGE)
    for number in range(2):
        layer, kept = state.cache.layers[number], entries(state, 0, number)
        for head in range(2):
            chosen = sorted(np.argsort(-ranks[number][0, head], kind="stable")[:BUDGET])
            for new, was in zip(kept, old[number], strict=True):
                np.testing.assert_array_equal(new[head, :BUDGET], was[head, chosen])
        page = int(state.cache.table[0, 7])  # the last one, with two entries
        two = slice(BUDGET - 2, BUDGET)
        np.testing.assert_array_equal(layer.key_min[page], kept[0][:, two].min(1))
        np.testing.assert_array_equal(layer.key_max[page], kept[0][:, two].max(1))
        np.testing.assert_allclose(layer.key_sum[page], kept[0][:, two].sum(1), rtol=1e-5)
        norm = np.linalg.norm(kept[1][:, two], axis=-1).max(1)
        np.testing.assert_allclose(layer.value_norm[page], norm, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h2o", *exhaustive(*(kind for kind in KINDS if kind != "h2o"))])
def test_a_full_budget_is_dense(kind):
    dense, _ = run(started())
    full, state = run(started(Method(compression=dataclasses.replace(KINDS[kind], budget=128))))
    assert full == dense
    assert np.asarray(state.evicted).tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adakv", "latent", *exhaustive("snapkv", "h2o", "streaming")])
def test_generation_goes_on_as_long_as_it_was_to(kind):
    out, state = run(started(Method(compression=KINDS[kind])))
    assert [len(x) for x in out] == [39, 39]
    assert np.isfinite(np.asarray(state.measured.entropy)).all()
    pool_of.check(state.cache)
    assert (np.asarray(state.evicted) > 0).all()
    assert (np.asarray(state.length + state.evicted) == [128, 79]).all()


@pytest.mark.slow
def test_what_is_left_is_attended_to_at_its_old_positions():
    """Moving the first page and the newest eight together does not change what the model computes."""
    moved = cache_compression.compress(
        started(Method(compression=StreamingLLM(budget=32, sinks=4)), (61,)), jnp.ones(1, bool)
    )
    assert int(moved.length[0]) == 32
    rules = SelectionRules(sink_pages=1, recent_pages=8, min_pages=0)
    page_list = started(Selection(information="mass", rules=rules, dense_layers=0, page_size=PAGE), (61,))
    page_list = page_list._replace(action=page_list.action._replace(dropped_mass_limit=jnp.full(1, 0.999)))
    dense = surprisal(started(None, (61,)))[:4]
    np.testing.assert_allclose(surprisal(moved)[:4], surprisal(page_list)[:4], atol=1e-5)
    assert np.abs(surprisal(moved)[:4] - dense).max() > 1e-3


def test_adakv_shares_a_layers_budget():
    rng = np.random.default_rng(0)
    rank = rng.random((1, 2, 64)).astype(np.float32)
    rank[0, 0] *= 0.01  # a head of low ranks: it keeps its floor
    policy = AdaKV(budget=20, floor=0.5)
    pages = np.asarray(policy.pages_per_head(jnp.asarray(rank), PAGE))
    assert pages.tolist() == [[10 // PAGE + 1, 30 // PAGE]]  # 40 entries: ten whole pages
    even = np.asarray(AdaKV(budget=20, floor=0.5).pages_per_head(jnp.asarray(rank[:, 1:].repeat(2, 1)), PAGE))
    assert even.tolist() == [[20 // PAGE, 20 // PAGE]]


def test_pages_that_rounding_leaves_over_are_given_out():
    rng = np.random.default_rng(0)
    for _ in range(20):
        entries = rng.integers(0, 90, (3, 5))
        held = entries + rng.integers(0, 2 * PAGE, (3, 1))
        pages = np.asarray(whole_pages(jnp.asarray(entries), jnp.asarray(held), PAGE))
        room = ((entries // PAGE + 1) * PAGE <= held).sum(1)
        left_over = entries.sum(1) // PAGE - (entries // PAGE).sum(1)
        assert (pages.sum(1) == (entries // PAGE).sum(1) + np.minimum(left_over, room)).all()
        assert (pages * PAGE <= held).all() and ((pages - entries // PAGE) <= 1).all()
    tied = whole_pages(jnp.array([[6, 7, 7]]), jnp.full((1, 3), 64), 4)
    assert tied.tolist() == [[1, 2, 2]]  # of twenty entries; the largest remainders first


@pytest.mark.slow
def test_adakv_reads_what_each_head_holds():
    before = started(Method(compression=KINDS["adakv"]), (90, 60))
    free = int(before.cache.available)
    held_before = np.asarray(before.cache.granted).sum()
    state = cache_compression.compress(before, jnp.ones(2, bool))
    pool_of.check(state.cache)
    pages = np.stack(
        [np.asarray(h) for h in state.page_policy_state.held_pages], 1
    )  # [rows, layers, kv_heads]
    assert (pages.sum(2) * PAGE <= 2 * BUDGET).all() and (pages.min((1, 2)) < pages.max((1, 2))).any()
    assert (np.asarray(state.length) == pages.max((1, 2)) * PAGE).all()
    assert int(state.cache.available) - free == held_before - np.asarray(state.cache.granted).sum()
    model = tiny.model()
    poisoned = jax.tree.map(jnp.copy, state)
    layers = []
    for number, layer in enumerate(poisoned.cache.layers):  # what a head does not hold may be anything
        keys, values = layer.keys, layer.values
        for row in range(2):
            for head in range(2):
                for page in range(int(pages[row, number, head]), int(pages[row].max())):
                    physical = int(state.cache.table[row, page])
                    keys, values = (
                        keys.at[physical, head].set(jnp.nan),
                        values.at[physical, head].set(jnp.nan),
                    )
        layers.append(layer._replace(keys=keys, values=values))
    poisoned = poisoned._replace(cache=poisoned.cache._replace(layers=tuple(layers)))
    np.testing.assert_array_equal(surprisal(poisoned), surprisal(state))
    _, trace = replay(model.decoder, model.params, chain(), state, jnp.zeros((2, 1), jnp.int32))
    assert np.isfinite(np.asarray(trace.surprisal)).all()


def test_shared_pages_are_left_alone():
    state = started(Method(compression=KINDS["snapkv"]), (90, 60))
    cache = pool_of.retain(state.cache, state.cache.table[0, :1])  # as a prefix cache does
    kept = jax.tree.map(np.asarray, cache.layers)
    after = cache_compression.compress(state._replace(cache=cache), jnp.ones(2, bool))
    assert np.asarray(after.length).tolist() == [89, BUDGET]
    for page in np.asarray(after.cache.table[0, :23]):
        np.testing.assert_array_equal(after.cache.layers[0].keys[page], kept[0].keys[page])


@pytest.mark.slow
def test_pruning_after_compression_after_sparse_prefill():
    """All three combined; with budgets that keep and read everything, this is plain generation."""
    fine = Selection(
        dense_layers=1, page_size=PAGE, rules=SelectionRules(sink_pages=1, recent_pages=2, min_pages=3)
    )
    sparse = EntropyPrefill(base=16, segment=16, dense_below=32, page_size=PAGE)
    both = Method(sparse, KINDS["latent"], fine)
    control = preset("meso-lossy").controller
    out, state = run(started(both, controller=control), control)
    assert [len(x) for x in out] == [39, 39]
    pool_of.check(state.cache)
    complete = Method(
        dataclasses.replace(sparse, base=1024), dataclasses.replace(KINDS["latent"], budget=128), fine
    )
    assert run(started(complete))[0] == run(started())[0]


def test_methods_by_name():
    assert add_method("snapkv", preset("off"), budget=99).page_policy.compression.budget == 99
    assert (
        add_method("entropyinfer", preset("meso-lossy")).page_policy.decode_policy
        is preset("meso-lossy").page_policy
    )
    with pytest.raises(ValueError, match=r"name must be one of dense, entropyinfer.*; got 'snap'"):
        add_method("snap", preset("off"))
    with pytest.raises(ValueError, match="base must be an integer of at least 64; got 8"):
        add_method("criti-prefill", preset("off"), base=8)
    with pytest.raises(ValueError, match="which selects the pages of steps"):
        add_method("quest", preset("meso-lossy"))
    with pytest.raises(ValueError, match="heads hold different pages"):
        add_method("adakv", preset("full-lossy"))


@pytest.mark.slow
def test_quest_reads_the_pages_of_greatest_bound_and_everything_where_the_budget_allows():
    way = add_method("quest", preset("off"), budget=64)
    dense, _ = run(started())
    everything = add_method("quest", preset("off"), budget=256)
    assert (
        run(started(everything.page_policy, controller=everything.controller), everything.controller)[0]
        == dense
    )
    _, state = run(started(way.page_policy, controller=way.controller), way.controller)
    assert int(way.page_policy.decode_policy.rules.min_pages) == 4
    assert np.asarray(state.status).tolist() == [2, 2]


def test_the_best_of_equals_come_first():
    flags = top_mask(jnp.zeros((1, 6)), jnp.arange(6) != 1, jnp.array([2]))
    assert np.flatnonzero(np.asarray(flags[0])).tolist() == [0, 2]
