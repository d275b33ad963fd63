"""An 8-bit KV cache: bounds on its error against float32, and invariants that hold exactly."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, parameters, replay, start
from entropic_jax.methods.presets import FINE_PAGES
from entropic_jax.pallas import paged_attention
from entropic_jax.pallas.paged_attention import quantised
from entropic_jax.phases import prefill
from entropic_jax.state import cache
from tests import tiny

DTYPES = ("int8", "float8_e4m3fn")
RELATIVE = {"int8": 0.5 / 127, "float8_e4m3fn": 2**-4}  # of the largest number, and of each


def begin(texts, dtype, page_policy=None, **sampling):
    m = tiny.model()
    pool = allocate(m.decoder.shape, len(texts), 128, page_size=8, dtype=dtype)
    sample = parameters(len(texts), temperature=0.0)
    settings = dict(max_tokens=40, key=jax.random.key(0), sample=sample, page_policy=page_policy, **sampling)
    return start(m.decoder, m.params, chain(), pool, texts, **settings)


def teacher_forced(dtype, page_policy=None):
    (text,) = tiny.prompts(60)
    m = tiny.model()
    state = begin([text[:30]], dtype, page_policy)
    return replay(m.decoder, m.params, chain(), state, jnp.array([text[30:]], jnp.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_is_as_near_as_eight_bits_allow(dtype):
    x = jax.random.normal(jax.random.key(0), (64, 3, 32)) * jnp.geomspace(1e-6, 1e6, 64)[:, None, None]
    tile, scale = quantised.quantise(x, dtype)
    error = np.abs(tile.astype(jnp.float32) * scale[..., None] - x)
    extent = np.abs(x).max(-1, keepdims=True)
    # Below its normal numbers, 2⁻⁶ of 448, the steps of float8_e4m3fn are even.
    allowed = RELATIVE[dtype] * (extent if dtype == "int8" else np.maximum(np.abs(x), extent * 2**-6 / 448))
    assert (error <= allowed * (1 + 1e-5)).all()
    assert (error > 0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_and_what_is_no_number(dtype):
    x = jnp.zeros((3, 16)).at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf)
    tile, scale = quantised.quantise(x, dtype)
    read = np.asarray(tile.astype(jnp.float32) * scale[:, None])
    assert not read[0].any()
    assert not np.isfinite(read[1:]).any()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.05), ("float8_e4m3fn", 0.4)])
def test_the_error_of_the_surprisals_is_small_and_not_nothing(dtype, bound):
    exact, rounded = (teacher_forced(name)[1] for name in ("float32", dtype))
    error = np.abs(exact.surprisal - rounded.surprisal)
    assert 0 < error.max() < bound
    assert np.abs(exact.entropy - rounded.entropy).max() < bound


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_pages_kept_is_dense(dtype):
    dense, listed = (teacher_forced(dtype, page_policy)[1] for page_policy in (None, FINE_PAGES))
    np.testing.assert_allclose(dense.surprisal, listed.surprisal, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_hold_the_same_however_a_text_comes(dtype, monkeypatch):
    """Checks the first layer; later ones depend on attention, whose rounding may differ between chunks."""
    (text,) = tiny.prompts(45)
    at_once = begin([text], dtype)
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 8)
    jax.clear_caches()
    in_chunks = begin([text], dtype)
    m = tiny.model()
    one_by_one, _ = replay(
        m.decoder, m.params, chain(), begin([text[:1]], dtype), jnp.array([text[1:]], jnp.int32)
    )

    def held(state):
        layer, pages = state.cache.layers[0], state.cache.table[0, :5]  # 40 positions
        return [np.asarray(quantised.gather(x, pages, jnp.float32)) for x in (layer.keys, layer.values)]

    for other in (in_chunks, one_by_one):
        for ours, theirs in zip(held(at_once), held(other), strict=True):
            # A key's last bit may depend on how many were computed at once, and tip it over a step: rarely.
            apart = np.abs(ours - theirs) > 1e-5 * np.abs(theirs).max(-1, keepdims=True)
            assert apart.mean() < 0.01
            np.testing.assert_allclose(ours, theirs, atol=2 * RELATIVE[dtype] * np.abs(theirs).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_summaries_bound_the_keys_that_are_read(dtype):
    (text,) = tiny.prompts(40)
    state = begin([text], dtype)
    layer, pages = state.cache.layers[0], state.cache.table[0, :4]
    keys, values = (quantised.gather(x, pages, jnp.float32) for x in (layer.keys, layer.values))
    np.testing.assert_array_equal(layer.key_min[pages], keys.min(2))
    np.testing.assert_array_equal(layer.key_max[pages], keys.max(2))
    np.testing.assert_allclose(layer.value_norm[pages], jnp.linalg.norm(values, axis=-1).max(2), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fork_and_a_rewind_keep_what_was_stored(dtype):
    text, _ = tiny.prompts(37, 5)
    state = begin([text, []], dtype)
    forked, enough = cache.fork(state.cache, jnp.array([0]), jnp.array([1]), jnp.array([29]))
    assert enough.all()
    back = cache.rewind(forked, jnp.array([True, True]), jnp.array([29, 29]))
    layer, table = back.layers[1], back.table
    for pool in (layer.keys, layer.values):
        ours, copied = (quantised.gather(pool, table[row, :4], jnp.float32) for row in (0, 1))
        flat = lambda x: np.asarray(x.swapaxes(1, 2).reshape(-1, *x.shape[1:2], x.shape[-1]))[:29]
        np.testing.assert_array_equal(flat(ours), flat(copied))
    np.testing.assert_array_equal(layer.key_max[table[0, 3]], layer.key_max[table[1, 3]])


@pytest.mark.slow
def test_no_copy_of_the_pool_in_a_launch():
    """With int8. XLA's CPU backend widens a pool of float8, which is why the server refuses it there."""
    dtype, m = "int8", tiny.model()
    state = begin(tiny.prompts(20, 9), dtype)
    pool = ",".join(map(str, state.cache.layers[0].keys.shape))
    text = generate.lower(m.decoder, m.params, chain(), state, 5, capacity=64).compile().as_text()
    assert f"[{pool}]" in text, "the shape of the pool does not occur: the test looks for the wrong thing"
    copies = re.findall(rf"= \w+\[{pool}\]\S* (?:copy|select|scatter|transpose|convert|copy-start)\(.*", text)
    assert not copies, copies


@pytest.mark.slow
def test_gradients_reach_the_queries_through_quantised_pages():
    keys, values = (
        quantised.put_pages(
            quantised.zeros((4, 1, 8, 16), "int8"),
            jnp.arange(3),
            jax.random.normal(jax.random.key(n), (3, 1, 8, 16)),
            jnp.ones((3, 8), bool),
        )[0]
        for n in (0, 1)
    )
    q = jax.random.normal(jax.random.key(2), (1, 1, 2, 16))
    places = (jnp.arange(3)[None], None, None, jnp.zeros(1, jnp.int32), jnp.full(1, 20))
    plain = [quantised.gather(x, jnp.arange(4), jnp.float32) for x in (keys, values)]
    total = lambda q, keys, values: paged_attention.decode(q, keys, values, *places).out.sum()
    ours, theirs = (jax.jit(jax.grad(total))(q, *pools) for pools in ((keys, values), plain))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert np.abs(theirs).max() > 0
