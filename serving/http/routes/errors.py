"""Error responses, in OpenAI's form or, below `/v1/messages`, in Anthropic's.

OpenAI's is `{"error": {"message", "type", "param", "code"}}`, Anthropic's
`{"type": "error", "error": {"type", "message"}}`.
"""

import contextlib
import difflib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path

from entropic_jax.parameter_tables.sampling_params import PARAMETERS
from entropic_jax.parameter_tables.table import Accepted, Number

from ..frontend import FrontendError
from ..protocol import entropic
from ..protocol.fields import NUMBERS, in_json
from ..protocol.service import ErrorAnswer

logger = logging.getLogger(__name__)
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
ANTHROPIC_PATHS = "/v1/messages"  # which these paths begin with
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
UNREADABLE = "There was an error parsing the body"  # what FastAPI says where Python's parser gives up
PROMPT = "be a string, a list of token ids, or a list of these, none of them empty"
OR_INFINITY = " (or -inf)"
NESTED = ("entropic", "stream_options", "structured_outputs")  # objects whose fields are named in messages
LISTS = (
    "messages",
    "input",
    "system",
    "tools",
    "documents",
    "tool_choice",
    "metadata",
)  # errors in them name the place, as messages.0.role
UNION_ERRORS = ("union_tag_invalid", "union_tag_not_found")  # of a union's discriminator
SHOULD = re.compile(r"^(\w+ should |Value error, must )")  # how Pydantic begins most messages
COUNTED = re.compile(r"(?: after validation)?, not \d+$")  # how it ends those about lengths
WORDS = (  # of Pydantic, and of this API
    ("be None", "be null"),
    ("be False", "be false"),
    ("be True", "be true"),
    ("a valid boolean", "true or false"),
    ("a valid integer", "an integer"),
    ("a valid dictionary or object to extract fields from", "an object"),
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
    409: "The state of the server does not allow it",
    413: "The body is too large",
    429: "The queue is full; Retry-After says when to try again",
    500: "The model computed logits that are not finite",
    503: "The server is shutting down, or its engine has failed",
}


def documented(*codes: int, model: type[BaseModel] = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """The `responses` entry of a route for these status codes, whose bodies are of `model`."""
    return {code: {"model": model, "description": REASONS[code]} for code in codes}


def body(status: int, message: str, param: str | None = None, path: str = "") -> dict[str, Any]:
    """The body of an error.

    Args:
        status: HTTP status, from 400 to 599; decides `type`.
        message: for the client.
        param: field of the request that is at fault, if it is one.
        path: the path that was requested; decides the form.
    """
    if ANTHROPIC_PATHS in path:
        kind = ANTHROPIC_TYPES.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = TYPES.get(status, "Error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def answer(
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    path: str = "",
) -> Response:
    """The response for an error.

    Args:
        status: HTTP status, from 400 to 599.
        message: for the client; characters that are not Unicode are replaced.
        param: field of the request that is at fault, if it is one.
        headers: further headers, such as Retry-After.
        path: the path that was requested; decides the form.
    """
    text = json.dumps(body(status, message, param, path)).encode("utf-8", "replace")
    return Response(text, status, dict(headers or {}), media_type="application/json")


def install(app: FastAPI) -> None:
    """Answer every error of the app with an error body."""

    @app.exception_handler(FrontendError)
    async def refused(request: Request, error: FrontendError) -> Response:
        headers = {"Retry-After": f"{max(1, round(error.retry_after))}"} if error.retry_after else None
        return answer(error.status, str(error), error.param, headers, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = in_words(error)
        return answer(400, message, param, path=request.url.path)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        message, path, headers = str(error.detail), request.url.path[:200], error.headers
        if message == UNREADABLE:
            message = (
                "the body must be JSON with numbers of at most 4300 digits; got a longer one, or deep nesting"
            )
        elif message == HTTPStatus.NOT_FOUND.phrase:
            message = f"path must be one that /openapi.json lists; got {path}"
        elif message == HTTPStatus.METHOD_NOT_ALLOWED.phrase and headers is not None:
            methods = _methods(app, request) | set(headers.get("Allow", "").split(", "))
            headers = {**headers, "Allow": ", ".join(sorted(methods - {""}))}
            message = f"method must be {headers['Allow']} for {path}; got {request.method}"
        return answer(error.status_code, message, headers=headers, path=request.url.path)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return answer(400, "the client left before it had sent the body", path=request.url.path)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("unexpected error", exc_info=error, extra={"path": request.url.path})
        text = "unexpected error; see the server's log"
        return JSONResponse(body(500, text, path=request.url.path), 500)


def _methods(app: FastAPI, request: Request) -> set[str]:
    """The documented methods of a path, each of which is a route of its own."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    documented = app.openapi()["paths"].items()
    matching = (operations for template, operations in documented if compile_path(template)[0].match(path))
    return {method.upper() for operations in matching for method in operations}


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Report refusals of chat's fields under the names that another API gives them.

    Args:
        names: those of the API, by chat's; a `*` in both stands for the place in a list.

    Raises:
        FrontendError: Instead of the ValidationError or FrontendError of chat.
    """
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True))).replace(r"\*", r"\d+")
    pattern = re.compile(rf"(^|\b(?:with|at most) )({words})(?![\w.])")

    def named(match: re.Match[str]) -> str:
        place = re.search(r"\d+", match[2])
        if place is None:
            return match[1] + names[match[2]]
        return match[1] + names[match[2].replace(place[0], "*")].replace("*", place[0])

    def rename(text: str) -> str:
        return pattern.sub(named, text)

    try:
        yield
    except ValidationError as error:
        message, param = in_words(error)
        param = param and rename(param)
        raise FrontendError(400, rename(message), param) from None
    except FrontendError as error:
        param = error.param and rename(error.param)
        raise FrontendError(error.status, rename(str(error)), param, error.retry_after) from None


