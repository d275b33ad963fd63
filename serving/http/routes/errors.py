"""Error responses in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

import difflib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from entropic_jax.parameter_table import Accepted, short
from entropic_jax.sampling_params import PARAMETERS

from ..frontend import FrontendError
from ..protocol import entropic
from ..protocol.fields import NUMBERS
from ..protocol.service import ErrorAnswer

logger = logging.getLogger(__name__)
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
NESTED = ("entropic", "stream_options", "structured_outputs")  # objects whose fields are named in messages
SHOULD = re.compile(r"^\w+ should ")  # how Pydantic begins most messages
WORDS = (  # of Pydantic, and of this API
    ("be None", "be null"),
    ("a valid boolean", "true or false"),
    ("a valid integer", "an integer"),
    ("a valid dictionary", "an object"),
    ("a valid list", "a list"),
    ("a valid ", "a "),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("greater than", "above"),
    ("less than", "below"),
)
REASONS = {
    400: "The request is invalid; `param` names the field",
    401: "The API key is missing or wrong",
    404: "The model is not served",
    408: "The request took longer than the server allows",
    413: "The body is too large",
    429: "The queue is full; Retry-After says when to try again",
    500: "The model computed logits that are not finite",
    503: "The server is shutting down, or its engine has failed",
}


def documented(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` entry of a route for these status codes."""
    return {code: {"model": ErrorAnswer, "description": REASONS[code]} for code in codes}


def body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error.

    Args:
        status: HTTP status, from 400 to 599; decides `type`.
        message: For the client.
        param: Field of the request that is at fault, if it is one.
    """
    kind = TYPES.get(status, "Error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def answer(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The response for an error.

    Args:
        status: HTTP status, from 400 to 599.
        message: For the client; characters that are not Unicode are replaced.
        param: Field of the request that is at fault, if it is one.
        headers: Further headers, such as Retry-After.
    """
    text = json.dumps(body(status, message, param)).encode("utf-8", "replace")
    return Response(text, status, dict(headers or {}), media_type="application/json")


def install(app: FastAPI) -> None:
    """Give every error of the app OpenAI's form."""

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
            message = f"path must be one that /openapi.json lists; got {path}"
        elif message == HTTPStatus.METHOD_NOT_ALLOWED.phrase and headers is not None:
            message = f"method must be {headers.get('Allow')} for {path}; got {request.method}"
        return answer(error.status_code, message, headers=headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("unexpected error", exc_info=error, extra={"path": request.url.path})
        return JSONResponse(body(500, "unexpected error; see the server's log"), 500)


def in_words(error: RequestValidationError) -> tuple[str, str | None]:
    """The message and `param` for an invalid body: those of its first invalid field."""
    errors = error.errors()
    first = errors[0]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return f"the body must be JSON; got an error: {context.get('error', 'it cannot be read')}", None
    path = _location(first)
    if not path:
        if first["type"] in ("value_error", "conflict"):
            return first["msg"].removeprefix("Value error, "), context.get("param")
        return "the body must be a JSON object, sent as application/json", None
    accepts = _accepted(path)
    if path[0] == "entropic" and len(path) > 1:
        return _of_entropic(path[1], accepts, first), path[1]
    name = ".".join(path[: 1 + (path[0] in NESTED)])
    same = [e for e in errors if _location(e)[:1] == path[:1]]
    if all(e["type"] == "missing" for e in same):
        return f"{'.'.join(path)} is missing", path[0]
    inputs = [e["input"] for e in same if len(_location(e)) <= 2] or [first["input"]]
    accepted = _in_pydantic_words(same) if accepts is None else f"be {accepts}"
    return f"{name} must {accepted}; got {short(inputs[0])}", path[0]


def _accepted(path: list[str]) -> Accepted | None:
    """The values that a field accepts; None if it is in no table."""
    if path[0] in NUMBERS:
        return NUMBERS[path[0]]
    lines, name = (entropic.FIELDS, path[1:2]) if path[0] == "entropic" else (PARAMETERS, path[:1])
    return next((lines[field].accepts for field in name if field in lines), None)


def _of_entropic(name: str, accepts: Accepted | None, error: Mapping[str, Any]) -> str:
    """The message for a field of the object `entropic`."""
    if accepts is not None:
        return f"entropic.{name} must be {accepts}; got {short(error['input'])}"
    close = difflib.get_close_matches(name, entropic.FIELDS, 1)
    hint = f"did you mean {close[0]}?" if close else f"its fields are {', '.join(entropic.FIELDS)}"
    return f"entropic has no field {name[:200]}; {hint}"


def _in_pydantic_words(errors: Sequence[Mapping[str, Any]]) -> str:
    """What a field accepts, to follow "must"."""
    messages = [SHOULD.sub("", error["msg"]) for error in errors]
    for pydantic, ours in WORDS:
        messages = [text.replace(pydantic, ours) for text in messages]
    return " or ".join(list(dict.fromkeys(text[:1].lower() + text[1:] for text in messages))[:4])


def _location(error: Mapping[str, Any]) -> list[str]:
    """The path of a field in the body, without the names of Python classes."""
    parts = [str(part) for part in error["loc"]]
    return [part for part in parts if part not in ("body", "query", "path") and not part.endswith("Body")]
