"""Invariants of the loop: what must not change a sequence, and what must end it."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, loop, models, parameters, replay, start
from entropic_jax.models import checkpoint
from entropic_jax.phases import prefill
from entropic_jax.state import FAILED, FULL, RUNNING, STOPPED, State, Trace
from tests import tiny

WARM = dict(temperature=0.9, top_p=0.95)


def dense_logits(tokens: list[int]) -> jax.Array:
    """Logits of every position from attention over the whole sequence at once."""
    m = tiny.model()

    def attend(q, k, v, layer, window=None):
        group = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
        score = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        score = jnp.where(jnp.tril(jnp.ones(score.shape[-2:], bool)), score, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(score, -1), v), layer

    ids = jnp.array([tokens], jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    hidden, _ = m.decoder.hidden(m.params, ids, positions, (None,) * m.decoder.shape.layers, attend)
    return m.decoder.logits(m.params, hidden)[0]


@pytest.mark.slow
def test_greedy_generation_is_the_argmax_of_dense_attention():
    texts = tiny.prompts(19, 1, 40)
    out, state, _ = tiny.finish(tiny.begin(texts, temperature=0.0))
    for text, tokens in zip(texts, out, strict=True):
        logits = dense_logits(text + tokens[:-1])
        assert logits.argmax(-1)[len(text) - 1 :].tolist() == tokens
    assert (np.asarray(state.status) == FULL).all()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [4, 16, 128])
def test_paged_logits_equal_dense_ones(page_size):
    (text,) = tiny.prompts(50)
    state = tiny.begin([text[:30]], page_size=page_size, max_tokens=40)
    m = tiny.model()
    _, trace = replay(m.decoder, m.params, chain(), state, jnp.array([text[30:]], jnp.int32))
    log_p = jax.nn.log_softmax(dense_logits(text))
    expected = -log_p[jnp.arange(29, 49), jnp.array(text[30:])]
    np.testing.assert_allclose(trace.surprisal[:, 0], expected, atol=1e-4)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)[29:49]
    np.testing.assert_allclose(trace.entropy[:, 0], entropy, atol=1e-4)


@pytest.mark.slow
def test_a_sequence_does_not_depend_on_its_neighbours_or_on_the_steps_of_a_launch():
    a, b, c, d = tiny.prompts(17, 5, 33, 9)
    settings = dict(seeds=[3, 4, 5, 6], **WARM)
    crowd, _, _ = tiny.finish(tiny.begin([a, b, c, d], **settings), steps=64)
    others = [a, *tiny.prompts(60, 2, 11, seed=9)]
    alone, _, _ = tiny.finish(tiny.begin(others, **{**settings, "seeds": [3, 8, 9, 10]}), steps=3)
    assert crowd[0] == alone[0]
    assert crowd == tiny.finish(tiny.begin([a, b, c, d], **settings), steps=1)[0]
    assert crowd[1] != tiny.finish(tiny.begin([a, b, c, d], **{**settings, "seeds": [0, 1, 2, 3]}))[0][1]


def test_prefill_chunks_move_logits_by_rounding_only(monkeypatch):
    (text,) = tiny.prompts(60)
    m = tiny.model()
    surprisals = []
    for chunk in (8, 64):
        monkeypatch.setattr(prefill, "PREFILL_CHUNK", chunk)
        _, trace = replay(
            m.decoder, m.params, chain(), tiny.begin([text[:50]]), jnp.array([text[50:]], jnp.int32)
        )
        surprisals.append(trace.surprisal)
    np.testing.assert_allclose(*surprisals, atol=1e-4)


@pytest.mark.slow
def test_resuming_a_saved_state_equals_running_through(tmp_path):
    m = tiny.model()
    texts = tiny.prompts(12, 30)
    settings = dict(frequency_penalty=0.3, **WARM)
    through, _, _ = tiny.finish(tiny.begin(texts, **settings))
    state, trace = generate(m.decoder, m.params, chain(), tiny.begin(texts, **settings), 7, capacity=64)
    checkpoint.save(tmp_path / "state", state)
    before = np.asarray(trace.token)[:7].T.tolist()
    del state
    restored = checkpoint.restore(tmp_path / "state", tiny.begin(texts, **settings))
    after, _, _ = tiny.finish(restored)
    assert [x + y for x, y in zip(before, after, strict=True)] == through


def test_memory_that_no_sequence_owns_may_hold_nan():
    texts = tiny.prompts(13, 26)
    clean, _, _ = tiny.finish(tiny.begin(texts, **WARM))
    m = tiny.model()
    pool = allocate(m.decoder.shape, 2, 128, page_size=8)
    poisoned = pool._replace(
        layers=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool.layers),
    )
    state = start(
        m.decoder,
        m.params,
        chain(),
        poisoned,
        texts,
        key=jax.random.key(7),
        sample=parameters(2, **WARM),
        max_tokens=20,
    )
    assert tiny.finish(state)[0] == clean


def test_a_row_with_nan_logits_fails_alone():
    texts = tiny.prompts(10, 10)
    clean, _, _ = tiny.finish(tiny.begin(texts, temperature=0.0))
    state = tiny.begin(texts, temperature=0.0)
    page = state.cache.table[1, 0]
    layer = state.cache.layers[0]
    broken = layer._replace(keys=layer.keys.at[page].set(jnp.nan), values=layer.values.at[page].set(jnp.nan))
    cache = state.cache._replace(layers=(broken, *state.cache.layers[1:]))
    out, state, _ = tiny.finish(state._replace(cache=cache))
    assert out == [clean[0], []]
    assert np.asarray(state.status).tolist() == [FULL, FAILED]


def test_stop_tokens_limits_and_empty_rows():
    texts = tiny.prompts(10, 10)
    free, _, _ = tiny.finish(tiny.begin(texts, temperature=0.0))
    place = next(i for i, t in enumerate(free[0]) if i > 0 and t not in free[0][:i])
    out, state, _ = tiny.finish(
        tiny.begin(
            [texts[0], texts[1], []], temperature=0.0, stop=[[free[0][place]], (), ()], max_tokens=[20, 4, 9]
        )
    )
    assert out == [free[0][: place + 1], free[1][:4], []]
    assert np.asarray(state.status).tolist() == [STOPPED, FULL, FULL]
    assert out[2] == []


def test_a_row_without_a_page_stalls_and_does_not_abort_the_others():
    texts = tiny.prompts(8, 8)
    state = tiny.begin(texts, temperature=0.0, page_size=8, pages=3, max_tokens=40)
    out, state, _ = tiny.finish(state)
    # Prompts fill a page each but for the last token; the third page goes to the first row.
    assert [len(t) for t in out] == [9, 1]
    assert (np.asarray(state.status) == RUNNING).all()


def test_new_values_do_not_retrace():
    m = tiny.model()
    traced = chex.assert_max_traces(loop.step, n=1)
    jitted = jax.jit(lambda controller, state: traced(m.decoder, m.params, controller, state))
    for temperature, top_p, penalty in ((0.5, 1.0, 1.0), (1.3, 0.8, 1.2), (0.0, 0.3, 1.0)):
        state = tiny.begin(
            tiny.prompts(6, 7), temperature=temperature, top_p=top_p, repetition_penalty=penalty
        )
        jitted(chain(), state)


@pytest.mark.slow
def test_no_copy_of_the_cache_in_a_launch():
    m = tiny.model()
    state = tiny.begin(tiny.prompts(20, 9), context=96)
    pool = state.cache.layers[0].keys.shape
    text = generate.lower(m.decoder, m.params, chain(), state, 5, capacity=64).compile().as_text()
    shape = re.escape(f"f32[{','.join(map(str, pool))}]")
    assert re.search(shape, text), "the shape of the pool does not occur: the test looks for the wrong thing"
    copies = re.findall(rf"= {shape}\S* (?:copy|select|scatter|transpose|copy-start)\(.*", text)
    assert not copies, copies
    fusions = re.findall(rf"= {shape}\S* fusion\(.*?calls=(%\S+?)[,\s]", text)
    for name in fusions:  # a fusion may only update in place
        body = text[text.index(f"\n{name} ") :]
        root = re.search(r"ROOT .*", body)
        assert root is not None and "dynamic-update-slice" in root[0], root


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(texts=[[1, 2], [96]]), r"prompts\[1\] must hold token ids between 0 and 95; got 96"),
        (
            dict(texts=[[1] * 129]),
            r"prompts\[0\] must have at most 128 tokens, the size of a row of the cache; got 129",
        ),
        (
            dict(texts=[[1] * 50, [2] * 50], pages=8),
            r"must fit together into 8 pages of \d+ positions; prompts\[1\] of 50 tokens does not fit",
        ),
    ],
)
def test_prompts_that_cannot_be_served(change, message):
    texts = change.pop("texts")
    with pytest.raises(ValueError, match=message):
        tiny.begin(texts, **change)


@pytest.mark.slow
def test_replay_refuses_other_tokens_than_integers_of_every_row():
    m = tiny.model()
    pool = allocate(m.decoder.shape, 2, 32, page_size=8)
    state = start(m.decoder, m.params, chain(), pool, tiny.prompts(3, 4), key=jax.random.key(0), max_tokens=9)
    for tokens in (jnp.zeros((3, 4), jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros((2, 4))):
        with pytest.raises(ValueError, match=r"tokens must be integers of shape \(2, steps\); got"):
            replay(m.decoder, m.params, chain(), state, tokens)
    for token in (96, 1000, -5):
        for tokens in (jnp.full((2, 3), token), np.array([[1, 2, 3], [4, 5, token]])):
            with pytest.raises(ValueError, match=f"tokens must be between 0 and 95; got {token}"):
                replay(m.decoder, m.params, chain(), state, tokens)


@pytest.mark.slow
def test_replay_is_differentiable_in_the_parameters():
    m = tiny.model()
    (text,) = tiny.prompts(24)
    targets = jnp.array([text[16:]], jnp.int32)

    def loss(params):
        pool = allocate(m.decoder.shape, 1, 32, page_size=8)
        state = start(m.decoder, m.params, chain(), pool, [text[:1]], key=jax.random.key(0), max_tokens=30)
        _, trace = replay(m.decoder, params, chain(), state, targets)
        return trace.surprisal.mean()

    gradient = jax.grad(loss)(m.params)
    chex.assert_tree_all_finite(gradient)
    direction = jax.tree.map(lambda g: g / (1e-9 + jnp.sqrt(jnp.square(g).sum())), gradient)
    shift = lambda size: jax.tree.map(lambda p, d: p + size * d, m.params, direction)
    numeric = (loss(shift(2e-3)) - loss(shift(-2e-3))) / 4e-3
    exact = sum(
        jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    )
    np.testing.assert_allclose(numeric, exact, rtol=2e-2)


def test_sliding_windows_are_honoured():
    sizes = dict(architecture="MistralForCausalLM", sliding_window=6)
    m = tiny.model(**sizes)
    (text,) = tiny.prompts(30)
    changed = [(t + 1) % 96 for t in text[:10]] + text[10:]
    traces = []
    for tokens in (text, changed):  # two layers see at most 2 · 5 positions back
        pool = allocate(m.decoder.shape, 1, 64, page_size=8)
        state = start(m.decoder, m.params, chain(), pool, [tokens[:22]], key=jax.random.key(0), max_tokens=30)
        _, trace = replay(m.decoder, m.params, chain(), state, jnp.array([tokens[22:]], jnp.int32))
        traces.append(np.asarray(trace.surprisal))
    np.testing.assert_allclose(*traces, atol=1e-5)
    assert isinstance(m, models.Model)


@pytest.mark.parametrize(("steps", "expected"), [(2, 2), (9, 4)])
def test_a_run_has_no_more_steps_than_are_stated_nor_than_its_trace_holds(steps, expected):
    row = jnp.ones(1, bool)

    def advance(state, number):
        blank = dict.fromkeys(Trace._fields, jnp.zeros(1))
        return state, Trace(**{**blank, "emitted": row, "token": number[None]})

    state = State(**{**dict.fromkeys(State._fields), "status": jnp.full(1, RUNNING)})
    _, done, trace = loop.run(advance, state, steps, 4)
    assert done == expected and trace.emitted.shape == (4, 1)
    assert trace.token[:, 0].tolist() == [*range(expected), *[0] * (4 - expected)]
