"""Keep the best entries of a row's cache, move them together, and give the emptied pages back."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..cache import Cache, Layer, shrink
from ..control import Controller
from ..pallas.paged_attention.quantised import Pool, gather, put_pages, reads_as
from ..state import RUNNING, State, Trace
from .method import Memory, Method, best


def generate(
    decoder: loop.Decoder,
    params: Any,
    controller: Controller,
    state: State,
    steps: int,
    *,
    capacity: int = 64,
    width: int | None = None,
) -> tuple[State, Trace]:
    """`loop.generate`, and the compression of the rows whose time has come.

    The launch ends early where a row's compression is due before `steps` are run. Raises ValueError for a
    model with layers that look through a window of positions: in a compressed cache, those of the text are
    gone.
    """
    steps = min(int(steps), capacity)
    if isinstance(state.page_policy, Method) and state.page_policy.compression is not None:
        window = getattr(getattr(decoder, "config", None), "sliding_window", None)
        if window is not None:
            raise ValueError(f"decoder has a sliding_window of {window}; accepted for compression are none")
        state = settle(state)
        wait = np.asarray(
            jnp.where(waiting(state), state.page_policy.compression.after - state.ledger.steps, 0)
        )
        steps = min([steps, *wait[wait > 0].tolist()])
    state, trace = loop.generate(decoder, params, controller, state, steps, capacity=capacity, width=width)
    return settle(state), trace


def settle(state: State) -> State:
    """Compress the rows whose time has come; the others, and states without a compression, stay as they are.

    The state is consumed if anything is done.
    """
    method = state.page_policy
    if not isinstance(method, Method) or method.compression is None:
        return state
    due = waiting(state) & (state.ledger.steps >= method.compression.after)
    return compress(state, due) if np.asarray(due).any() else state


def waiting(state: State) -> jax.Array:
    """The rows, bool `[rows]`, that run and are not compressed yet."""
    return state.page_policy_state.pending & (state.status == RUNNING)


def compress_row(state: State, row: jax.Array) -> State:
    """`compressed` for one row, int32 `[]`, at the cost of one row: the others are not looked at."""
    cache, only = state.cache, lambda x: x[row][None]
    own = ("status", "length", "evicted", "limit")
    alone = state._replace(
        **{name: only(getattr(state, name)) for name in own},
        page_policy_state=jax.tree.map(only, state.page_policy_state),
        cache=cache._replace(table=only(cache.table), granted=only(cache.granted)),
    )
    after = compressed(alone, jnp.ones(1, bool))
    put = lambda all_, x: all_.at[row].set(x[0])
    return state._replace(
        **{name: put(getattr(state, name), getattr(after, name)) for name in own},
        page_policy_state=jax.tree.map(put, state.page_policy_state, after.page_policy_state),
        cache=after.cache._replace(
            table=put(cache.table, after.cache.table), granted=put(cache.granted, after.cache.granted)
        ),
    )


@partial(jax.jit, donate_argnames="state")
def compress(state: State, rows: jax.Array) -> State:
    """`compressed`, at once; the state is consumed."""
    return compressed(state, rows)


def compressed(state: State, rows: jax.Array) -> State:
    """Keep what the method of the state keeps in the flagged rows (bool `[rows]`), and no more.

    Kept entries move to the front of the row's pages, in the order they had, each KV head its own; keys are
    rotated already and lose nothing by it. Summaries are those of what a page then holds. Pages that are
    emptied go back to the free stack, and `state.evicted` remembers how far the text is ahead of the cache.

    A row is left alone that holds no more than the budget, or a page that another row or the host owns, too.
    """
    memory: Memory = state.page_policy_state
    method: Method = state.page_policy
    policy, cache = method.compression, state.cache
    assert policy is not None
    held = jnp.arange(cache.table.shape[1]) < cache.granted[:, None]
    shared = (held & (cache.references[cache.table] > 1)).any(1)
    rows = rows & memory.pending
    chosen = rows & ~shared & (state.length > policy.budget)
    most = min(policy.budget * (cache.layers[0].keys.shape[1] if memory.held else 1), _positions(cache))
    layers, counts = [], []
    for layer, observed in zip(cache.layers, memory.observed, strict=True):
        keys, values = (_unpaged(x, cache.table) for x in (layer.keys, layer.values))
        rank = policy.rank(observed, keys, state.length)
        pages = policy.share(rank, cache.page_size)
        entries = jnp.int32(policy.budget) if pages is None else pages * cache.page_size
        entries = jnp.broadcast_to(entries, rank.shape[:2])
        index = order(rank, entries, most)
        layers.append(_rewrite(layer, cache, keys, values, index, entries, chosen))
        counts.append(pages)
    length = jnp.full_like(state.length, policy.budget)
    pages = -(-length // cache.page_size)
    if memory.held:
        pages = jnp.stack(counts).max((0, 2))
        length = pages * cache.page_size
        mine = lambda new, old: jnp.where(chosen[:, None], new, old)
        memory = memory._replace(held=tuple(map(mine, counts, memory.held)))
    length = jnp.where(chosen, length, state.length)
    gone = state.length - length
    # Lists of pages made before are void: without, all pages count as new.
    clear = lambda x: jnp.where(chosen.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros_like(x), x)
    return state._replace(
        length=length,
        evicted=state.evicted + gone,
        limit=state.limit - gone,
        page_policy_state=memory._replace(
            lists=jax.tree.map(clear, memory.lists),
            kept=jnp.where(chosen, pages, memory.kept),
            pending=memory.pending & ~rows,
        ),
        cache=shrink(cache._replace(layers=tuple(layers)), jnp.where(chosen, length, _positions(cache))),
    )


def order(rank: jax.Array, entries: jax.Array, most: int) -> jax.Array:
    """The positions of the `entries` `[rows, kv_heads]` greatest ranks, ascending: `[rows, kv_heads, most]`.

    What follows them is any position.
    """
    kept = best(rank, rank > -jnp.inf, entries)
    return jnp.argsort(~kept, axis=-1, stable=True)[..., :most]


def _positions(cache: Cache) -> int:
    return cache.table.shape[1] * cache.page_size


def _unpaged(pool: Pool, table: jax.Array) -> jax.Array:
    """`[rows, kv_heads, positions, head_dim]` of what rows hold, and of anything behind it."""
    x = gather(pool, table, reads_as(pool)).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _rewrite(
    layer: Layer,
    cache: Cache,
    keys: jax.Array,
    values: jax.Array,
    index: jax.Array,
    entries: jax.Array,
    chosen,
) -> Layer:
    """The layer with the entries `index` `[rows, kv_heads, most]` at the front of the chosen rows' pages."""
    size, most = cache.page_size, index.shape[2]
    pages = -(-most // size)
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, pages * size - most), (0, 0)))
    tiles = lambda x: pad(jnp.take_along_axis(x, index[..., None], 2)).reshape(
        *index.shape[:2], pages, size, x.shape[-1]
    )
    real = (jnp.arange(pages * size) < entries[..., None]).reshape(*entries.shape, pages, size, 1)
    k, v = (jnp.where(real, tiles(x), 0) for x in (keys, values))
    low, high = (
        reduce(jnp.where(real, k.astype(jnp.float32), far), 3)
        for reduce, far in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf))
    )
    wide = v.astype(jnp.float32)
    page = jnp.where(chosen[:, None], cache.table[:, :pages], cache.pages)
    put = lambda x, new: x.at[page].set(new.swapaxes(1, 2).astype(x.dtype))
    every = jnp.ones((*page.shape, size), bool)
    put_tiles = lambda pool, new: put_pages(pool, page, new.swapaxes(1, 2), every)[0]
    return Layer(
        put_tiles(layer.keys, k),
        put_tiles(layer.values, v),
        put(layer.key_min, low),
        put(layer.key_max, high),
        put(layer.key_sum, k.astype(jnp.float32).sum(3)),
        put(layer.value_norm, jnp.sqrt(jnp.square(wide).sum(-1)).max(-1)),
        None if layer.value_sum is None else put(layer.value_sum, wide.sum(3)),
        None if layer.value_square is None else put(layer.value_square, jnp.square(wide).sum(3)),
    )
