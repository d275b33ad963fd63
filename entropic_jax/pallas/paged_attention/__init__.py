"""Attention of one query per row to chosen pages of that row, and the choice of those pages.

Contract of every back end of `decode(q, keys, values, table, index, count, first, last)`:

* q `[rows, kv_heads, group, head_dim]`, already scaled by 1/√head_dim,
* keys, values `[pool, kv_heads, page_size, head_dim]`,
* table int32 `[rows, most pages of a row]`: where the pages of a row, in order of position, lie in the pool,
* index int32 `[rows, kv_heads, most listed]`: which pages of the row to read, as entries of its table row,
  ascending and distinct; of them the first count[row, head] (int32 `[rows, kv_heads]`) are listed.
  Both None: every page,
* first, last int32 `[rows]`: of the listed pages, positions `first ≤ p < last` are attended to; none where
  `last ≤ first`,

returns `Partial(out, log_sum)`: the output in the shape of q, and float32 `[rows, kv_heads, group]`
ln Σ exp(q · k) over what was attended to; zeros and −inf where that is nothing. Pages that are not listed or
lie outside `[first, last)` are not read, and what lies in a page past `last` never reaches the result.

Contract of `choose(q, summary, information, table, last, drop, page_size, rules)`: which pages to
list, see `Rules` and the reference.

* summary: the page summaries of a layer, each over the pool: key_min, key_max, key_sum
  `[pool, kv_heads, head_dim]`,
* information float32 `[pool, kv_heads]`, ≥ 0: how much a page matters beside its attention mass,
* drop float32 `[rows]`: the share of the weighted mass that may stay unread; at 0 everything is kept,

returns `Choice`. A back end that cannot serve a case raises NotImplementedError with the reason.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import jax

from ..dispatch import first_that_accepts
from . import cpu, cpu_choose, cpu_write, reference
from .reference import Choice, Partial, Rules, Summary

__all__ = ["Choice", "Partial", "Rules", "Summary", "choose", "decode", "prefill", "write"]


def _on(device: str, name: str, also: tuple[str, ...] = ()) -> Callable[..., Any]:
    """`name` of the module for a kind of device, imported where it is needed or asked for."""
    module = f"{name}_{device}" if name != "decode" else device

    def call(*arguments: Any) -> Any:
        if jax.default_backend() != device and os.environ.get("ENTROPIC_KERNELS") not in (device, *also):
            raise NotImplementedError(f"the default device is no {device.upper()}")
        return getattr(importlib.import_module(f".{module}", __name__), name)(*arguments)

    return call


DECODE = {
    "tpu": _on("tpu", "decode", ("interpret",)),
    "gpu": _on("gpu", "decode"),
    "cpu": cpu.decode,
    "xla": reference.decode,
}
PREFILL = {"tpu": _on("tpu", "prefill", ("interpret",)), "xla": reference.prefill_listed}
WRITE = {"tpu": _on("tpu", "write", ("interpret",)), "cpu": cpu_write.write}
CHOOSE = {"cpu": cpu_choose.choose, "xla": reference.choose}


@jax.custom_vjp
def decode(q, keys, values, table, index, count, first, last) -> Partial:
    """The result of the first back end that accepts; its gradient is the reference's."""
    return first_that_accepts("paged_attention", DECODE)(q, keys, values, table, index, count, first, last)


def _forward(q, keys, values, *where):
    return decode(q, keys, values, *where), (q, keys, values, where)


def _backward(saved, gradient):
    q, keys, values, where = saved
    _, pull = jax.vjp(lambda *x: reference.gathered(*x, *where), q, keys, values)
    return (*pull(gradient), *(None for _ in where))


decode.defvjp(_forward, _backward)


def prefill(q, keys, values, table, index, count, first, query, last):
    """Causal attention of several queries per row, q `[rows, kv_heads, group, n, head_dim]`; q's shape.

    Query i of a row stands at position `query[row] + i` and sees positions from `first[row, i]` to its own,
    of the listed pages; the rest as `decode`.
    """
    call = first_that_accepts("paged_prefill", PREFILL)
    return call(q, keys, values, table, index, count, first, query, last)


def choose(q, summary: Summary, information, table, last, drop, page_size: int, rules: Rules) -> Choice:
    """The result of the first back end that accepts."""
    call = first_that_accepts("choose_pages", CHOOSE)
    return call(q, summary, information, table, last, drop, page_size, rules)


def write(tiles, summaries, k, v, page, slot):
    """Store one key and value per row, in place; None where no back end does it in one go.

    tiles: keys and values of the pool; summaries: key_min, key_max, key_sum, value_norm, as in a layer; k, v
    `[rows, kv_heads, head_dim]`; page, slot int32 `[rows]`: where they go. Slot 0 starts a page, and its
    summaries. Returns what tiles and summaries have become.
    """
    named = os.environ.get("ENTROPIC_KERNELS")
    for name, back_end in WRITE.items():
        if named is None or named in (name, "interpret"):
            try:
                return back_end(tiles, summaries, k, v, page, slot)
            except NotImplementedError:
                continue
    return None
