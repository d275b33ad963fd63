"""Input of a batch: its lines as requests, or what is wrong with them."""

import json
from typing import Any, Literal, NamedTuple

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
MOST_LINES = 50_000
MOST_ERRORS = 100  # reported of one file


class Line(NamedTuple):
    """A request of a batch."""

    custom_id: str
    body: dict[str, Any]


def error(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    """An entry of a batch's errors.

    Args:
        code: the kind of the error.
        message: the text for the client.
        param: the field of the line that is at fault.
        line: the line's number, from 1.
    """
    return {"code": code, "message": message, "param": param, "line": line}


def read_lines(content: bytes, endpoint: str) -> tuple[list[Line], list[dict[str, Any]]]:
    """The requests of a file in JSON lines, and what is wrong with it.

    Args:
        content: the bytes of the file.
        endpoint: the path that every line must name.
    """
    lines: dict[str, Line] = {}
    errors: list[dict[str, Any]] = []
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        if len(lines) == MOST_LINES:
            errors.append(error("too_many_lines", f"the file must have at most {MOST_LINES} lines; got more"))
            break
        line, wrong = _read(text, endpoint, number)
        if wrong is None and line is not None and line.custom_id in lines:
            message = f"custom_id must be of no other line; got {line.custom_id!r}"
            wrong = error("duplicate_custom_id", message, "custom_id", number)
        if wrong is not None:
            errors.append(wrong)
        elif line is not None:
            lines[line.custom_id] = line
        if len(errors) == MOST_ERRORS:
            break
    if not lines and not errors:
        errors.append(error("empty_file", "the file must have at least one line; got none"))
    return list(lines.values()), errors


def _read(text: bytes, endpoint: str, number: int) -> tuple[Line | None, dict[str, Any] | None]:
    """A line, or its error."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None, error("invalid_json_line", "a line must be a JSON object; got other text", None, number)
    if not isinstance(fields, dict):
        return None, error("invalid_json_line", "a line must be a JSON object; got another", None, number)
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512:
        message = "custom_id must be a text of 1 to 512 characters"
        return None, error("invalid_custom_id", message, "custom_id", number)
    if fields.get("method") != "POST":
        return None, error("invalid_method", "method must be POST", "method", number)
    if fields.get("url") != endpoint:
        message = f"url must be the endpoint of the batch, {endpoint}"
        return None, error("mismatched_url", message, "url", number)
    if not isinstance(body, dict):
        return None, error("invalid_body", "body must be a JSON object", "body", number)
    if body.get("stream"):
        return None, error("invalid_body", "stream must be absent or false in a batch", "body.stream", number)
    return Line(custom_id, body), None
