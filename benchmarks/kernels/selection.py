"""Page selection from summaries, and the dense attention whose reads it saves."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax.pallas import paged_attention
from entropic_jax.pallas.paged_attention import PageSummary, SelectionRules

from .attention import Shape, arrays, shapes
from .timing import interleaved_seconds, on_cpu


def measure(quick: bool, repeat: int) -> Iterator[dict[str, Any]]:
    """Entries of dense attention and of page selection by each back end; they take turns."""
    for shape in shapes(quick):
        yield from measure_shape(shape, repeat)


def measure_shape(shape: Shape, repeat: int) -> Iterator[dict[str, Any]]:
    """The entries of one shape."""
    q, keys, values, table = arrays(shape)
    last = jnp.full(shape.rows, shape.context, jnp.int32)
    dense = jax.jit(partial(paged_attention.decode, backend=None))
    programs = {"dense attention": partial(dense, q, keys, values, table, None, None, 0 * last, last)}
    wide = keys.astype(jnp.float32)
    summary = PageSummary(wide.min(2), wide.max(2), wide.sum(2))
    information = jnp.ones(keys.shape[:2], jnp.float32)
    dropped_mass_limit = jnp.full(shape.rows, 0.1, jnp.float32)
    arguments = (q, summary, information, table, last, dropped_mass_limit)
    read = 3 * 4 * shape.rows * shape.kv_heads * shape.pages * shape.head_dim
    reasons = paged_attention.SELECT_PAGES.decline_reasons(*arguments, shape.page, SelectionRules())
    names = [name for name, reason in reasons.items() if reason is None]
    for name in names if on_cpu() else names[:1]:
        choose = jax.jit(partial(_choose, name, shape.page))
        programs[f"page selection, {name}"] = partial(choose, *arguments)
    for name, measured in interleaved_seconds(programs, repeat).items():
        size = shape.bytes if name.startswith("dense") else read
        yield {"shape": shape._asdict(), "engine": name, "bytes": size, "seconds": measured}


def _choose(backend: str, page: int, *arguments: Any) -> Any:
    select_pages: Any = paged_attention.select_pages
    return select_pages(*arguments, page, SelectionRules(), backend=backend)
