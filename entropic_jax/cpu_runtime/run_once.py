"""Cache of one result per argument, safe with several threads.

Several threads compile programs at the same time, and XLA refuses a second custom-call target of one name.
"""

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

T = TypeVar("T")
LOCK = threading.RLock()


def run_once(function: Callable[..., T]) -> Callable[..., T]:
    """`function` with its results cached, run by one thread at a time.

    >>> run_once(lambda: object())() is run_once(lambda: object())()
    False
    >>> single = run_once(lambda: object())
    >>> single() is single()
    True
    """
    cached = cache(function)

    @wraps(function)
    def locked(*arguments: Any) -> T:
        with LOCK:
            return cached(*arguments)

    return locked
