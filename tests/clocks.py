"""Clocks that tests move."""

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


def replace_clock(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, read: Callable[[], float]
) -> None:
    """Give `module`, and no other, a clock of the test's.

    The module `time` itself must stay as it is: an event loop in another thread would wait by that clock, for
    days after the test.

    Args:
        module: it must have imported `time` as a module.
        name: the function of `time` that is replaced.
        read: returns the seconds instead of it.
    """
    monkeypatch.setattr(module, "time", SimpleNamespace(**(vars(time) | {name: read})))
