"""`/server_info`, `/reset_prefix_cache`, and where enabled `/start_profile` and `/stop_profile`."""

import asyncio
import logging
import threading
import time
from typing import Any

from fastapi import APIRouter

from entropic_jax import __version__

from ..frontend import RETRY, Frontend, FrontendError
from ..protocol.service import PrefixCacheCounts, ProfileState, ServerInfo
from ..settings import Settings
from .errors import documented
from .rendering import answered

logger = logging.getLogger(__name__)
LONGEST_PROFILE = 20.0  # seconds, since under load a trace takes some ten megabytes of memory a second
SECRET = ("api_keys", "ssl_certfile", "ssl_keyfile")  # settings of which only the presence is shown


def router(frontend: Frontend) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["administration"])

    @routes.get(
        "/server_info",
        summary="Configuration, versions and devices of the server",
        response_model=ServerInfo,
        responses=documented(401),
    )
    async def server_info() -> Any:
        return answered(_server_info(frontend))

    @routes.post(
        "/reset_prefix_cache",
        summary="Drop the cached prefixes that no running sequence uses",
        response_model=PrefixCacheCounts,
        responses=documented(401, 503),
    )
    async def reset_prefix_cache() -> Any:
        try:
            reset = await asyncio.wrap_future(frontend.engine.reset_prefix_cache())
        except (RuntimeError, asyncio.CancelledError) as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            message = f"the engine cannot take requests: {str(error) or 'it has stopped'}"
            raise FrontendError(503, message, retry_after=RETRY) from None
        return answered(reset._asdict())

    if frontend.settings.profile_dir is not None:
        _add_profiler(routes, Profiler(frontend.settings.profile_dir))
    return routes


class Profiler:
    """A JAX trace of the process: one at a time, which ends by itself after `LONGEST_PROFILE`."""

    def __init__(self, folder: str) -> None:
        """No trace; each will be written below `folder`."""
        self.folder, self.running = folder, False
        self._ended_by_itself = False  # and nobody has asked for its end
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin a trace. FrontendError if one is running or cannot begin."""
        import jax

        with self._lock:
            if self.running:
                raise FrontendError(409, "a profile is being recorded; POST /stop_profile ends it")
            try:
                jax.profiler.start_trace(self.folder)
            except (RuntimeError, OSError) as error:
                raise FrontendError(503, f"no profile can be recorded: {error}") from None
            self.running, self._ended_by_itself = True, False
            self._timer = threading.Timer(LONGEST_PROFILE, self._end)
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """End the trace and write it. FrontendError if none is running, or it cannot be written."""
        with self._lock:
            if self._ended_by_itself:
                self._ended_by_itself = False
                return
            if not self.running:
                raise FrontendError(409, "no profile is being recorded; POST /start_profile begins one")
            if self._timer is not None:
                self._timer.cancel()
            try:
                self._write()
            except (RuntimeError, OSError) as error:
                raise FrontendError(503, f"the profile cannot be written: {error}") from None

    def _end(self) -> None:
        """End a trace that has grown long enough."""
        with self._lock:
            if not self.running or threading.current_thread() is not self._timer:
                return
            try:
                self._write()
            except (RuntimeError, OSError) as error:
                logger.warning("the profile cannot be written: %s", error)
                return
            self._ended_by_itself = True
        logger.warning("the profile ended by itself after %g s", LONGEST_PROFILE)

    def _write(self) -> None:
        import jax

        self.running = False
        jax.profiler.stop_trace()


def _add_profiler(routes: APIRouter, profiler: Profiler) -> None:
    @routes.post(
        "/start_profile",
        summary="Begin to record a JAX trace of the server",
        response_model=ProfileState,
        responses=documented(401, 409, 503),
    )
    async def start_profile() -> Any:
        await asyncio.to_thread(profiler.start)
        return answered({"recording": True, "folder": profiler.folder})

    @routes.post(
        "/stop_profile",
        summary="End the trace and write it to its folder",
        response_model=ProfileState,
        responses=documented(401, 409, 503),
    )
    async def stop_profile() -> Any:
        await asyncio.to_thread(profiler.stop)
        return answered({"recording": False, "folder": profiler.folder})


def _server_info(frontend: Frontend) -> dict[str, Any]:
    model, control = frontend.model, frontend.settings.control
    return {
        "version": __version__,
        "started": frontend.started,
        "uptime_seconds": int(time.time()) - frontend.started,
        "model": {
            "names": model.names,
            "path": model.path,
            "max_model_len": model.context,
            "vocabulary": model.vocabulary,
            "stop_tokens": model.stop_tokens,
            "sampling_defaults": dict(model.defaults),
        },
        "control": {
            "preset": control.preset,
            "gains": dict(control.gains),
            "method": control.method,
            "budgets": dict(control.budgets),
            "prefill_options": dict(control.prefill_options),
        },
        "server": _without_secrets(frontend.settings),
        "engine": frontend.engine.describe(),
    }


def _without_secrets(settings: Settings) -> dict[str, Any]:
    fields = {name: value for name, value in settings._asdict().items() if name not in (*SECRET, "control")}
    return {
        **fields,
        "limits": {**settings.limits._asdict(), "rate": settings.limits.rate and str(settings.limits.rate)},
        "requires_api_key": bool(settings.api_keys),
        "https": settings.ssl_certfile is not None,
    }
