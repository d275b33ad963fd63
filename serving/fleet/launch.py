"""Runs a fleet until a signal, for `entropic serve --replicas`."""

import argparse
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ..http.frontend import Frontend
from ..http.process import KEEP_ALIVE, SIGNALS, address_of, bind
from ..http.settings import Settings
from .deployment import application

logger = logging.getLogger("entropic_jax.serving.fleet")
NAME = "entropic"
FAILED = 1  # exit status
LOOK = 10.0  # seconds between looks at what the replicas wait for
LONGEST = 1000  # characters of a reason

# Ray Serve kills a proxy that is not ready within this time, and fails. Its own default, 5 seconds, is
# short for processes that start together on a small machine.
PROXY_READY_SECONDS = "60"


def run(
    options: argparse.Namespace,
    settings: Settings,
    make_frontend: Callable[[argparse.Namespace], Frontend],
    follow: Callable[[argparse.Namespace], int],
) -> int:
    """Start the replicas, serve until a signal, let requests in flight end, and return the exit status.

    The cluster is the one that RAY_ADDRESS names, or one that is started on this machine and ends with it.

    Args:
        options: the parsed options.
        settings: the settings of a server that follow from them.
        make_frontend: loads the model and starts the engine in the process of a replica.
        follow: what the other processes of a replica run, where it has several.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    started, stop = threading.Event(), threading.Event()

    def on_signal(*_: object) -> None:
        stop.set()
        if not started.is_set():
            raise SystemExit(0)  # nothing waits for the replicas, which may load for minutes

    with bind(settings) as listener:  # says whether the port is free
        address = address_of(listener, "https" if settings.ssl_certfile else "http")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", PROXY_READY_SECONDS)
    ray.init(
        os.environ.get("RAY_ADDRESS", "local"),
        include_dashboard=None if "RAY_ADDRESS" in os.environ else False,
        log_to_driver=options.uvicorn_log_level == "debug",
    )
    for number in SIGNALS:  # after `ray.init`, which sets handlers of its own
        signal.signal(number, on_signal)
    try:
        serve.start(http_options=http_options(settings))
        try:
            threading.Thread(target=_say_what_is_missing, args=(started,), daemon=True).start()
            try:
                serve.run(application(options, settings, make_frontend, follow), name=NAME)
            except RuntimeError as error:
                raise RuntimeError(f"{error} {_missing()}") from None
            started.set()
            logger.info("listening", extra={"address": address, "replicas": options.replicas})
            stop.wait()
        finally:
            serve.delete(NAME)  # waits for the requests in flight, within --shutdown-timeout
        logger.info("stopped")
        return 0
    except (RuntimeError, TimeoutError, RayError) as error:
        # A proxy or the replicas do not start; their logs are below /tmp/ray.
        logger.error("the fleet does not run", extra={"error": str(error)})
        return FAILED
    finally:
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def http_options(settings: Settings) -> dict[str, Any]:
    """The HTTP options of Ray Serve's proxies."""
    return {
        "host": settings.host,
        "port": settings.port,
        "root_path": settings.root_path,
        "keep_alive_timeout_s": KEEP_ALIVE,
        "ssl_certfile": settings.ssl_certfile,
        "ssl_keyfile": settings.ssl_keyfile,
    }


def _say_what_is_missing(started: threading.Event) -> None:
    """Log why the fleet does not run yet, once for each reason, until it does."""
    said = ""
    while not started.wait(LOOK):
        if (reason := _missing()) and reason != said:
            said = reason
            logger.warning("replicas are not ready yet", extra={"reason": reason})


def _missing() -> str:
    """The messages of Ray Serve about deployments that are not ready; empty while there are none."""
    try:
        deployments = serve.status().applications[NAME].deployments.values()
    except (RayError, RayServeException, KeyError):
        return ""
    # Of a failure, a line on what it may be due to, and a traceback, whose last line is the error.
    lines = [deployment.message.strip().splitlines() for deployment in deployments if deployment.message]
    return " ".join(line for said in lines for line in dict.fromkeys((said[0], said[-1])))[:LONGEST]
