"""Pools of stacked layers: sequences of layers, and the operations of pages on all layers of a pool."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.state import cache
from entropic_jax.state.cache import Cache, ModelShape
from entropic_jax.state.layer_stacks import LayerPattern, LayerStacks, Place, replace_layer

SHAPE = ModelShape(layers=5, heads=2, kv_heads=2, head_dim=4, vocabulary=8, hidden=8)
PATTERN = LayerPattern(1, 2, 2)
STACKED = SHAPE._replace(pattern=PATTERN)
ROWS, PAGE, PAGES = 3, 4, 6


def filled(**options: Any) -> tuple[Cache, Cache]:
    """The same content in separate layers and in stacks; row 0 holds 10 positions."""
    separate, stacked = (
        cache.allocate(shape, ROWS, 16, page_size=PAGE, pages=PAGES, **options) for shape in (SHAPE, STACKED)
    )
    random = np.random.default_rng(0)
    fresh = lambda x: jnp.asarray(random.integers(-9, 9, x.shape)).astype(x.dtype)
    separate = separate._replace(layers=jax.tree.map(fresh, separate.layers))
    numbers = [[i for i, place in enumerate(stacked.layers.places) if place.pool == n] for n in range(3)]
    pools = [[separate.layers[i] for i in of_pool] for of_pool in numbers]
    together = tuple(jax.tree.map(lambda *x: jnp.concatenate(x), *layers) for layers in pools)
    stacked = stacked._replace(layers=LayerStacks(together, stacked.layers.places))
    granted = [cache.grant(pool, jnp.array([10, 0, 0]))[0] for pool in (separate, stacked)]
    return granted[0], granted[1]


def assert_same(stacked: Cache, separate: Cache) -> None:
    """Equal tables, and equal pages of every layer but the scratch page."""
    for name in ("table", "granted", "free", "references"):
        np.testing.assert_array_equal(getattr(stacked, name), getattr(separate, name))
    for view, layer in zip(stacked.layers, separate.layers, strict=True):
        numbers = view.pages_of(jnp.arange(PAGES))
        ours = jax.tree.map(lambda x, numbers=numbers: x[numbers], view._replace(first_page=None))
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[:PAGES]), ours, layer)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}, {"moments": True}])
def test_forks_and_rewinds_of_stacks_are_those_of_separate_layers(options):
    separate, stacked = filled(**options)
    assert [x.key_min.shape[0] for x in stacked.layers.pools] == [7, 14, 14]
    ints = lambda *numbers: jnp.array(numbers, jnp.int32)
    forked = [cache.fork(pool, ints(0), ints(2), ints(10))[0] for pool in (separate, stacked)]
    assert_same(forked[1], forked[0])
    taken = [cache.rewind(pool, jnp.array([False, False, True]), ints(10, 0, 9)) for pool in forked]
    assert_same(taken[1], taken[0])
    assert not np.array_equal(taken[1].layers[4].key_sum, forked[1].layers[4].key_sum)


def test_stacks_are_a_sequence_of_layers():
    separate, stacked = filled()
    layers = stacked.layers
    assert len(layers) == 5 and [layer.first_page for layer in layers] == [None, 0, 0, 7, 7]
    assert layers.places == (Place(0), Place(1, 0, 2), Place(2, 0, 2), Place(1, 1, 2), Place(2, 1, 2))
    assert layers[:1] + layers[1:] == layers and layers[:0] + layers[:] == layers
    with pytest.raises(ValueError, match="layers must be all or none of a stack to be taken out"):
        layers[:2]
    new = layers[3]._replace(value_norm=jnp.zeros_like(layers[3].value_norm))
    written = replace_layer(layers, 3, new)
    assert written.places == layers.places and not written.pools[1].value_norm.any()
    assert written.pools[1].first_page is None and written.pools[2] is layers.pools[2]
    assert jax.tree.structure(written) == jax.tree.structure(layers)
    assert len(replace_layer(separate.layers, 3, "written")) == 5


def test_layers_of_a_draft_model_follow_in_stacks_of_their_own():
    draft = SHAPE._replace(layers=2, kv_heads=1)
    pool = cache.allocate(STACKED._replace(drafters=(draft,)), ROWS, 16, page_size=PAGE, pages=PAGES)
    assert len(pool.layers) == 7 and [x.keys.shape[:2] for x in pool.layers[5:]] == [(7, 1)] * 2
    assert pool.layers[:5].places == PATTERN.places(5)


def test_a_fork_copies_no_stack():
    _, stacked = filled()
    ints = lambda *numbers: jnp.array(numbers, jnp.int32)
    lowered = jax.jit(cache.fork, donate_argnums=0).lower(stacked, ints(0), ints(1), ints(10))
    shape = f"f32[{','.join(map(str, stacked.layers.pools[1].keys.shape))}]"
    text = lowered.compile().as_text() or ""
    assert shape in text
    assert not [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]
