"""`/sleep`, `/wake_up` and `/is_sleeping`, which exist only with `--enable-sleep-mode`."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from fastapi import APIRouter, Query, Request

from ...request import RequestError
from ..frontend import RETRY, Frontend, FrontendError
from ..protocol.service import SleepState
from .errors import documented
from .rendering import answered


def router(frontend: Frontend) -> APIRouter:
    """The routes; none unless they are enabled."""
    routes = APIRouter(tags=["administration"])
    if not frontend.settings.sleep_mode:
        return routes
    engine = frontend.engine

    @routes.post(
        "/sleep",
        summary="Give back the memory of the KV cache; requests wait until /wake_up",
        response_model=SleepState,
        responses=documented(400, 401, 409, 503),
    )
    async def sleep(
        http: Request,
        level: Literal["1"] = Query("1", description="weights stay in host memory"),
        mode: Literal["abort", "wait"] = Query("abort", description="what happens to running requests"),
    ) -> Any:
        frontend.check_able()
        _check_tags(http)
        await _done(lambda: engine.sleep(mode))
        return answered({"is_sleeping": engine.is_sleeping()})

    @routes.post(
        "/wake_up",
        summary="Allocate the KV cache again, and run the requests that wait",
        response_model=SleepState,
        responses=documented(400, 401, 409, 503),
    )
    async def wake_up(http: Request) -> Any:
        _check_tags(http)
        await _done(engine.wake_up)
        return answered({"is_sleeping": engine.is_sleeping()})

    @routes.get(
        "/is_sleeping",
        summary="Whether the memory of the KV cache is given back",
        response_model=SleepState,
        responses=documented(401),
    )
    async def is_sleeping() -> Any:
        return answered({"is_sleeping": engine.is_sleeping()})

    return routes


def _check_tags(http: Request) -> None:
    """Refuse vLLM's `tags`, which name a part of the memory. Raises FrontendError."""
    if tags := http.query_params.getlist("tags"):
        raise FrontendError(400, f"tags must be absent, as there is one state; got {', '.join(tags)}", "tags")


async def _done(begin: Callable[[], "Future[None]"]) -> None:
    """Wait for the engine; FrontendError if it cannot, or has stopped."""
    try:
        await asyncio.wrap_future(begin())
    except RequestError as error:
        raise FrontendError(409, str(error)) from None
    except (RuntimeError, asyncio.CancelledError) as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        message = f"the engine cannot take requests: {str(error) or 'it has stopped'}"
        raise FrontendError(503, message, retry_after=RETRY) from None
