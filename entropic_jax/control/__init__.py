"""Controllers: each reads a `Signal` and rewrites an `Action`."""

from ..state.pytree import pytree
from .controller import (
    Chain,
    Controller,
    Every,
    PerRow,
    When,
    chain,
    schedule_rows,
    take_rows,
    update_rows,
)

__all__ = [
    "Chain",
    "Controller",
    "Every",
    "PerRow",
    "When",
    "chain",
    "pytree",
    "schedule_rows",
    "take_rows",
    "update_rows",
]
