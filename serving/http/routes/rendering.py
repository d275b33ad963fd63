"""Fields and encodings of answers that completions and chat share."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic_core
from starlette.responses import Response

from ...engine.interface import Delta
from ...request.transcript import Token
from ..protocol.entropic import TRACED
from ..protocol.sampling import SamplingBody

SUMMARY = ("entropic_time", "mean_entropy", "kept_fraction")
COUNTS = ("passes", "num_drafted", "num_accepted")  # of the summary, too


def head_of(name: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that every answer begins with.

    Args:
        name, kind, model: values of the fields `id`, `object` and `model`.
    """
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def entropic(body: SamplingBody, delta: Delta) -> dict[str, Any]:
    """The `entropic` object of a choice: a summary at its end, and the trace if requested.

    Args:
        body: says whether the trace is requested.
        delta: the new tokens; the last delta of a choice holds the summary.
    """
    fields: dict[str, Any] = {}
    if delta.finish_reason is not None:
        fields = {name: number(delta.summary.get(name)) for name in SUMMARY}
        if "cost" in delta.summary:
            fields["cost"] = number(delta.summary["cost"])
        fields |= {name: int(delta.summary[name]) for name in COUNTS if name in delta.summary}
    if body.entropic is not None and body.entropic.trace and (delta.tokens or fields):
        fields["trace"] = {
            "token_ids": [token.id for token in delta.tokens],
            "text": [token.text for token in delta.tokens],
            **{name: measured(delta.tokens, name) for name in TRACED},
        }
    return {"entropic": fields} if fields else {}


def measured(tokens: Sequence[Token], name: str) -> list[float | None]:
    """One metric of every token."""
    return [number(token.metrics.get(name)) for token in tokens]


def number(value: float | None) -> float | None:
    """A number that JSON can hold, or null."""
    return value if value is not None and math.isfinite(value) else None


def encoded(event: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + pydantic_core.to_json(event, inf_nan_mode="null") + b"\n\n"


def named(event: Mapping[str, Any]) -> bytes:
    """One server-sent event with the name that its field `type` states."""
    return f"event: {event['type']}\n".encode() + encoded(event)


def answered(answer: Mapping[str, Any]) -> Response:
    """A complete answer."""
    return Response(pydantic_core.to_json(answer, inf_nan_mode="null"), media_type="application/json")
