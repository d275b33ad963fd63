"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, which exist only with `--lora-dir`."""

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from ...options import lora
from ...request import RequestError
from ..frontend import RETRY, Frontend, FrontendError, refusals
from ..protocol.adapters import LoadAdapterBody, UnloadAdapterBody
from . import unknown_fields
from .errors import documented


def router(frontend: Frontend) -> APIRouter:
    """The routes; none unless a folder for adapters is set."""
    routes = APIRouter(tags=["administration"])
    if frontend.settings.lora_dir is None:
        return routes
    folder, one_at_a_time = Path(frontend.settings.lora_dir), asyncio.Lock()

    @routes.post(
        "/v1/load_lora_adapter",
        summary="Load a LoRA adapter from a folder of this machine",
        response_class=PlainTextResponse,
        responses=documented(400, 401, 503),
    )
    async def load_lora_adapter(body: LoadAdapterBody, http: Request) -> Response:
        frontend.check_able()
        async with one_at_a_time:
            await asyncio.to_thread(_load, frontend, folder, body)
        response = PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} was loaded.")
        return await unknown_fields.warn(http, body, response)

    @routes.post(
        "/v1/unload_lora_adapter",
        summary="Refuse further requests for a LoRA adapter",
        response_class=PlainTextResponse,
        responses=documented(400, 401, 404),
    )
    async def unload_lora_adapter(body: UnloadAdapterBody, http: Request) -> Response:
        try:
            frontend.engine.unload_adapter(body.lora_name)
        except RequestError as error:
            raise FrontendError(404, str(error), error.param) from None
        response = PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} was unloaded.")
        return await unknown_fields.warn(http, body, response)

    return routes


def _load(frontend: Frontend, folder: Path, body: LoadAdapterBody) -> None:
    """Load an adapter; FrontendError for a name or a path that is not accepted."""
    if body.load_inplace:
        raise FrontendError(
            400, "load_inplace must be false: unload the adapter first; got true", "load_inplace"
        )
    if body.lora_name in frontend.model.names:
        message = f"lora_name must not be a name of the model; got {body.lora_name!r}"
        raise FrontendError(400, message, "lora_name")
    with refusals():
        lora.check_name(body.lora_name, "lora_name")
        directory = lora.inside(body.lora_path, folder)
        try:
            frontend.engine.load_adapter(body.lora_name, str(directory))
        except RuntimeError as error:
            raise FrontendError(503, f"the adapter cannot be loaded: {error}", retry_after=RETRY) from error
