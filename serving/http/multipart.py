"""Forms with files: the parts of a `multipart/form-data` body (RFC 7578)."""

import email.parser
from collections.abc import Iterator
from typing import NamedTuple

from ..request import RequestError

MOST_PARTS, HEAD_BYTES = 16, 4096  # of a form, and of the headers of a part
CHARSETS = ("utf-8", "us-ascii", "iso-8859-1")


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
    is_form = content_type.lower().startswith("multipart/form-data") and len(content_type) <= HEAD_BYTES
    boundary = _parameter(_headers(f"Content-Type: {content_type}"), "boundary") if is_form else None
    if not boundary:
        raise RequestError(
            "the header Content-Type must be multipart/form-data with a boundary; "
            f"got {content_type[:100] or 'none'}"
        )
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), MOST_PARTS + 2)
    if len(pieces) > MOST_PARTS + 2:
        raise RequestError(f"the form must have at most {MOST_PARTS} parts; got more")
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise RequestError("the body must be a form that ends with its boundary; got another body")
    for piece in pieces[1:-1]:
        yield _part(piece)


def _part(piece: bytes) -> Part:
    """The field that stands between two boundaries."""
    end = piece.find(b"\r\n\r\n", 0, HEAD_BYTES)
    if end < 0 and len(piece) >= HEAD_BYTES:
        raise RequestError(
            f"every part of the form must have headers of at most {HEAD_BYTES} bytes; got more"
        )
    headers = _headers(piece[: max(0, end)].decode("utf-8", "replace").lstrip(" \t\r\n"))
    name = _parameter(headers, "name", "Content-Disposition")
    if name is None:
        raise RequestError("every part of the form must have a name in Content-Disposition; got none")
    return Part(name, _parameter(headers, "filename", "Content-Disposition"), piece[end + 4 :])


def _headers(text: str) -> email.message.Message:
    return email.parser.HeaderParser().parsestr(text)


def _parameter(headers: email.message.Message, name: str, header: str = "Content-Type") -> str | None:
    """A parameter of a header, decoded; None if it is not there. Raises RequestError."""
    try:
        value = headers.get_param(name, header=header)
        if not isinstance(value, tuple):
            return value
        charset, _, text = value  # of the form `name*=utf-8''text`
        if (charset or "us-ascii").lower() in CHARSETS:
            return text.encode("latin-1").decode(charset or "us-ascii")
    except ValueError:  # also of what is not in the charset
        pass
    raise RequestError(f"{name} in {header} must be text of the charset {' or '.join(CHARSETS)}; got another")
