"""Messages between the ingress of a fleet and its replicas."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..engine.prefix_cache import PageHash, page_hashes, root_hash

BLOCK = 64  # bytes of a prompt that have a hash together; about a page of 16 tokens
LONGEST = 1024  # blocks of a prompt that are compared
# Fields of a body in the order of the prompt that they become. The last one that is there is the longest.
BEFORE_PROMPT = ("model", "cache_salt", "tools", "instructions", "system")
PROMPTS = ("prompt", "messages", "input")
# Paths about the state of one server, which a fleet would have to ask all of its replicas.
PER_REPLICA = (
    "/metrics",
    "/entropic/state",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/start_profile",
    "/stop_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
STORED = "/v1/responses/"


class ReplicaLostError(Exception):
    """The engine of a replica has failed, and Ray is about to replace it."""


class Forwarded(NamedTuple):
    """An HTTP request, and the hashes of the blocks of its prompt."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    hashes: tuple[PageHash, ...] = ()

    def scope(self) -> dict[str, Any]:
        """The ASGI scope of the request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


def parsed(body: bytes) -> Mapping[str, Any]:
    """The body as a JSON object; an empty one for any other body, which the replica refuses."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def prefix_hashes(fields: Mapping[str, Any]) -> tuple[PageHash, ...]:
    """The hashes of the blocks of a request's prompt; requests that begin alike have equal ones at first.

    >>> first, second = ({"prompt": "x" * 100 + end} for end in "ab")
    >>> prefix_hashes(first) == prefix_hashes(second)
    True
    >>> prefix_hashes({"prompt": "y" * 100}) == prefix_hashes(first)
    False
    """
    text = b"".join(_parts(fields))[: BLOCK * LONGEST]
    return tuple(page_hashes(root_hash(()), list(text), BLOCK))


def _parts(fields: Mapping[str, Any]) -> Iterator[bytes]:
    for name in (*BEFORE_PROMPT, *PROMPTS):
        if fields.get(name) is not None:
            yield json.dumps(fields[name], separators=(",", ":")).encode()


def refusal(path: str, fields: Mapping[str, Any]) -> str | None:
    """The error for a request that a single server may accept but a fleet does not; None if it does.

    Args:
        path: the path of the request.
        fields: the fields of its body.
    """
    if path in PER_REPLICA or path.startswith(STORED):
        return f"path must be one that every replica of a fleet answers alike; got {path[:200]}"
    if fields.get("previous_response_id") is not None:
        return "previous_response_id must be null: the replicas of a fleet do not share responses"
    return None
