"""Window pages: the first and the newest pages of each row are read, and every page in the last layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate
from entropic_jax.attention.window_pages import WindowPages
from entropic_jax.state.cache import ModelShape, grant

PAGE, LENGTH = 4, (38, 9, 0)
SHAPE = ModelShape(layers=3, heads=4, kv_heads=2, head_dim=16, vocabulary=8, hidden=8)


@pytest.fixture(scope="module")
def cache():
    """Three rows of 10, 3 and 0 pages of noise; memory that no row holds is NaN."""
    empty = allocate(SHAPE, 3, 48, page_size=PAGE)
    granted, _ = grant(empty, jnp.array(LENGTH))
    rng = np.random.default_rng(0)

    def noise(x):
        values = np.full(x.shape, np.nan, np.float32)
        for row, length in enumerate(LENGTH):
            for position in range(length):
                page = int(granted.table[row, position // PAGE])
                values[page, :, position % PAGE] = rng.normal(size=(2, 16))
        return jnp.asarray(values)

    layers = tuple(x._replace(keys=noise(x.keys), values=noise(x.values)) for x in granted.layers)
    return granted._replace(layers=layers)


def attention(cache, layer, q, row: int, positions: list[int]) -> np.ndarray:
    """Attention of one row to these positions, from the definition."""
    page, slot = np.asarray(cache.table)[row, np.array(positions) // PAGE], np.array(positions) % PAGE
    keys, values = (np.asarray(x)[page, :, slot] for x in (layer.keys, layer.values))
    weight = jax.nn.softmax(np.einsum("kgd,skd->kgs", q[row], keys), -1)
    return np.einsum("kgs,skd->kgd", weight, values)


@pytest.mark.slow
def test_listed_pages_are_read_and_no_others(cache):
    pages, length = WindowPages(recent_fraction=0.25, recent_pages=1), jnp.array(LENGTH)
    reader = pages.reader(cache, length)
    q = np.random.default_rng(1).normal(size=(3, 2, 2, 16)).astype(np.float32)
    # Of ten pages, the first and the newest three; of three pages, the first and the newest one.
    seen = [[*range(4), *range(28, 38)], [*range(4), 8]]
    for number, layer in enumerate(cache.layers):
        out = reader.read(layer, jnp.asarray(q), jnp.zeros(3, jnp.int32), length)
        for row, positions in enumerate(seen if number < 2 else [[*range(38)], [*range(9)]]):
            np.testing.assert_allclose(out[row], attention(cache, layer, q, row, positions), atol=1e-5)
        assert (np.asarray(out[2]) == 0).all()
    read = reader.total()
    assert read.positions.tolist() == [2 * (14 + 14 + 38), 2 * (5 + 5 + 9), 0]
    assert read.held.tolist() == [2 * 3 * 38, 2 * 3 * 9, 0]


def test_the_fraction_that_is_kept():
    assert WindowPages(recent_fraction=0.25).kept(3) == pytest.approx((1 + 2 * 0.25) / 3)
    assert WindowPages(dense_layers=5).kept(3) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recent_fraction": 1.5}, "recent_fraction must be between 0 and 1; got 1.5"),
        ({"recent_pages": 0}, "recent_pages must be at least 1; got 0"),
        ({"dense_layers": -1}, "dense_layers must be at least 0; got -1"),
    ],
)
def test_numbers_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        WindowPages(**options)
