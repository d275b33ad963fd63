"""Which back end serves a kernel: the first that accepts, or the one that is named.

`ENTROPIC_KERNELS` names a back end for every kernel that has it (`xla` is the reference).
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

LOG = logging.getLogger("entropic_jax.kernels")
_said: set[tuple[str, str]] = set()


def first_that_accepts(kernel: str, back_ends: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A function that tries the back ends in order; one declines with NotImplementedError.

    Raises ExceptionGroup with every reason if all decline.
    """

    def call(*arguments: Any) -> Any:
        wanted = os.environ.get("ENTROPIC_KERNELS")
        names = [wanted] if wanted in back_ends else list(back_ends)
        reasons: list[Exception] = []
        for name in names:
            try:
                result = back_ends[name](*arguments)
            except NotImplementedError as declined:
                reasons.append(NotImplementedError(f"{name}: {declined}"))
                continue
            if (kernel, name) not in _said:
                _said.add((kernel, name))
                LOG.debug("%s: %s chosen; declined: %s", kernel, name, [str(r) for r in reasons])
            return result
        raise ExceptionGroup(f"no back end accepts {kernel}", reasons)

    return call
