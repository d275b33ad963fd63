"""Errors in the form that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`."""

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..frontend import FrontendError
from ..protocol.service import ErrorAnswer

logger = logging.getLogger(__name__)
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
NESTED = ("entropic", "stream_options", "structured_outputs")  # objects, whose fields are named
REASONS = {
    400: "What was asked for is not accepted",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    408: "It took longer than the server allows",
    413: "The body is too large",
    429: "The queue is full; Retry-After says when to come back",
    500: "The model computed no usable logits",
    503: "The server is shutting down, or not able",
}


def documented(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may fail with these codes."""
    return {code: {"model": ErrorAnswer, "description": REASONS[code]} for code in codes}


def body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = TYPES.get(status, "Error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def answer(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The response for an error; text that is no Unicode, from a body that was not either, is replaced."""
    text = json.dumps(body(status, message, param)).encode("utf-8", "replace")
    return Response(text, status, dict(headers or {}), media_type="application/json")


def install(app: FastAPI) -> None:
    """Let every error of the app take the one form."""

    @app.exception_handler(FrontendError)
    async def refused(request: Request, error: FrontendError) -> Response:
        headers = {"Retry-After": f"{max(1, round(error.retry_after))}"} if error.retry_after else None
        return answer(error.status, str(error), error.param, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = in_words(error)
        return answer(400, message, param)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        message, path, headers = str(error.detail), request.url.path[:200], error.headers
        if message == HTTPStatus.NOT_FOUND.phrase:
            message = f"path is {path}; accepted are those that /openapi.json lists"
        elif message == HTTPStatus.METHOD_NOT_ALLOWED.phrase and headers is not None:
            message = f"method is {request.method}; accepted by {path} is {headers.get('Allow')}"
        return answer(error.status_code, message, headers=headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("unexpected error", exc_info=error, extra={"path": request.url.path})
        return JSONResponse(body(500, "unexpected error; the server's log has more"), 500)


def in_words(error: RequestValidationError) -> tuple[str, str | None]:
    """What is wrong with a body, and the name of the field; the first field that is wrong speaks."""
    errors = error.errors()
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first.get('ctx', {}).get('error', 'it cannot be read')}", None
    path = _place(first)
    if not path:
        if first["type"] != "value_error":
            return "the body is not a JSON object; accepted is one, sent as application/json", None
        message = first["msg"].removeprefix("Value error, ")
        return message, message.split(maxsplit=1)[0]
    same = [one for one in errors if _place(one)[:1] == path[:1]]
    if all(one["type"] == "missing" for one in same):
        return f"{'.'.join(path)} is missing; accepted are bodies that have it", path[0]
    said = (one["msg"].replace("be None", "be null") for one in same)
    reasons = dict.fromkeys(message[:1].lower() + message[1:] for message in said)
    inputs = [one["input"] for one in same if len(_place(one)) <= 2] or [first["input"]]
    name = ".".join(path[: 1 + (path[0] in NESTED)])
    return f"{name} is {_short(inputs[0])}: {' or '.join(list(reasons)[:4])}", path[0]


def _place(error: dict[str, Any]) -> list[str]:
    """Where in the body a field is, without the names of our own classes."""
    parts = [str(part) for part in error["loc"]]
    return [part for part in parts if part not in ("body", "query", "path") and not part.endswith("Body")]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
