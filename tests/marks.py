"""Marks of cases that CI leaves out."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def exhaustive(*cases: Any) -> list[Any]:
    """Cases that only `-m exhaustive` runs: the values of an argument, or tuples of several arguments."""
    return [pytest.param(*_as_tuple(case), marks=pytest.mark.exhaustive) for case in cases]


def keep(cases: Iterable[Any], *kept: Any, marks: Any = ()) -> list[Any]:
    """Cases of which CI runs those in `kept`, and `-m exhaustive` the others.

    Args:
        cases: the values of an argument, or tuples of several arguments.
        kept: the cases that CI runs.
        marks: further marks of these.
    """
    cases = list(cases)
    assert not (missing := [case for case in kept if case not in cases]), f"no case is {missing}"
    return [
        pytest.param(*_as_tuple(case), marks=marks if case in kept else pytest.mark.exhaustive)
        for case in cases
    ]


def sample(cases: Sequence[Any], *kept: int) -> list[Any]:
    """Values of one argument: CI runs those at the indices `kept`, and `-m exhaustive` the others."""
    rest = pytest.mark.exhaustive
    return [pytest.param(case, marks=() if i in kept else rest) for i, case in enumerate(cases)]


def _as_tuple(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
