"""Service routes: health, readiness, models, version, metrics and engine state."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from entropic_jax import __version__

from ..frontend import Frontend, FrontendError
from ..protocol.service import EngineState, Health, ModelCard, ModelList, Version
from .errors import documented
from .rendering import answered

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def router(frontend: Frontend) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["service"])

    @routes.get(
        "/v1/models", summary="The models served", response_model=ModelList, responses=documented(401)
    )
    async def models() -> Any:
        names = (*frontend.model.names, *frontend.engine.adapter_paths())
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}  # of Anthropic's form
        return answered({"object": "list", "data": [_card(frontend, name) for name in names], **ends})

    @routes.get(
        "/v1/models/{model:path}",
        summary="One of the models served",
        response_model=ModelCard,
        responses=documented(401, 404),
    )
    async def model(model: str) -> Any:
        return answered(_card(frontend, frontend.check_model(model)))

    @routes.head("/health", include_in_schema=False)  # how some load balancers ask
    @routes.get(
        "/health", summary="Whether the server is alive", response_model=Health, responses=documented(503)
    )
    async def health() -> Any:
        if (failure := frontend.engine.failure()) is not None:
            raise FrontendError(503, f"the engine has failed: {failure}")
        return answered({"status": "alive"})

    @routes.head("/ready", include_in_schema=False)
    @routes.get(
        "/ready",
        summary="Whether the warm-up is over and requests are taken",
        response_model=Health,
        responses=documented(503),
    )
    async def ready() -> Any:
        frontend.check_able()
        if (failure := frontend.engine.failure()) is not None:
            raise FrontendError(503, f"the engine has failed: {failure}")
        if not frontend.engine.ready():
            raise FrontendError(503, "the programs of the warm-up are being compiled", retry_after=5.0)
        return answered({"status": "ready"})

    @routes.get("/version", summary="The version", response_model=Version)
    async def the_version() -> Any:
        return answered({"version": __version__})

    @routes.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(frontend.metrics.text(), headers={"Content-Type": PROMETHEUS})

    @routes.get(
        "/entropic/state",
        summary="What the engine is doing now",
        response_model=EngineState,
        responses=documented(401),
    )
    async def state() -> Any:
        return answered(frontend.state())

    return routes


def _card(frontend: Frontend, name: str) -> dict[str, Any]:
    """A description of a model, in the forms of OpenAI and Anthropic."""
    adapter = frontend.engine.adapter_paths().get(name)
    return {
        "id": name,
        "object": "model",
        "type": "model",  # this and the next two are Anthropic's
        "display_name": name,
        "created_at": datetime.fromtimestamp(frontend.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "created": frontend.started,
        "owned_by": "entropic_jax",
        "root": frontend.model.path if adapter is None else adapter,
        "parent": None if adapter is None else frontend.model.names[0],
        "max_model_len": frontend.model.context,
        "permission": [],
    }
