"""A replica: the server's application and engine in a process that Ray Serve manages."""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from ..http.frontend import Frontend
from ..http.routes.app import create
from .forwarding import Forwarded, ReplicaLostError
from .replica_processes import start_processes
from .work import METRIC, WorkMeter

POLL = 0.2  # seconds
NOTICED = 2.0  # seconds in which Ray learns that this replica ends, and sends requests to others


class Replica:
    """The deployment whose replicas answer requests.

    Args:
        make_frontend: loads the model and starts the engine.
        follow: what the other processes of the replica run, where it has several.
        options: the parsed options of the command line.
    """

    def __init__(
        self,
        make_frontend: Callable[[argparse.Namespace], Frontend],
        follow: Callable[[argparse.Namespace], int],
        options: argparse.Namespace,
    ) -> None:
        if (options.num_processes or 1) > 1:
            options = start_processes(options, follow)
        self.frontend = make_frontend(options)
        self.app, self.meter = create(self.frontend), WorkMeter()
        while not self.frontend.engine.ready():  # Ray sends requests once this method has returned
            self.check_health()
            time.sleep(POLL)

    async def respond(self, forwarded: Forwarded) -> AsyncIterator[dict[str, Any]]:
        """The ASGI messages of the response to a request; closing the iterator cancels the request.

        Raises:
            ReplicaLostError: The engine has failed; what else it says is not passed on.
        """
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gone, bodies = asyncio.Event(), iter([forwarded.body])

        async def receive() -> dict[str, Any]:
            for body in bodies:
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.put_nowait(dict(message))

        task = asyncio.create_task(self.app(forwarded.scope(), receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if (failure := self.frontend.engine.failure()) is not None:
                    await asyncio.sleep(NOTICED)
                    raise ReplicaLostError(f"the engine has failed: {failure}")
                yield message
            await task  # raises what the application raised
        finally:
            gone.set()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def check_health(self) -> None:
        """Raise the failure of the engine; Ray then replaces the replica."""
        if (failure := self.frontend.engine.failure()) is not None:
            raise RuntimeError(f"the engine has failed: {failure}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The measurements that the autoscaler reads."""
        return {METRIC: self.meter.seconds(self.frontend.engine.snapshot())}

    def __del__(self) -> None:
        """End the engine, once Ray has let the requests in flight end."""
        if hasattr(self, "frontend"):
            self.frontend.pools.close()
            self.frontend.engine.close(timeout=1.0)
