"""Call of a function in the engine's thread, its result, and what is left in the inbox at the end."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

from .sequence import Sequence

T = TypeVar("T")


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended, so that nothing can be called in it."""

    def __init__(self) -> None:
        super().__init__("the engine has stopped")


class EngineCall(NamedTuple, Generic[T]):
    """A function to be called between two steps of the engine."""

    function: Callable[[], T]
    future: Future[T]

    def run(self) -> None:
        """Call it, unless the future was cancelled; an exception becomes the result."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except Exception as error:
            self.future.set_exception(error)


def pass_failure(begun: Future[None], done: Future[None]) -> None:
    """Give the failure of a call to the future of what it should have begun."""
    if begun.cancelled():
        done.cancel()
    elif (error := begun.exception()) is not None:
        done.set_exception(error)


def drained(inbox: "queue.SimpleQueue[Any]") -> Iterator[Sequence]:
    """The sequences in an engine's inbox, which is emptied; calls in it are cancelled."""
    while True:
        try:
            item = inbox.get_nowait()
        except queue.Empty:
            return
        if isinstance(item, Sequence):
            yield item
        elif isinstance(item, EngineCall):
            item.future.cancel()
