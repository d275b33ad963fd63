"""Output streams: the queue that carries a request's deltas from the engine's thread to their reader."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from .interface import Delta, EngineRequest


class QueuedOutputStream:
    """An `OutputStream` over a queue: the engine puts deltas in, one reader takes them out."""

    def __init__(self, engine_request: EngineRequest, cancel: Callable[["QueuedOutputStream"], None]) -> None:
        self.engine_request = engine_request
        self._cancel = cancel
        self.rank = 0
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self.waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, delta: Delta) -> None:
        """Queue a delta. A reader in an event loop must be woken by `wake` afterwards."""
        self._deltas.put(delta)

    def cancel(self) -> None:
        """Ask the engine to end the request."""
        self._cancel(self)

    def __iter__(self) -> Iterator[Delta]:
        while True:
            delta = self._deltas.get()
            yield delta
            if delta.finish_reason is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Delta]:
        event = asyncio.Event()
        # Set the waiter before looking into the queue: the engine puts first and looks for the waiter then.
        self.waiter = asyncio.get_running_loop(), event
        while True:
            try:
                delta = self._deltas.get_nowait()
            except queue.Empty:
                await event.wait()
                event.clear()
                continue
            yield delta
            if delta.finish_reason is not None:
                return


def wake(output_streams: Iterable[QueuedOutputStream]) -> None:
    """Wake the readers that wait in event loops, with one call for each loop."""
    waiting: dict[asyncio.AbstractEventLoop, dict[QueuedOutputStream, asyncio.Event]] = {}
    for output_stream in output_streams:
        if output_stream.waiter is not None:
            loop, event = output_stream.waiter
            waiting.setdefault(loop, {})[output_stream] = event
    for loop, events in waiting.items():
        try:
            loop.call_soon_threadsafe(_set_all, list(events.values()))
        except RuntimeError:  # the loop is closed, so its readers are gone
            for output_stream in events:
                output_stream.cancel()


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
