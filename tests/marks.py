"""Marks of cases that CI leaves out."""

from typing import Any

import pytest


def exhaustive(*cases: Any) -> list[Any]:
    """Cases that only `-m exhaustive` runs: the values of an argument, or tuples of several arguments."""
    as_tuple = lambda case: case if isinstance(case, tuple) else (case,)
    return [pytest.param(*as_tuple(case), marks=pytest.mark.exhaustive) for case in cases]
