"""Controllers: each reads a `Signal` and rewrites an `Action`."""

from .controller import Chain, Controller, Every, When, chain, pytree, update_rows

__all__ = ["Chain", "Controller", "Every", "When", "chain", "pytree", "update_rows"]
