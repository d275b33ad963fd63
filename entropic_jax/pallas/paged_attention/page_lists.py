"""Validation of page lists, where their values are known."""

from typing import Any

import jax
import numpy as np


def check(page_table: Any, page_list: Any, num_pages: Any) -> None:
    """Raise ValueError unless page lists are ascending, distinct, and of pages that a row can have.

    The arguments are those of `decode`. Nothing is checked while a program is traced, as values are not
    known then; check new page lists outside of `jit` first.

    Args:
        page_table, page_list, num_pages: as for `decode`.
    """
    if (page_list is None) != (num_pages is None):
        missing, present = ("page_list", "num_pages") if page_list is None else ("num_pages", "page_list")
        raise ValueError(
            f"page_list and num_pages must both be given or both be None; got {present} without {missing}"
        )
    if page_list is None or any(isinstance(x, jax.core.Tracer) for x in (page_table, page_list, num_pages)):
        return
    max_pages, page_list, num_pages = np.shape(page_table)[1], np.asarray(page_list), np.asarray(num_pages)
    max_listed = page_list.shape[2]
    for row, head in np.argwhere((num_pages < 0) | (num_pages > max_listed))[:1]:
        raise ValueError(
            f"num_pages[{row}, {head}] must be between 0 and {max_listed}; got {num_pages[row, head]}"
        )
    listed = np.arange(max_listed) < num_pages[..., None]
    invalid = (listed & ((page_list < 0) | (page_list >= max_pages))).any(-1)
    invalid |= (listed[..., 1:] & (np.diff(page_list, axis=-1) <= 0)).any(-1)
    for row, head in np.argwhere(invalid)[:1]:
        entries = page_list[row, head, : num_pages[row, head]].tolist()
        shown = f"{entries[:8]}{'…' if len(entries) > 8 else ''}"
        raise ValueError(
            f"page_list[{row}, {head}] must be ascending and distinct entries below {max_pages}; got {shown}"
        )
