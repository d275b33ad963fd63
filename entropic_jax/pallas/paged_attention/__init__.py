"""Attention of one query per row to the pages of that row.

Contract of every back end: `decode(q, keys, values, table, first, last)` with

* q `[rows, kv_heads, group, head_dim]`, already scaled by 1/√head_dim,
* keys, values `[pages, kv_heads, page_size, head_dim]`,
* table int32 `[rows, most pages of a row]`, the pages of a row in order of position,
* first, last int32 `[rows]`: positions `first ≤ p < last` are attended to; none where `last ≤ first`,

returns the output in the shape of q (zeros for a row without positions). Pages outside
`[first, last)` are not read, and what lies in a page past `last` never reaches the result.
A back end that cannot serve a case raises NotImplementedError with the reason.
"""

from functools import partial

import jax

from ..dispatch import first_that_accepts
from . import cpu, reference

BACK_ENDS = {"cpu": cpu.decode, "xla": reference.decode}


@jax.custom_vjp
def decode(q, keys, values, table, first, last):
    """The output of the first back end that accepts; its gradient is the reference's."""
    return first_that_accepts("paged_attention", BACK_ENDS)(q, keys, values, table, first, last)


def _forward(q, keys, values, table, first, last):
    return decode(q, keys, values, table, first, last), (q, keys, values, table, first, last)


def _backward(saved, gradient):
    q, keys, values, *where = saved
    _, pull = jax.vjp(partial(_differentiable, where=where), q, keys, values)
    return (*pull(gradient), None, None, None)


def _differentiable(q, keys, values, where):
    return reference.gathered(q, keys, values, *where)


decode.defvjp(_forward, _backward)