def in_words(error: RequestValidationError | ValidationError) -> tuple[str, str | None]:
    """The message for an invalid body, and `param`, the dotted path of its first invalid field."""
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
    same = [e for e in errors if _location(e)[:1] == path[:1]]
    same = [e for e in same if e["type"] == "too_long"] or same  # of a union, the only member that is meant
    nested = path[0] in LISTS or first["type"] in UNION_ERRORS
    if nested and isinstance(error, RequestValidationError) and isinstance(error.body, Mapping):
        return _in_list(error.body, same)
    accepts = _accepted(path)
    if isinstance(accepts, Number) and first["type"].startswith("bool_"):
        accepts = None  # `logprobs`, a number elsewhere, is a flag in this body
    if path[0] == "entropic" and len(path) > 1:
        return _of_entropic(path[1], accepts, first), f"entropic.{path[1]}"
    sent = getattr(error, "body", None)
    name = ".".join(path[: 1 + (path[0] in NESTED)])
    if path[0] == "structured_outputs" and isinstance(sent, Mapping) and path[0] not in sent:
        name = f"guided_{path[1]}"  # vLLM's older name, under which it was sent
    if all(e["type"] == "missing" for e in same):
        missing = ".".join(_place(sent, first) or path)
        return f"{missing} is missing", missing
    inputs = [e["input"] for e in same if len(_location(e)) <= 2] or [first["input"]]
    if isinstance(sent, Mapping) and isinstance(sent.get(path[0]), Mapping) and accepts is not None:
        inputs = [sent[path[0]]]  # a key of a mapping may be at fault
    accepted = _in_pydantic_words(same) if accepts is None else f"be {accepts}"
    accepted = accepted.removesuffix(OR_INFINITY)  # which JSON cannot state
    if name == "prompt" and len(same) > 1 and same[0]["type"] != "too_long":
        accepted = PROMPT
    return f"{name} must {accepted}; got {in_json(inputs[0])}", name


def _accepted(path: list[str]) -> Accepted | None:
    """The values that a field accepts; None if it is in no table."""
    if path[0] in NUMBERS:
        return NUMBERS[path[0]]
    lines, name = (entropic.FIELDS, path[1:2]) if path[0] == "entropic" else (PARAMETERS, path[:1])
    return next((lines[field].accepts for field in name if field in lines), None)


def _of_entropic(name: str, accepts: Accepted | None, error: Mapping[str, Any]) -> str:
    """The message for a field of the object `entropic`."""
    if accepts is not None:
        return f"entropic.{name} must be {accepts}; got {in_json(error['input'])}"
    close = difflib.get_close_matches(name[:200], entropic.FIELDS, 1)
    hint = f"did you mean {close[0]}?" if close else f"its fields are {', '.join(entropic.FIELDS)}"
    return f"entropic has no field {name[:200]}; {hint}"


def _in_list(tree: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The message and `param` for a field that holds lists of objects: the place of the deepest error."""
    places = [_place(tree, error) for error in errors]
    place = max(places, key=len)
    deepest = [e for e, other in zip(errors, places, strict=True) if other == place]
    kind, context = deepest[0]["type"], deepest[0].get("ctx", {})
    name = ".".join([*place, context["discriminator"].strip("'")] if kind in UNION_ERRORS else place)
    if kind in ("missing", "union_tag_not_found"):
        return f"{name} is missing", name
    if kind == "union_tag_invalid":
        return f"{name} must be one of {context['expected_tags']}; got {in_json(context['tag'])}", name
    return f"{name} must {_in_pydantic_words(deepest)}; got {in_json(deepest[0]['input'])}", name


def _place(tree: Any, error: Mapping[str, Any]) -> list[str]:
    """The path of an error in a body, without the names that Pydantic adds for members of unions."""
    place: list[str] = []
    parts = [part for part in error["loc"] if part != "body"]
    for number, part in enumerate(parts):
        is_index = isinstance(tree, list) and isinstance(part, int) and part < len(tree)
        if is_index or (isinstance(tree, Mapping) and part in tree):
            tree = tree[part]
        elif error["type"] != "missing" or number < len(parts) - 1:
            continue
        place.append(str(part))
    return place


def _in_pydantic_words(errors: Sequence[Mapping[str, Any]]) -> str:
    """The accepted values of a field, to follow "must"."""
    messages = [COUNTED.sub("", SHOULD.sub("", error["msg"])) for error in errors]
    for pydantic, ours in WORDS:
        messages = [text.replace(pydantic, ours) for text in messages]
    first, *others = list(dict.fromkeys(text[:1].lower() + text[1:] for text in messages))[:4]
    if first.startswith("be "):
        others = [text.removeprefix("be ") for text in others]
    return " or ".join([first, *others])


def _location(error: Mapping[str, Any]) -> list[str]:
    """The path of a field in the body, without the names of Python classes."""
    parts = [str(part) for part in error["loc"]]
    if parts[:1] == ["body"] or (len(parts) > 1 and parts[0] in ("query", "path")):
        parts = parts[1:]
    return [part for part in parts if not part.endswith("Body")]
