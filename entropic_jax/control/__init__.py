"""Controllers: each reads a `Signal` and rewrites an `Action`."""

from .controller import (
    Chain,
    Controller,
    Every,
    PerRow,
    When,
    chain,
    pytree,
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
