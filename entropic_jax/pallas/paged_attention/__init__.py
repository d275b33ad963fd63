"""Attention of one query per row to chosen pages of that row, and the choice of those pages.

Contract of every back end of `decode(q, keys, values, table, index, count, first, last)`:

* q `[rows, kv_heads, group, head_dim]`, already scaled by 1/√head_dim,
* keys, values `[pool, kv_heads, page_size, head_dim]`, or `Quantised` pools of that shape,
* table int32 `[rows, most pages of a row]`: where the pages of a row, in order of position, lie in the pool,
* index int32 `[rows, kv_heads, most listed]`: which pages of the row to read, as entries of its table row,
  ascending and distinct; of them the first count[row, head] (int32 `[rows, kv_heads]`) are listed.
  Both None: every page,
* first, last int32 `[rows]`: of the listed pages, positions `first ≤ p < last` are attended to; none where
  `last ≤ first`,

returns `Partial(out, log_sum)`: the output in the shape of q, and float32 `[rows, kv_heads, group]`
ln Σ exp(q · k) over what was attended to; zeros and −inf where that is nothing. Pages that are not listed or
lie outside `[first, last)` are not read, and what lies in a page past `last` never reaches the result.

Contract of `choose(q, summary, information, table, last, dropped_mass_limit, page_size, rules)`: the pages to
list, see `Rules` and the reference.

* summary: the page summaries of a layer, each over the pool: key_min, key_max, key_sum
  `[pool, kv_heads, head_dim]`,
* information float32 `[pool, kv_heads]`, ≥ 0: how much a page matters beside its attention mass,
* dropped_mass_limit float32 `[rows]`: share of the weighted mass that may stay unread; 0 keeps everything,

returns `Choice`; it is a step function, and is not differentiated.

A back end that cannot serve a case raises NotImplementedError with the reason. Every operation takes
`backend`, the name of the one to use (see `dispatch`); gradients are those of the reference.
"""

from functools import partial

import jax
import jax.numpy as jnp

from ..dispatch import Operation, for_platform, interpreted
from . import cpu, cpu_choose, cpu_write, lists, prefill_reference, reference
from .reference import Choice, Partial, Rules, Summary
from .split import merge

__all__ = [
    "Choice",
    "Partial",
    "Rules",
    "Summary",
    "choose",
    "decode",
    "decode_by_page",
    "prefill",
    "write",
]

DECODE = Operation(
    "paged_attention.decode",
    {
        "tpu": for_platform("tpu", f"{__name__}.tpu", "decode"),
        "gpu": for_platform("gpu", f"{__name__}.gpu", "decode"),
        "cpu": cpu.decode,
        "xla": reference.decode,
        "interpret": interpreted(f"{__name__}.tpu", "decode"),
    },
)
PREFILL = Operation(
    "paged_attention.prefill",
    {
        "tpu": for_platform("tpu", f"{__name__}.prefill_tpu", "prefill"),
        "gpu": for_platform("gpu", f"{__name__}.prefill_gpu", "prefill"),
        "xla": prefill_reference.prefill,
        "interpret": interpreted(f"{__name__}.prefill_tpu", "prefill"),
    },
)
WRITE = Operation(
    "paged_attention.write",
    {
        "tpu": for_platform("tpu", f"{__name__}.write_tpu", "write"),
        "cpu": cpu_write.write,
        "xla": reference.write,
        "interpret": interpreted(f"{__name__}.write_tpu", "write"),
    },
)
CHOOSE = Operation("paged_attention.choose", {"cpu": cpu_choose.choose, "xla": reference.choose})


def decode(q, keys, values, table, index, count, first, last, *, backend: str | None = None) -> Partial:
    """Attention of one query per row, by the first back end that accepts; see the package.

    Raises ValueError for lists that are not ascending and distinct, where their values are known: not under
    `jit`, where they lead to anything.
    """
    lists.check(table, index, count)
    return _decode(backend, q, keys, values, table, index, count, first, last)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decode(backend, q, keys, values, *where) -> Partial:
    return DECODE(q, keys, values, *where, backend=backend)


def _decode_forward(backend, q, keys, values, *where):
    return _decode(backend, q, keys, values, *where), (q, keys, values, where)


def _decode_backward(backend, saved, gradient):
    q, keys, values, where = saved
    _, pull = jax.vjp(lambda *x: reference.gathered(*x, *where), q, keys, values)
    return (*pull(gradient), *(None for _ in where))


_decode.defvjp(_decode_forward, _decode_backward)


