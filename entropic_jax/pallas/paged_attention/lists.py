"""Lists of pages that break their contract are refused, where their values are known."""

from typing import Any

import jax
import numpy as np


def check(table: Any, index: Any, count: Any) -> None:
    """Raise ValueError unless the lists are ascending, distinct, and of pages that a row can have.

    Nothing is checked while a program is traced: the values are not known then. Whoever makes lists of pages
    tries them here first.
    """
    if (index is None) != (count is None):
        given, missing = ("count", "index") if index is None else ("index", "count")
        raise ValueError(f"{missing} is None, {given} is not; accepted are both or neither")
    if index is None or any(isinstance(x, jax.core.Tracer) for x in (table, index, count)):
        return
    most, index, count = np.shape(table)[1], np.asarray(index), np.asarray(count)
    long = index.shape[2]
    for row, head in np.argwhere((count < 0) | (count > long))[:1]:
        raise ValueError(f"count[{row}, {head}] is {count[row, head]}; accepted are 0 to {long}")
    listed = np.arange(long) < count[..., None]
    wrong = (listed & ((index < 0) | (index >= most))).any(-1)
    wrong |= (listed[..., 1:] & (np.diff(index, axis=-1) <= 0)).any(-1)
    for row, head in np.argwhere(wrong)[:1]:
        entries = index[row, head, : count[row, head]].tolist()
        shown = f"{entries[:8]}{'…' if len(entries) > 8 else ''}"
        raise ValueError(
            f"index[{row}, {head}] lists {shown}; accepted are distinct entries below {most}, ascending"
        )
