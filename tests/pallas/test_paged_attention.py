"""Every back end of paged attention against a float64 statement of it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_jax.pallas import dispatch, paged_attention

BACK_ENDS = paged_attention.BACK_ENDS


def case(seed: int, rows: int, kv_heads: int, group: int, head_dim: int, page: int, per_row: int):
    """A pool in which everything that no row owns, and every slot past a row's end, is NaN."""
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
        for index in range(per_row):
            held = np.clip(last[row] - index * page, 0, page)
            keys[table[row, index], :, held:] = np.nan
            values[table[row, index], :, held:] = np.nan
    keys[-1] = values[-1] = np.nan
    return q, keys, values, table, first, last


def exact(q, keys, values, table, first, last):
    out = np.zeros(q.shape)
    for row in range(q.shape[0]):
        flat = lambda x: np.concatenate([x[p] for p in table[row]], axis=1)[:, first[row] : last[row]].astype(
            float
        )
        k, v = flat(keys), flat(values)
        if k.shape[1]:
            score = np.einsum("kgd,ksd->kgs", q[row].astype(float), k)
            weight = np.exp(score - score.max(-1, keepdims=True))
            out[row] = np.einsum("kgs,ksd->kgd", weight / weight.sum(-1, keepdims=True), v)
    return out


@pytest.mark.parametrize("name", BACK_ENDS)
@pytest.mark.parametrize("sizes", [(3, 2, 2, 16, 8, 5), (1, 1, 7, 64, 16, 9), (2, 4, 1, 32, 4, 3)])
def test_back_ends_agree_with_float64(name, sizes):
    for seed in range(4):
        arguments = case(seed, *sizes)
        try:
            out = jax.jit(BACK_ENDS[name])(*arguments)
        except NotImplementedError as declined:
            pytest.skip(str(declined))
        np.testing.assert_allclose(out, exact(*arguments), atol=2e-5)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_the_chosen_back_end_on_random_lengths(seed):
    arguments = case(seed, 3, 2, 2, 16, 8, 5)
    np.testing.assert_allclose(paged_attention.decode(*arguments), exact(*arguments), atol=2e-5)


def test_a_row_has_the_same_bits_whatever_its_neighbours():
    q, keys, values, table, first, last = case(0, 3, 2, 2, 16, 8, 5)
    last[0], first[0] = 31, 0
    keys, values = np.nan_to_num(keys), np.nan_to_num(values)
    together = paged_attention.decode(q, keys, values, table, first, last)
    last[1:] = 0
    np.testing.assert_array_equal(together[0], paged_attention.decode(q, keys, values, table, first, last)[0])


def test_gradients_are_those_of_the_gathered_form():
    q, keys, values, table, first, last = case(1, 2, 2, 2, 16, 4, 3)
    keys, values = np.nan_to_num(keys), np.nan_to_num(values)
    chex.assert_numerical_grads(
        lambda *x: paged_attention.reference.gathered(*x, table, first, last),
        (q, keys, values),
        order=1,
        atol=2e-2,
    )
    loss = lambda decode: lambda *x: jnp.square(decode(*x, table, first, last)).sum()
    ours = jax.grad(loss(paged_attention.decode), (0, 1, 2))(q, keys, values)
    theirs = jax.grad(loss(paged_attention.reference.gathered), (0, 1, 2))(q, keys, values)
    chex.assert_trees_all_close(ours, theirs, atol=1e-4)


def test_dispatch_takes_the_named_one_and_reports_every_reason(monkeypatch):
    def declines(x):
        raise NotImplementedError("not today")

    call = dispatch.first_that_accepts("test", {"a": declines, "b": lambda x: x + 1})
    assert call(1) == 2
    monkeypatch.setenv("ENTROPIC_KERNELS", "a")
    with pytest.raises(ExceptionGroup, match="no back end accepts test") as caught:
        call(1)
    assert [str(e) for e in caught.value.exceptions] == ["a: not today"]