def decode_by_page(
    q, keys, values, table, index, count, first, last, *, backend: str | None = None
) -> tuple[Partial, jax.Array]:
    """`decode`, and the share of the attention that each page of a row got.

    The shares are float32 `[rows, kv_heads, group, most pages of a row]`; they sum to 1 where something was
    attended to, and are 0 on a page that is not listed, which is not read. Every page is a row of its own to
    `decode`, whatever back end serves it, so that each listed tile is read once; the parts are merged.
    """
    lists.check(table, index, count)
    rows, kv_heads, _, _ = q.shape
    size, most = keys.shape[2], table.shape[1]
    start = jnp.arange(most, dtype=jnp.int32) * size
    within = lambda x: jnp.clip(x[:, None] - start, 0, size).reshape(-1)  # of each page
    one = (None, None)
    if index is not None:
        listed = jnp.arange(index.shape[2]) < count[..., None]
        row, head = jnp.arange(rows)[:, None, None], jnp.arange(kv_heads)[:, None]
        entry = jnp.where(listed, index, most)
        kept = jnp.zeros((rows, kv_heads, most), jnp.int32).at[row, head, entry].set(1, mode="drop")
        kept = kept.swapaxes(1, 2).reshape(rows * most, kv_heads)
        one = (jnp.zeros((*kept.shape, 1), jnp.int32), kept)
    where = (table.reshape(-1, 1), *one, within(first), within(last))
    parts = decode(jnp.repeat(q, most, 0), keys, values, *where, backend=backend)
    apart = lambda x: jnp.moveaxis(x.reshape(rows, most, *x.shape[1:]), 1, 2)  # [rows, kv_heads, pages, …]
    log_sum = apart(parts.log_sum)
    whole = merge(apart(parts.out).astype(jnp.float32), log_sum, jnp.ones(log_sum.shape[:3], bool))
    some = whole.log_sum > -jnp.inf
    share = jnp.exp(log_sum - jnp.where(some, whole.log_sum, 0.0)[:, :, None])
    return Partial(whole.out.astype(q.dtype), whole.log_sum), share.swapaxes(2, 3)


def prefill(q, keys, values, table, index, count, first, query, last, *, backend: str | None = None):
    """Causal attention of several queries per row, q `[rows, kv_heads, group, n, head_dim]`; q's shape.

    Query i of a row stands at position `query[row] + i` and sees positions from `first[row, i]` to its own,
    of the listed pages; the rest as `decode`.
    """
    lists.check(table, index, count)
    return _prefill(backend, q, keys, values, table, index, count, first, query, last)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _prefill(backend, q, keys, values, *where):
    return PREFILL(q, keys, values, *where, backend=backend)


def _prefill_forward(backend, q, keys, values, *where):
    return _prefill(backend, q, keys, values, *where), (q, keys, values, where)


def _prefill_backward(backend, saved, gradient):
    q, keys, values, where = saved
    _, pull = jax.vjp(lambda *x: reference.prefill_gathered(*x, *where).out, q, keys, values)
    return (*pull(gradient), *(None for _ in where))


_prefill.defvjp(_prefill_forward, _prefill_backward)


def choose(
    q, summary: Summary, information, table, last, dropped_mass_limit, page_size: int, rules: Rules,
    *, backend: str | None = None,
) -> Choice:  # fmt: skip
    """The pages to read, by the first back end that accepts; see the package."""
    return CHOOSE(q, summary, information, table, last, dropped_mass_limit, page_size, rules, backend=backend)


def write(tiles, summaries, k, v, page, slot, *, backend: str | None = None):
    """Store one key and value per row, in place, and take the key into the summaries of its page.

    tiles: keys and values of the pool; summaries: key_min, key_max, key_sum, value_norm, as in a layer; k, v
    `[rows, kv_heads, head_dim]`; page, slot int32 `[rows]`: where they go. Slot 0 starts a page, and its
    summaries. Returns what tiles and summaries have become.
    """
    return _write(backend, tuple(tiles), tuple(summaries), k, v, page, slot)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _write(backend, tiles, summaries, k, v, page, slot):
    return WRITE(tiles, summaries, k, v, page, slot, backend=backend)


def _write_forward(backend, tiles, summaries, k, v, page, slot):
    saved = (tiles, summaries, k, v, page, slot)
    return _write(backend, *saved), saved


def _write_backward(backend, saved, gradient):
    *operands, page, slot = saved
    again = lambda tiles, summaries, k, v: reference.write(tiles, summaries, k, v, page, slot)
    _, pull = jax.vjp(again, *operands)
    return (*pull(gradient), None, None)


_write.defvjp(_write_forward, _write_backward)
