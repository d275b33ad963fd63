"""Marks of cases that CI leaves out."""

from collections.abc import Sequence
from typing import Any

import pytest


def exhaustive(*cases: Any) -> list[Any]:
    """Cases that only `-m exhaustive` runs: the values of an argument, or tuples of several arguments."""
    as_tuple = lambda case: case if isinstance(case, tuple) else (case,)
    return [pytest.param(*as_tuple(case), marks=pytest.mark.exhaustive) for case in cases]


def sample(cases: Sequence[Any], *kept: int) -> list[Any]:
    """Values of one argument: CI runs those at the indices `kept`, and `-m exhaustive` the others."""
    rest = pytest.mark.exhaustive
    return [pytest.param(case, marks=() if i in kept else rest) for i, case in enumerate(cases)]
