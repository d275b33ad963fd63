"""`/v1/files` and `/v1/batches`, which exist only with `--files-dir`."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from entropic_jax.parameter_tables.table import short

from ...request import RequestError
from ..batch_runner import LONGEST_PAUSE, Batch, BatchRunner
from ..file_store import FileStore, StoredFile, StoreFullError, page_of
from ..frontend import Frontend, FrontendError, refusals
from ..multipart import parts
from ..protocol.fields import Order
from ..protocol.files import (
    LONGEST,
    SHORTEST,
    BatchBody,
    BatchList,
    BatchObject,
    DeletedFile,
    FileList,
    FileObject,
)
from . import rendering, unknown_fields
from .errors import documented

SECONDS = re.compile("[0-9]{1,9}")
ANCHOR, LIFE = "expires_after[anchor]", "expires_after[seconds]"
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        ANCHOR: {"type": "string", "enum": ["created_at"]},
                        LIFE: {"type": "integer", "minimum": SHORTEST, "maximum": LONGEST},
                    },
                }
            }
        },
    }
}


def router(frontend: Frontend, batches: BatchRunner | None) -> APIRouter:
    """The routes; none without a runner of batches."""
    routes = APIRouter(tags=["files and batches"])
    if batches is not None:
        _add_files(routes, frontend, batches.store)
        _add_batches(routes, frontend, batches)
    return routes


def _add_files(routes: APIRouter, frontend: Frontend, store: FileStore) -> None:
    @routes.post(
        "/v1/files",
        summary="Store a file",
        response_model=FileObject,
        openapi_extra=FORM,
        responses=documented(400, 401, 413, 429, 503),
    )
    async def upload(http: Request) -> Any:
        frontend.check_able()
        form = http.headers.get("content-type", ""), await http.body()
        with refusals():
            file = await frontend.run_in(frontend.pools.files, _uploaded, store, _owner(http), *form)
        return rendering.answered(_described(file))

    @routes.get("/v1/files", summary="Stored files", response_model=FileList, responses=documented(400, 401))
    async def listed(
        http: Request,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Order = "desc",
        after: str | None = None,
        purpose: str | None = None,
    ) -> Any:
        files = store.of_owner(_owner(http))[:: 1 if order == "asc" else -1]
        entries = [_described(file) for file in files if purpose is None or file.purpose == purpose]
        with refusals():
            return rendering.answered(page_of(entries, limit, after))

    @routes.get(
        "/v1/files/{file_id}",
        summary="A stored file, without its content",
        response_model=FileObject,
        responses=documented(401, 404),
    )
    async def stored(file_id: str, http: Request) -> Any:
        return rendering.answered(_described(_file(store, http, file_id)))

    @routes.get(
        "/v1/files/{file_id}/content",
        summary="The content of a stored file",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}, **documented(401, 404, 429)},
    )
    async def content(file_id: str, http: Request) -> Response:
        file = _file(store, http, file_id)
        try:
            text = await frontend.run_in(frontend.pools.files, store.content, file)
        except FileNotFoundError:  # deleted since
            raise _no_file(file_id) from None
        return Response(text, media_type="application/octet-stream")

    @routes.delete(
        "/v1/files/{file_id}",
        summary="Delete a stored file",
        response_model=DeletedFile,
        responses=documented(401, 404),
    )
    async def delete(file_id: str, http: Request) -> Any:
        store.delete(_file(store, http, file_id).id)
        return rendering.answered({"id": file_id, "object": "file", "deleted": True})


def _add_batches(routes: APIRouter, frontend: Frontend, batches: BatchRunner) -> None:
    @routes.post(
        "/v1/batches",
        summary="Run the requests of a file",
        response_model=BatchObject,
        responses=documented(400, 401, 404, 429, 503),
    )
    async def create(body: BatchBody, http: Request) -> Any:
        frontend.check_able()
        file = _file(batches.store, http, body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            message = f"input_file_id must be a file with the purpose batch; got {file.purpose}"
            raise FrontendError(400, message, "input_file_id")
        fields = body.model_dump(include={"input_file_id", "endpoint", "completion_window", "metadata"})
        lives = None if body.output_expires_after is None else body.output_expires_after.seconds
        try:
            batch = batches.create(_owner(http), fields, lives)
        except StoreFullError as error:
            raise FrontendError(429, str(error), retry_after=LONGEST_PAUSE) from None
        return await unknown_fields.warn(http, body, rendering.answered(batch.fields))

    @routes.get("/v1/batches", summary="Batches", response_model=BatchList, responses=documented(400, 401))
    async def listed(
        http: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> Any:
        entries = [batch.fields for batch in reversed(batches.of_owner(_owner(http)))]
        with refusals():
            return rendering.answered(page_of(entries, limit, after))

    @routes.get(
        "/v1/batches/{batch_id}",
        summary="A batch",
        response_model=BatchObject,
        responses=documented(401, 404),
    )
    async def stored(batch_id: str, http: Request) -> Any:
        return rendering.answered(_batch(batches, http, batch_id).fields)

    @routes.post(
        "/v1/batches/{batch_id}/cancel",
        summary="End a batch; its results so far are kept",
        response_model=BatchObject,
        responses=documented(401, 404, 409),
    )
    async def cancel(batch_id: str, http: Request) -> Any:
        batch = _batch(batches, http, batch_id)
        if batch.ended:
            message = f"batch_id must be a batch that has not ended; got one that is {batch.fields['status']}"
            raise FrontendError(409, message, "batch_id")
        batches.cancel(batch)
        return rendering.answered(batch.fields)


def _owner(http: Request) -> str | None:
    """The digest of the API key of a request, as hexadecimal digits."""
    return None if http.state.owner is None else http.state.owner.hex()


def _file(store: FileStore, http: Request, name: str, param: str = "file_id") -> StoredFile:
    """The file that `param` of a request names; FrontendError if its owner has none of that id."""
    if (file := store.get(_owner(http), name)) is None:
        raise _no_file(name, param)
    return file


def _no_file(name: str, param: str = "file_id") -> FrontendError:
    message = f"{param} must be the id of a stored file that has not expired; got {name[:200]!r}"
    return FrontendError(404, message, param)


def _batch(batches: BatchRunner, http: Request, name: str) -> Batch:
    if (batch := batches.get(_owner(http), name)) is None:
        raise FrontendError(404, f"batch_id must be the id of a batch; got {name[:200]!r}", "batch_id")
    return batch


def _described(file: StoredFile) -> dict[str, Any]:
    """A file in OpenAI's form."""
    shown = {name: value for name, value in file._asdict().items() if name != "owner"}
    return {"object": "file", "status": "processed", **shown}


