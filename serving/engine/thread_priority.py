"""Priority of threads that must not slow the others down."""

import contextlib
import os
import threading


def be_nice(increment: int) -> None:
    """Lower the priority of this thread; Linux has one for each."""
    if increment and hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + increment)
