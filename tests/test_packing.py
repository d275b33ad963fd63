"""Packing: the tokens of all rows in one array, and back."""

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.phases.packing import lay_out

ROWS, MOST = 4, 3
NUM_TOKENS = np.array([2, 0, 3, 1])


def values() -> jnp.ndarray:
    """`[rows, n, 2]`; each number names its row, its place and its channel."""
    row, place, channel = np.meshgrid(np.arange(ROWS), np.arange(MOST), np.arange(2), indexing="ij")
    return jnp.asarray(100 * row + 10 * place + channel, jnp.int32)


@pytest.mark.parametrize("total", [6, 7, 10])
def test_tokens_stand_one_row_after_the_other(total):
    packing = lay_out(jnp.asarray(NUM_TOKENS), total, MOST)
    real = [(row, place) for row, n in enumerate(NUM_TOKENS) for place in range(n)]
    count = len(real)
    assert list(zip(packing.row.tolist(), packing.position_in_row.tolist(), strict=True))[:count] == real
    packed = packing.pack(values())
    assert packed.shape == (total, 1, 2)
    np.testing.assert_array_equal(packed[:count, 0], [values()[row, place] for row, place in real])
    # What fills the pass up is taken from the last row, within its bounds.
    assert packing.row.tolist()[count:] == [ROWS - 1] * (total - count)
    np.testing.assert_array_equal(packed[count:, 0, 0] // 100, [ROWS - 1] * (total - count))


@pytest.mark.parametrize("total", [6, 10])
def test_unpacking_gives_every_row_its_tokens_back(total):
    packing = lay_out(jnp.asarray(NUM_TOKENS), total, MOST)
    assert packing.packed_index.shape == (ROWS, MOST)
    assert int(packing.packed_index.max()) < total
    back = packing.unpack(packing.pack(values()))
    assert back.shape == (ROWS, MOST, 2)
    for row, n in enumerate(NUM_TOKENS):
        np.testing.assert_array_equal(back[row, :n], values()[row, :n])


def test_packed_attention_sees_rows_and_returns_tokens():
    packing = lay_out(jnp.asarray(NUM_TOKENS), 8, MOST)
    seen = {}

    def attend(q, k, v, layer, **options):
        seen.update(q=q, k=k, v=v, **options)
        return q + 2 * k + 4 * v, layer + 1

    packed = packing.pack(values())
    out, layer = packing.attention(attend)(packed, packed + 1000, packed + 5000, 6, window=3)
    assert layer == 7 and seen["window"] == 3
    assert seen["q"].shape == seen["k"].shape == seen["v"].shape == (ROWS, MOST, 2)
    np.testing.assert_array_equal(seen["q"][2], values()[2])
    np.testing.assert_array_equal(out[:6], (packed + 2 * (packed + 1000) + 4 * (packed + 5000))[:6])
