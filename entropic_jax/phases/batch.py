"""Batch: the rows of the state that a step or a prefill computes, gathered once and scattered back once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..sampling import processors
from ..state import ROW_FIELDS, RUNNING, State
from ..state.cache import grant
from ..state.row_subset import RowSubset, map_rows


class Batch(NamedTuple):
    """The rows that a step computes."""

    state: State  # every per-row field holds the entries of these rows; the page pool is that of all rows
    active: jax.Array  # bool [rows]: the row advances; other rows only fill the batch up


def gather_active(state: State, width: int | None, ahead: int = 0) -> tuple[RowSubset, State, Batch]:
    """Gathers the rows that can advance, each with a page for its next token.

    Args:
        state: the loop's state.
        width: rows at most, static; None takes all rows where they are.
        ahead: tokens beyond the next one for which rows get pages while any are free; static.

    Returns:
        Which rows they are, the state with the pages granted, and the batch.
    """
    ready = (state.status == RUNNING) & (state.action.quota > 0)
    rows = RowSubset(ready, width)
    ready &= rows.scatter(jnp.ones(rows.rows, bool), False)
    cache, granted = grant(state.cache, jnp.where(ready, state.length + 1, 0))
    if ahead:
        cache, _ = grant(
            cache, jnp.where(ready & granted, jnp.minimum(state.length + 1 + ahead, state.limit), 0)
        )
    state = state._replace(cache=cache)
    return rows, state, Batch(gather(state, rows), rows.gather(ready & granted, False))


def gather(state: State, rows: RowSubset) -> State:
    """The state of a subset of the rows. Pages, and what else is not per row, stay those of all rows."""
    fields = {name: rows.gather(getattr(state, name)) for name in ROW_FIELDS}
    table = rows.gather(state.cache.table, state.cache.pages)
    return state._replace(**fields, cache=state.cache._replace(table=table))


def scatter(state: State, rows: RowSubset, before: State, after: State) -> State:
    """The state of all rows with what has changed in a subset of them.

    Only arrays that were replaced are written. History and text are left to `record`, which knows which
    entries of a row have changed.

    Args:
        state: the state of all rows.
        rows: the subset.
        before: the state of the subset as gathered.
        after: the state of the subset as computed.
    """

    def put(new: Any, gathered: Any, old: Any) -> Any:
        return old if new is gathered else rows.scatter(new, old)

    fields = {
        name: map_rows(put, getattr(after, name), getattr(before, name), getattr(state, name))
        for name in ROW_FIELDS
        if name not in ("history", "text")
    }
    cache = state.cache._replace(layers=after.cache.layers, surprisal=after.cache.surprisal)
    return state._replace(**fields, cache=cache)


def record(state: State, tokens: jax.Array, emitted: jax.Array) -> State:
    """Enters the tokens of a step into the history that penalties read, and into the text that drafters read.

    Args:
        state: after the step.
        tokens: int32 `[n, rows]`; those that a row emits come first.
        emitted: bool `[n, rows]`.
    """
    state = state._replace(history=processors.record(state.history, tokens, emitted))
    return record_text(state, tokens, emitted)


def record_text(state: State, tokens: jax.Array, emitted: jax.Array) -> State:
    """Enters the tokens of a step into the text only.

    Args:
        state: after the step, with the tokens in the history.
        tokens: int32 `[n, rows]`; those that a row emits come first.
        emitted: bool `[n, rows]`.
    """
    if state.text is None:
        return state
    context = state.text.shape[1]
    first = state.length + state.evicted - emitted.sum(0, dtype=jnp.int32) + 1
    position = first + jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.arange(tokens.shape[1]), jnp.where(emitted, position, context)
    return state._replace(text=state.text.at[index].set(tokens, mode="drop"))
