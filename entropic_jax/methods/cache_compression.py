"""KV-cache compression: keeps a row's best entries, compacts them and releases the emptied pages.

Which entries are best is decided by the `CompressionPolicy` of the state's page policy. The compression is
applied once per row, after prefill and `CompressionPolicy.delay` decode steps.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..control import Controller
from ..pallas.paged_attention.quantised import Pool, gather, put_pages, reads_as
from ..speculation import Speculator
from ..state import RUNNING, State, Trace
from ..state.cache import Cache, Layer, shrink
from ..state.layer_stacks import replace_layer
from .policies import CompressionPolicy, MethodState, top_mask


def generate(
    decoder: loop.Decoder,
    params: Any,
    controller: Controller,
    state: State,
    steps: int,
    *,
    capacity: int = 64,
    width: int | None = None,
    speculator: Speculator | None = None,
) -> tuple[State, Trace]:
    """`loop.generate`, with compression of the rows that are due.

    Args:
        decoder: the model's functions.
        params: the model's parameters.
        controller: the controller that the state was started with.
        state: the state; it is consumed.
        steps: most steps of the launch. It ends earlier when a row's compression becomes due.
        capacity: most steps that the trace holds; static.
        width: most sequences that advance in a step; None is all.
        speculator: as in `loop.generate`; not together with compression.

    Returns:
        The state and the trace, as `loop.generate`.

    Raises:
        ValueError: for a model with sliding-window attention. A window counts positions of the text, which a
            compressed cache no longer holds. Also where a cache would be compressed and tokens drafted.
    """
    steps = min(int(steps), capacity)
    compression = _compression(state)
    if compression is not None:
        if speculator is not None:
            raise ValueError("speculator must be None where the cache is compressed")
        window = min(filter(None, getattr(decoder, "windows", ())), default=None)
        if window is not None:
            raise ValueError(f"decoder must have no sliding_window to compress its cache; got {window}")
        state = compress_due_rows(state)
        steps_left = np.asarray(jnp.where(pending_rows(state), compression.delay - state.ledger.steps, 0))
        steps = min([steps, *steps_left[steps_left > 0].tolist()])
    state, trace = loop.generate(
        decoder, params, controller, state, steps, capacity=capacity, width=width, speculator=speculator
    )
    return compress_due_rows(state), trace


def _compression(state: State) -> CompressionPolicy | None:
    return None if state.page_policy is None else state.page_policy.compression


def compress_due_rows(state: State) -> State:
    """Compresses the rows that are due; other rows, and states without compression, stay as they are.

    The state is consumed if a row is due.
    """
    compression = _compression(state)
    if compression is None:
        return state
    due = pending_rows(state) & (state.ledger.steps >= compression.delay)
    return compress(state, due) if np.asarray(due).any() else state


def pending_rows(state: State) -> jax.Array:
    """The running rows that are not compressed yet, bool `[rows]`."""
    return state.page_policy_state.pending & (state.status == RUNNING)


def compress_row(state: State, row: jax.Array) -> State:
    """`compress_rows` for one row, int32 `[]`, at the cost of one row."""
    cache = state.cache

    def take(x: Any) -> Any:
        return x[row][None]

    def put(x: Any, new: Any) -> Any:
        return x.at[row].set(new[0])

    per_row = ("status", "length", "evicted", "limit")
    single = state._replace(
        **{name: take(getattr(state, name)) for name in per_row},
        page_policy_state=jax.tree.map(take, state.page_policy_state),
        cache=cache._replace(table=take(cache.table), granted=take(cache.granted)),
    )
    after = compress_rows(single, jnp.ones(1, bool))
    return state._replace(
        **{name: put(getattr(state, name), getattr(after, name)) for name in per_row},
        page_policy_state=jax.tree.map(put, state.page_policy_state, after.page_policy_state),
        cache=after.cache._replace(
            table=put(cache.table, after.cache.table), granted=put(cache.granted, after.cache.granted)
        ),
    )


@partial(jax.jit, donate_argnames="state")
def compress(state: State, rows: jax.Array) -> State:
    """`compress_rows`, jit-compiled; the state is consumed."""
    return compress_rows(state, rows)


def compress_rows(state: State, rows: jax.Array) -> State:
    """Keeps only the entries that the state's compression policy scores highest.

    Kept entries move to the front of the row's pages in their original order, separately for each KV head;
    keys are already rotated, so moving loses nothing. Page summaries are recomputed. Emptied pages return to
    the free stack, and `state.evicted` counts the positions removed.

    A row stays as it is if it holds no more than the budget, or a page that another row or the host owns too.

    Args:
        state: a state whose page policy has a compression.
        rows: bool `[rows]`, the rows to compress.

    Returns:
        The new state.
    """
    memory: MethodState = state.page_policy_state
    policy: CompressionPolicy = state.page_policy.compression
    cache = state.cache
    held = jnp.arange(cache.table.shape[1]) < cache.granted[:, None]
    shared = (held & (cache.references[cache.table] > 1)).any(1)
    rows = rows & memory.pending
    selected = rows & ~shared & (state.length > policy.budget)
    kv_heads = cache.layers[0].keys.shape[1]
    max_entries = min(policy.budget * (kv_heads if memory.held_pages else 1), _capacity(cache))
    layers, pages_per_head = cache.layers, []
    for number, observed in enumerate(memory.observed):
        layer = layers[number]
        keys, values = (_unpage(x, layer.pages_of(cache.table)) for x in (layer.keys, layer.values))
        scores = policy.score_entries(observed, keys, state.length)
        pages = policy.pages_per_head(scores, cache.page_size)
        entries = jnp.int32(policy.budget) if pages is None else pages * cache.page_size
        entries = jnp.broadcast_to(entries, scores.shape[:2])
        index = top_positions(scores, entries, max_entries)
        written = _write_front(layer, cache, keys, values, index, entries, selected)
        layers = replace_layer(layers, number, written)
        pages_per_head.append(pages)
    length = jnp.full_like(state.length, policy.budget)
    kept_pages = -(-length // cache.page_size)
    if memory.held_pages:
        kept_pages = jnp.stack(pages_per_head).max((0, 2))
        length = kept_pages * cache.page_size
        memory = memory._replace(
            held_pages=tuple(
                jnp.where(selected[:, None], new, old)
                for new, old in zip(pages_per_head, memory.held_pages, strict=True)
            )
        )
    length = jnp.where(selected, length, state.length)
    removed = state.length - length

    def clear(x: jax.Array) -> jax.Array:
        return jnp.where(selected.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros_like(x), x)

    return state._replace(
        length=length,
        evicted=state.evicted + removed,
        limit=state.limit - removed,
        page_policy_state=memory._replace(
            page_lists=jax.tree.map(clear, memory.page_lists),  # older lists are void: all pages count as new
            kept_pages=jnp.where(selected, kept_pages, memory.kept_pages),
            pending=memory.pending & ~rows,
        ),
        cache=shrink(cache._replace(layers=layers), jnp.where(selected, length, _capacity(cache))),
    )


def top_positions(scores: jax.Array, entries: jax.Array, max_entries: int) -> jax.Array:
    """The positions of the highest scores in ascending order.

    Args:
        scores: `[rows, kv_heads, positions]`.
        entries: int32 `[rows, kv_heads]`, how many positions to return.
        max_entries: size of the last axis of the result; static. Positions after the first `entries` are
            arbitrary.

    Returns:
        int32 `[rows, kv_heads, max_entries]`.
    """
    kept = top_mask(scores, scores > -jnp.inf, entries)
    return jnp.argsort(~kept, axis=-1, stable=True)[..., :max_entries]


def _capacity(cache: Cache) -> int:
    """Most positions of a row."""
    return cache.table.shape[1] * cache.page_size


def _unpage(pool: Pool, table: jax.Array) -> jax.Array:
    """The rows' entries, `[rows, kv_heads, positions, head_dim]`; arbitrary after the positions held."""
    x = gather(pool, table, reads_as(pool)).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _write_front(
    layer: Layer,
    cache: Cache,
    keys: jax.Array,
    values: jax.Array,
    index: jax.Array,
    entries: jax.Array,
    selected: jax.Array,
) -> Layer:
    """Writes the entries `index` `[rows, kv_heads, max_entries]` to the front of the selected rows' pages."""
    size, max_entries = cache.page_size, index.shape[2]
    pages = -(-max_entries // size)

    def tiles(x: jax.Array) -> jax.Array:
        x = jnp.take_along_axis(x, index[..., None], 2)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, pages * size - max_entries), (0, 0)))
        return x.reshape(*index.shape[:2], pages, size, x.shape[-1])

    valid = (jnp.arange(pages * size) < entries[..., None]).reshape(*entries.shape, pages, size, 1)
    k, v = (jnp.where(valid, tiles(x), 0) for x in (keys, values))
    key_min = jnp.min(jnp.where(valid, k.astype(jnp.float32), jnp.inf), 3)
    key_max = jnp.max(jnp.where(valid, k.astype(jnp.float32), -jnp.inf), 3)
    v32 = v.astype(jnp.float32)
    page = layer.pages_of(jnp.where(selected[:, None], cache.table[:, :pages], cache.pages))
    all_positions = jnp.ones((*page.shape, size), bool)

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return x.at[page].set(new.swapaxes(1, 2).astype(x.dtype))

    def put_tiles(pool: Pool, new: jax.Array) -> Pool:
        return put_pages(pool, page, new.swapaxes(1, 2), all_positions)[0]

    return Layer(
        put_tiles(layer.keys, k),
        put_tiles(layer.values, v),
        put(layer.key_min, key_min),
        put(layer.key_max, key_max),
        put(layer.key_sum, k.astype(jnp.float32).sum(3)),
        put(layer.value_norm, jnp.sqrt(jnp.square(v32).sum(-1)).max(-1)),
        None if layer.value_sum is None else put(layer.value_sum, v32.sum(3)),
        None if layer.value_square is None else put(layer.value_square, jnp.square(v32).sum(3)),
    )