def _uploaded(store: FileStore, owner: str | None, content_type: str, body: bytes) -> StoredFile:
    """The file of a form, stored. RequestError for a form that is not accepted.

    Args:
        store: keeps the file.
        owner: the digest of an API key.
        content_type: the header Content-Type of the form.
        body: the form itself.

    Raises:
        FrontendError: There is no room (413).
    """
    form = {part.name: part for part in parts(content_type, body)}
    fields = {name: part.content.decode("utf-8", "replace") for name, part in form.items() if name != "file"}
    if fields.get("purpose") != "batch":
        raise RequestError(f"purpose must be batch; got {short(fields.get('purpose'))}", "purpose")
    if "file" not in form:
        raise RequestError("file must be a part of the form; it is missing", "file")
    anchor, seconds = fields.get(ANCHOR), fields.get(LIFE)
    if (anchor is not None or seconds is not None) and anchor != "created_at":
        raise RequestError(f"{ANCHOR} must be created_at; got {short(anchor)}", ANCHOR)
    if seconds is not None and not (SECONDS.fullmatch(seconds) and SHORTEST <= int(seconds) <= LONGEST):
        message = f"{LIFE} must be an integer between {SHORTEST} and {LONGEST}; got {short(seconds)}"
        raise RequestError(message, LIFE)
    part = form["file"]
    life = None if seconds is None else float(seconds)
    name = (part.filename or "file")[:255]
    try:
        return store.put(owner, part.content, name, "batch", life)
    except StoreFullError as error:
        raise FrontendError(413, str(error), error.param) from None
