"""Stacking: arrays of rows side by side, as loops carry them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, parameters, start
from entropic_jax.control.pruning import Pruning
from entropic_jax.control.scheduling import Scheduling
from entropic_jax.control.temperature import Mirostat
from entropic_jax.state import EMITTED_FIELDS
from entropic_jax.state.row_subset import Shared
from entropic_jax.state.stacking import MOST, Stacking, StateStacking
from tests import tiny


def numbered(count: int, dtype, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    size = int(np.prod(shape))
    return {f"{i:02}": (jnp.arange(size) + i * size).reshape(shape).astype(dtype) for i in range(count)}


def assert_same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("count", [1, MOST - 1, MOST, MOST + 1, 3 * MOST])
@pytest.mark.parametrize("shape", [(1,), (3,), (4, 3)])
def test_what_is_stacked_comes_back(count, shape):
    tree = {
        "f": numbered(count, jnp.float32, shape),
        "i": numbered(2, jnp.int32, shape),
        "other": jnp.ones((*shape, 5)),
        "shared": Shared(jnp.ones(shape)),
        "none": None,
    }
    stacking = Stacking(tree, shape)
    arrays = stacking.stack(tree)
    assert len(arrays) == -(-count // MOST) + 1 + 2
    assert_same(stacking.unstack(arrays), tree)


def test_what_all_rows_share_is_not_stacked():
    tree = {"a": jnp.zeros(2), "b": Shared(jnp.ones(2))}
    assert [type(x) for x in Stacking(tree, (2,)).stack(tree)][1] is Shared


def test_room_holds_what_is_put_where():
    first, second = (
        {"a": jnp.full(3, n), "b": jnp.full(3, -n), "c": jnp.full((3, 2), n)} for n in (1.0, 2.0)
    )
    stacking = Stacking(first, (3,))
    room = stacking.put(stacking.put(stacking.room(4, 2), first, jnp.int32(3), 0), second, 1, jnp.int32(1))
    filled = stacking.unstack(room)
    expected = np.zeros((4, 2, 3))
    expected[3, 0], expected[1, 1] = 1, 2
    np.testing.assert_array_equal(filled["a"], expected)
    np.testing.assert_array_equal(filled["b"], -expected)
    np.testing.assert_array_equal(filled["c"], np.repeat(expected[..., None], 2, -1))


@pytest.mark.slow
@pytest.mark.parametrize("laws", [[], [Mirostat(1.2), Pruning(), Scheduling(1)]])
def test_a_state_comes_back(laws):
    model, controller = tiny.model(), chain(*laws)
    state = start(
        model.decoder,
        model.params,
        controller,
        allocate(model.decoder.shape, 2, 32, page_size=8),
        [[3, 1], [4]],
        key=jax.random.key(0),
        max_tokens=9,
        sample=parameters(2, temperature=[0.5, 1.0]),
    )
    state, _ = generate(model.decoder, model.params, controller, state, 4)
    state = state._replace(key=None)  # NumPy knows no keys
    fields = StateStacking(state)
    rest, arrays = fields.split(state)
    assert all(getattr(rest, name) is None for name in EMITTED_FIELDS)
    assert_same(fields.unstack(rest, arrays), state)
