"""Row subsets: gather, scatter, and rows that stay unchanged."""

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.phases import batch
from entropic_jax.state.row_subset import RowSubset, Shared, where_rows
from tests import tiny

SELECTED = jnp.array([False, True, False, True, True])
VALUES = jnp.arange(10).reshape(5, 2)


def test_the_first_selected_rows_are_gathered_in_order():
    rows = RowSubset(SELECTED, 2)
    np.testing.assert_array_equal(rows.gather(VALUES), [[2, 3], [6, 7]])


def test_places_without_a_row_are_filled():
    rows = RowSubset(SELECTED, 4)
    np.testing.assert_array_equal(rows.gather(VALUES, -1), [[2, 3], [6, 7], [8, 9], [-1, -1]])


@pytest.mark.parametrize("width", [1, 2, 4])
def test_scatter_writes_each_row_to_where_it_was_gathered_from(width):
    rows = RowSubset(SELECTED, width)
    written = np.asarray(rows.scatter(10 * rows.gather(VALUES), VALUES))
    expected = np.array(VALUES)
    expected[np.flatnonzero(SELECTED)[:width]] *= 10
    np.testing.assert_array_equal(written, expected)


def test_a_scalar_stands_for_the_rows_outside():
    rows = RowSubset(SELECTED, 2)
    assert rows.scatter(jnp.ones(2, bool), False).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("width", [None, 5, 9])
def test_without_a_narrower_width_nothing_moves(width):
    rows = RowSubset(SELECTED, width)
    assert rows.gather(VALUES) is VALUES and rows.scatter(VALUES, 0) is VALUES


@pytest.mark.parametrize(("flags", "changes"), [((False, False), False), ((True, False), True)])
def test_what_is_shared_changes_where_any_row_does(flags, changes):
    old = (jnp.zeros(2), Shared(jnp.zeros(3)))
    rows, shared = where_rows(jnp.array(flags), (jnp.ones(2), Shared(jnp.ones(3))), old)
    assert rows.tolist() == [float(flag) for flag in flags] and shared.value.tolist() == [float(changes)] * 3


def test_a_subset_by_index_ignores_numbers_past_the_last_row():
    rows = RowSubset.at(jnp.array([3, 5, 0]), 5)
    np.testing.assert_array_equal(rows.gather(VALUES, -1), [[6, 7], [-1, -1], [0, 1]])
    written = rows.scatter(jnp.full((3, 2), 50), VALUES)
    np.testing.assert_array_equal(written, [[50, 50], [2, 3], [4, 5], [50, 50], [8, 9]])


def test_padding_of_a_batch_has_no_page_of_anybody():
    state = tiny.begin(tiny.prompts(9, 5, 12))
    view = batch.gather(state, RowSubset(jnp.array([False, True, False]), 2))
    assert (np.asarray(view.cache.table[1]) == state.cache.pages).all()
    np.testing.assert_array_equal(view.cache.table[0], state.cache.table[1])
    assert view.length.tolist() == [4, 0]


def test_a_state_that_did_not_change_is_scattered_as_it_is():
    state = tiny.begin(tiny.prompts(9, 5, 12))
    rows = RowSubset(jnp.array([True, False, True]), 2)
    view = batch.gather(state, rows)
    after = batch.scatter(state, rows, view, view._replace(length=view.length + 1))
    assert after.length.tolist() == [9, 4, 12]
    assert after.seed is state.seed and after.action.temperature is state.action.temperature
