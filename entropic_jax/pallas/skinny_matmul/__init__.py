"""A few rows times large matrices: what a step of decoding spends most of its time on.

Contract of every back end of `project(x, weights)`:

* x `[rows, inputs]`,
* weights: one or more `[inputs, outputs]`, all of one dtype, that of x or a narrower one, which is widened as
  it is read: the product is that of the widened weight,

returns a tuple of `[rows, outputs]`, one for each weight, in the dtype of x. A row of a result depends, bit
for bit, on that row of x alone, not on how many there are.

With more than `MOST_ROWS` rows, where arithmetic costs more than reading, `project` is the plain product.
"""

from functools import partial
from typing import Any

import jax

from ..dispatch import Operation
from . import cpu, reference

__all__ = ["MOST_ROWS", "project", "serves"]

MOST_ROWS = 64
PROJECT = Operation("few_rows.project", {"cpu": cpu.project, "xla": reference.project})


def serves(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether few float32 rows are multiplied by such a weight as it is, without a wider copy of it."""
    return "cpu" in PROJECT.candidates() and cpu.serves(shape, dtype)


def project(x: jax.Array, *weights: jax.Array, back_end: str | None = None) -> tuple[jax.Array, ...]:
    """Rows `[..., inputs]` times each of the weights `[inputs, outputs]`: each `[..., outputs]`."""
    rows = x.size // x.shape[-1]
    flat = x.reshape(rows, x.shape[-1])
    few = rows <= MOST_ROWS
    found = _project(back_end, flat, weights) if few else reference.project(flat, weights)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in found)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(back_end, x, weights):
    return PROJECT(x, weights, back_end=back_end)


def _forward(back_end, x, weights):
    return _project(back_end, x, weights), (x, weights)


def _backward(back_end, saved, gradient):
    return jax.vjp(reference.project, *saved)[1](gradient)


_project.defvjp(_forward, _backward)
