"""Forms with files: the parts of a `multipart/form-data` body (RFC 7578)."""

import email.parser
from collections.abc import Iterator
from typing import NamedTuple

from ..request import RequestError


class Part(NamedTuple):
    """A field of a form."""

    name: str
    filename: str | None  # None for a field that is no file
    content: bytes


def parts(content_type: str, body: bytes) -> Iterator[Part]:
    """The fields of a form, in order.

    Args:
        content_type: the header Content-Type, which states the boundary.
        body: the whole body.

    Raises:
        RequestError: The body is no such form.
    """
    boundary = _headers(f"Content-Type: {content_type}").get_param("boundary")
    if not content_type.lower().startswith("multipart/form-data") or not isinstance(boundary, str):
        raise RequestError(
            "the header Content-Type must be multipart/form-data with a boundary; "
            f"got {content_type[:100] or 'none'}"
        )
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode())
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise RequestError("the body must be a form that ends with its boundary; got another body")
    for piece in pieces[1:-1]:
        head, separator, content = piece.partition(b"\r\n\r\n")
        headers = _headers(head.decode("utf-8", "replace").lstrip(" \t\r\n"))
        name = headers.get_param("name", header="content-disposition")
        if not separator or not isinstance(name, str):
            raise RequestError("every part of the form must have a name in Content-Disposition; got none")
        yield Part(name, headers.get_filename(), content)


def _headers(text: str) -> email.message.Message:
    return email.parser.HeaderParser().parsestr(text)
