"""Controllers: each reads a `Signal` and rewrites an `Action`."""

from .controller import Chain, Controller, Every, When, advance, chain, pytree

__all__ = ["Chain", "Controller", "Every", "When", "advance", "chain", "pytree"]
