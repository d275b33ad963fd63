"""Attention statistics against float64 over the valid positions; other programs do not change."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import chain, loop
from entropic_jax.attention.statistics import Observation, Observer, agree
from entropic_jax.control import Every, When, pytree
from entropic_jax.phases import emission, forward
from entropic_jax.state.cache import Layer, allocate
from tests import tiny

ROWS, KV_HEADS, GROUP, DIM, SIZE, PAGES = 3, 2, 2, 16, 4, 6


def softmax(score: np.ndarray) -> np.ndarray:
    share = np.exp(score - score.max(-1, keepdims=True))
    return share / share.sum(-1, keepdims=True)


def scene(seed: int = 0):
    """A layer with NaN in unused slots, queries, and rows of different lengths, one of them empty."""
    rng = np.random.default_rng(seed)
    pool = allocate(tiny.model().decoder.shape, ROWS, SIZE * PAGES, page_size=SIZE)
    last = np.array([SIZE * PAGES - 1, 5, 0])
    table = rng.permutation(ROWS * PAGES).reshape(ROWS, PAGES).astype(np.int32)
    keys = np.full((ROWS * PAGES + 1, KV_HEADS, SIZE, DIM), np.nan, np.float32)
    total = np.full((ROWS * PAGES + 1, KV_HEADS, DIM), np.nan, np.float32)
    for row in range(ROWS):
        for p in range(last[row]):
            keys[table[row, p // SIZE], :, p % SIZE] = 1.5 * rng.standard_normal((KV_HEADS, DIM))
    for page in range(ROWS * PAGES):
        if not np.isnan(keys[page, 0, 0, 0]):
            total[page] = np.nansum(keys[page], 1)
    layer = pool.layers[0]
    layer = Layer(jnp.asarray(keys), jnp.zeros_like(keys), *layer[2:4], jnp.asarray(total), layer.value_norm)
    q = rng.standard_normal((ROWS, KV_HEADS, GROUP, DIM)).astype(np.float32) * 0.7
    return layer, table, q, last


def scores_of(layer, table, q, row: int, first: int, last: int) -> np.ndarray:
    """Float64 scores `[heads, positions]` of one row."""
    keys = np.asarray(layer.keys, np.float64)
    held = np.stack([keys[table[row, p // SIZE], :, p % SIZE] for p in range(first, last)])
    return np.einsum("kgd,pkd->kgp", np.float64(q[row]), held).reshape(KV_HEADS * GROUP, -1)


def observe(observation: Observation, layer, table, q, first, last):
    pool = allocate(tiny.model().decoder.shape, ROWS, SIZE * PAGES, page_size=SIZE)
    observer = Observer(observation, pool._replace(layers=(layer,), table=jnp.asarray(table)))
    observer.see(layer, jnp.asarray(q), jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32))
    return jax.tree.map(np.asarray, observer.total())


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7])
def test_measures_over_valid_positions(window):
    layer, table, q, last = scene()
    first = np.zeros_like(last) if window is None else np.maximum(last - window, 0)
    observed = observe(Observation(exact=True), layer, table, q, first, last)
    coarse = observe(Observation(), layer, table, q, first, last)
    for row in range(2):
        score = scores_of(layer, table, q, row, first[row], last[row])
        share = softmax(score)
        entropy = -(share * np.log(share)).sum(-1)
        distance = np.abs(share - share.mean(0)).sum(-1).mean() / 2
        np.testing.assert_allclose(observed.entropy[row], entropy.mean(), atol=1e-5)
        np.testing.assert_allclose(observed.varentropy[row], entropy.var(), atol=1e-5)
        np.testing.assert_allclose(observed.agreement[row], 1 - distance / 0.75, atol=1e-5)
        np.testing.assert_allclose(observed.interaction[row], np.abs(score).mean(), rtol=1e-5)
        np.testing.assert_allclose(observed.max_entropy[row], np.log(score.shape[-1]), rtol=1e-6)
        np.testing.assert_allclose(coarse.entropy[row], entropy.mean(), atol=1e-5)
    for value in (*observed, *coarse):
        assert value[2] == 0  # the row that holds nothing


@pytest.mark.slow
def test_by_page_is_by_position_where_a_page_is_a_position():
    layer, table, q, last = scene()
    narrow = lambda x: x.reshape(-1, KV_HEADS, 1, DIM) if x.ndim == 4 else x
    keys = np.asarray(layer.keys).swapaxes(1, 2).reshape(-1, KV_HEADS, DIM)
    single = layer._replace(
        keys=jnp.asarray(narrow(keys[:, :, None])),
        values=jnp.zeros((len(keys), KV_HEADS, 1, DIM)),
        key_sum=jnp.asarray(keys),
    )
    spread = (table[:, :, None] * SIZE + np.arange(SIZE)).reshape(ROWS, -1)
    first = np.zeros_like(last)
    coarse = observe(Observation(), single, spread, q, first, last)
    exact = observe(Observation(exact=True), layer, table, q, first, last)
    for a, b in zip(coarse, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_as_released_all_positions_of_a_padded_cache_count():
    layer, table, q, last = scene()
    q = q / 5
    observed = observe(Observation(padded=4096), layer, table, q, np.zeros_like(last), last)
    for row in range(2):
        score = np.zeros((KV_HEADS * GROUP, 4096))
        held = scores_of(layer, table, q, row, 0, last[row])
        score[:, : held.shape[1]] = held
        share = softmax(score)
        entropy = -(share * np.log2(share)).sum(-1)
        np.testing.assert_allclose(observed.entropy[row] / np.log(2), entropy.mean(), rtol=1e-5)
        np.testing.assert_allclose(
            observed.varentropy[row] / np.log(2) ** 2, entropy.var(), rtol=2e-2, atol=1e-9
        )
        np.testing.assert_allclose(observed.agreement[row], np.abs(share - share.mean(0)).mean(), rtol=1e-2)
        np.testing.assert_allclose(observed.interaction[row], np.abs(score).mean(), rtol=1e-5)
        assert entropy.mean() > 11.5  # whatever the text


def test_agreement_has_the_ends_it_claims():
    apart = jnp.eye(4)[None]
    alike = jnp.broadcast_to(jnp.array([0.5, 0.25, 0.25]), (1, 4, 3))
    np.testing.assert_allclose(
        [agree(apart)[0], agree(alike)[0], agree(alike[:, :1])[0]], [0, 1, 1], atol=1e-6
    )


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), r"layers must name at least one layer; got \(\)"),
        ((2,), "layers must be between -2 and 1; got 2"),
    ],
)
def test_layers_that_are_not_there(layers, message):
    pool = allocate(tiny.model().decoder.shape, 1, 8, page_size=8)
    with pytest.raises(ValueError, match=message):
        Observer(Observation(layers=layers), pool)


@pytree
class Watching:
    """A controller that stores the attention statistics it observes."""

    observes = Observation(layers=(0, -1), exact=True)

    def init(self, action):
        zero = jnp.zeros_like(action.temperature)
        return (zero,) * 5

    def update(self, signal, action, state):
        return action, tuple(signal.focus)


@pytest.mark.slow
def test_a_step_shows_its_attention_to_a_controller_that_asks():
    """Compared with attention over the whole sequence, layer by layer."""
    m, texts = tiny.model(), tiny.prompts(19, 6)
    observed = {}
    for law in (Watching(), chain(Every(Watching(), 1)), When(lambda s, a: s.emitting, Watching())):
        state = tiny.begin(texts, temperature=0.0, controller=law)
        state, _ = loop.generate(m.decoder, m.params, law, state, 1, capacity=1)
        (leaves,) = [jax.tree.leaves(state.control)[-5:]]
        observed[type(law)] = np.array(leaves)
    want = np.zeros((5, 2))
    for row, text in enumerate(texts):
        layers = []

        def attend(q, k, v, layer, window=None):
            group = q.shape[2] // k.shape[2]
            k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
            score = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
            score = jnp.where(jnp.tril(jnp.ones(score.shape[-2:], bool)), score, -jnp.inf)
            layers.append(np.float64(score[0, :, -1]))
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(score, -1), v), layer

        ids = jnp.array([text], jnp.int32)
        m.decoder.hidden(m.params, ids, jnp.arange(len(text))[None], (None,) * 2, attend)
        for score in layers:
            share = softmax(score)
            entropy = -(share * np.log(share)).sum(-1)
            distance = np.abs(share - share.mean(0)).sum(-1).mean() / 2 / (1 - 1 / len(share))
            strength = np.abs(score).mean()
            want[:, row] += (
                np.array([entropy.mean(), entropy.var(), 1 - distance, strength, np.log(len(text))]) / 2
            )
    for values in observed.values():
        np.testing.assert_allclose(values, want, atol=2e-4)


def test_controllers_may_not_ask_for_different_things():
    other = type("Other", (), {"observes": Observation()})()
    with pytest.raises(ValueError, match="observes must be the same for all controllers of a chain"):
        _ = chain(Watching(), other).observes
    assert chain().observes is None and chain(Watching(), Watching()).observes == Watching.observes


@pytest.mark.slow
def test_what_is_not_asked_for_costs_nothing(monkeypatch):
    """Without an observer, the compiled step is the same program, up to random keys."""
    m = tiny.model()
    state = tiny.begin(tiny.prompts(9, 5))

    def program() -> str:
        jitted = jax.jit(lambda s: loop.step(m.decoder, m.params, chain(), s))
        text = jitted.lower(state).compile().as_text()
        text = re.sub(r", metadata=\{[^}]*\}|stack_frame_id=\d+", "", text)
        return re.sub(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text, flags=re.M)

    as_it_is = program()
    monkeypatch.setattr(emission, "row_keys", lambda key, seed, position: None)
    monkeypatch.setattr(forward, "Observer", None)
    assert program() == as_it_is
