"""What is made once: several threads compile programs, and XLA refuses a second target of a name."""

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

T = TypeVar("T")
_making = threading.RLock()


def once(make: Callable[..., T]) -> Callable[..., T]:
    """`make`, remembering its results, in one thread at a time.

    >>> once(lambda: object())() is once(lambda: object())()
    False
    >>> only = once(lambda: object())
    >>> only() is only()
    True
    """
    remembered = cache(make)

    @wraps(make)
    def alone(*arguments: Any) -> T:
        with _making:
            return remembered(*arguments)

    return alone
