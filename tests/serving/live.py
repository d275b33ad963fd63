"""A server on a free local port, in a thread of this process."""

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import httpx2

from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.process import Server, bind


class Live:
    """A running server."""

    def __init__(self, frontend: Frontend, tracer_provider: Any = None) -> None:
        self.frontend, self.listener = frontend, bind(frontend.settings)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(frontend, tracer_provider)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve(sockets=[self.listener]))

    def state(self) -> str:
        """What every thread does, and what the server's tasks wait for."""
        stacks = ("".join(traceback.format_stack(frame)) for frame in sys._current_frames().values())
        return "\n\n".join((*stacks, *map(repr, asyncio.all_tasks(self.loop))))


@contextlib.contextmanager
def serving(frontend: Frontend, tracer_provider: Any = None) -> Iterator[Live]:
    """Serve a front end (whose settings say port 0) while the block runs."""
    live = Live(frontend, tracer_provider)
    live.thread.start()
    try:
        while not live.server.started:
            live.thread.join(0.005)
            assert live.thread.is_alive()
        yield live
    finally:
        live.server.should_exit = True
        live.thread.join(20)
        assert not live.thread.is_alive(), live.state()


def refused(answer: httpx2.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    return error
