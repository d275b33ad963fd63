"""The ASGI application: every route around one `Frontend`."""

import functools
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from entropic_jax import __version__

from .. import internal_request, tracing
from ..batch_runner import BatchRunner
from ..file_store import FileStore
from ..frontend import Frontend
from ..host_names import accepted_hosts
from ..rate_limit import RateLimiter
from . import (
    adapters,
    administration,
    chat,
    completions,
    dashboard,
    embeddings,
    errors,
    files,
    messages,
    openapi,
    responses,
    scores,
    service,
    sleep,
    tokens,
)
from .gate import Gate


def create(frontend: Frontend, tracer_provider: Any = None) -> FastAPI:
    """The application that serves a front end; with a tracer provider, each request has a span.

    Its `state.batches` runs batches, if there is a folder for files.
    """
    settings = frontend.settings
    app = FastAPI(
        title="entropic_jax",
        version=__version__,
        summary="Language models with control by entropy, behind the APIs of OpenAI, Anthropic and vLLM",
        root_path=settings.root_path,
        docs_url=None,  # FastAPI's pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        telemetry=tracing.of_requests(tracer_provider),
    )
    errors.install(app)
    generating = (completions, chat, messages, responses)
    for module in (*generating, embeddings, scores, tokens, service, administration, adapters, sleep):
        app.include_router(module.router(frontend))
    app.state.batches = _batches(frontend, app)
    app.include_router(files.router(frontend, app.state.batches))
    dashboard.install(app)
    openapi.install(app, frontend)
    limits = settings.limits
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    gate: dict[str, Any] = {
        "api_keys": settings.api_keys,
        "max_bytes": limits.body,
        "log_requests": settings.log_requests,
        "hosts": accepted_hosts(settings.host, settings.allowed_hosts),
        "limiter": None if limits.rate is None else RateLimiter(limits.rate),
        "on_limited": frontend.metrics.limited,
        "origins": settings.allowed_origins,
    }
    app.add_middleware(Gate, **gate)
    return app


def _batches(frontend: Frontend, app: FastAPI) -> BatchRunner | None:
    """The runner of batches through the application; None without a folder for files."""
    settings = frontend.settings
    if settings.files_dir is None:
        return None
    limits = settings.limits
    store = FileStore(Path(settings.files_dir), limits.file_bytes, limits.file_seconds)
    post = functools.partial(internal_request.post, app)
    return BatchRunner(store, post, lambda: frontend.draining)
