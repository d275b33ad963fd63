"""Read statistics of layers and steps, against counts by hand."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from entropic_jax.attention.attend import TokenSpan
from entropic_jax.attention.page_reader import (
    PageGates,
    PageReader,
    ReadStats,
    dense_layer_stats,
    dense_step_stats,
    over_layers,
)
from entropic_jax.state.cache import ModelShape

SHAPE = ModelShape(layers=3, heads=4, kv_heads=2, head_dim=16, vocabulary=8, hidden=32)


def stats(*fields) -> ReadStats:
    return ReadStats(*(jnp.asarray(x, jnp.float32) for x in fields))


def test_a_step_sums_positions_averages_mass_and_keeps_the_largest_certificate():
    total = over_layers(
        [
            stats([10, 1], [20, 4], [0.5, 0.0], [3, 1], [2, 0]),
            stats([30, 2], [20, 4], [0.1, 0.2], [1, 5]),  # read nothing to choose
            stats([50, 3], [20, 4], [0.0, 0.1], [2, 2], [4, 1]),
        ]
    )
    np.testing.assert_allclose(total.positions, [90, 6])
    np.testing.assert_allclose(total.held, [60, 12])
    np.testing.assert_allclose(total.dropped_mass, [0.2, 0.1], rtol=1e-6)
    np.testing.assert_allclose(total.certificate, [3, 5])
    np.testing.assert_allclose(total.summaries, [6, 1])


def test_a_dense_layer_reads_what_the_query_sees():
    layer = SimpleNamespace(keys=jnp.zeros((9, 2, 4, 16)))  # two KV heads
    read = dense_layer_stats(layer, jnp.array([0, 3, 5]), jnp.array([7, 7, 2]))
    for positions in (read.positions, read.held):
        np.testing.assert_array_equal(positions, [14, 8, 0])
    np.testing.assert_array_equal(read.dropped_mass, [0, 0, 0])
    np.testing.assert_array_equal(read.certificate, [0, 0, 0])


def test_a_dense_step_reads_every_layer_of_active_rows_with_their_new_tokens():
    read = dense_step_stats(SHAPE, TokenSpan(jnp.array([4, 9, 0]), jnp.array([1, 0, 3])))
    for positions in (read.positions, read.held):
        np.testing.assert_array_equal(positions, [30, 0, 18])
    np.testing.assert_array_equal(read.dropped_mass, [0, 0, 0])
    np.testing.assert_array_equal(read.certificate, [0, 0, 0])


def test_gated_pages_count_by_their_gates():
    """Two rows of three pages of four positions, two KV heads; the second row holds six positions."""
    cache = SimpleNamespace(page_size=4, table=jnp.array([[1, 2, 3], [4, 5, 0]]))
    norms = jnp.array([[9.0, 9], [1, 2], [3, 4], [5, 6], [7, 2], [1, 8]])  # [pages, kv_heads]
    last = jnp.array([12, 6])
    gates = PageGates(
        gate=jnp.array([[[1.0, 0.5, 0], [1, 1, 1]], [[1, 0.5, 0.3], [0.25, 1, 0]]]),
        dropped_mass=jnp.array([[0.2, 0.4], [0.0, 0.5]]),
        in_use=jnp.array([[[True, True, True]], [[True, True, False]]]),
    )
    layer = SimpleNamespace(value_norm=norms, pages_of=lambda table: table)
    read = PageReader(None, cache)._gated_stats(layer, gates, last)
    np.testing.assert_allclose(read.positions, [6 + 12, 5 + 3])
    np.testing.assert_allclose(read.held, [24, 12])
    np.testing.assert_allclose(read.dropped_mass, [0.3, 0.25])
    np.testing.assert_allclose(read.certificate, [12, 16])  # 2 max‖v‖ over the pages in use
