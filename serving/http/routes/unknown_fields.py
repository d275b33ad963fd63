"""Warnings about fields of a request that are ignored, look like known ones, or belong into `entropic`."""

import difflib
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ..protocol.entropic import FIELDS
from ..protocol.foreign_fields import IGNORED
from ..protocol.sampling import GUIDED

logger = logging.getLogger("entropic_jax.serving.requests")
HEADER = "X-Warning"
SIMILARITY = 0.8  # of names, between 0 and 1, from which one is taken for a misspelling of the other
MOST, LENGTH = 8, 64  # names that are warned of, and characters of a name


def misspelled(names: Iterable[str], known: Iterable[str]) -> list[tuple[str, str]]:
    """Unknown names that look like known ones, each with the known one.

    >>> misspelled(["temprature", "user_data", "stop"], ["temperature", "stop"])
    [('temprature', 'temperature')]
    >>> misspelled(["preset"], ["entropic", "stop"])
    [('preset', 'entropic.preset')]
    """
    spellings = {name: name for name in known}
    unknown = (name for name in names if name not in spellings and len(name) <= LENGTH)
    unknown = list(itertools.islice(unknown, MOST))
    if "entropic" in spellings:
        spellings = {name: f"entropic.{name}" for name in FIELDS} | spellings
    close = ((name, difflib.get_close_matches(name, spellings, 1, SIMILARITY)) for name in unknown)
    return [(name, spellings[matches[0]]) for name, matches in close if matches]


async def warn(http: Request, body: BaseModel, response: Response) -> Response:
    """The response, with a header about ignored and misspelled fields, which are logged as well.

    Args:
        http: the request, whose body was read.
        body: what it was read as.
        response: the answer to it.
    """
    tree: Any = await http.json()  # which Starlette has kept
    if not isinstance(tree, Mapping):
        return response
    fields = type(body).model_fields.items()
    known = {field.alias or name for name, field in fields} | {f"guided_{name}" for name in GUIDED}
    ignored = {name: why for name, why in IGNORED.items() if tree.get(name) is not None and name not in known}
    close = dict(misspelled((name for name in tree if name not in ignored), known))
    texts = [f"field {name} is ignored: {why}" for name, why in ignored.items()]
    texts += [f"unknown field {name}: did you mean {other}?" for name, other in close.items()]
    if texts:
        response.headers[HEADER] = "; ".join(texts).encode("ascii", "backslashreplace").decode()
        logger.warning("unknown fields", extra={"fields": ignored | close})
    return response
