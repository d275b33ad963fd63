"""Response bodies of the service routes, and the body of every error."""

from typing import Any, Literal

from .fields import Answer


class ErrorDetail(Answer):
    """Why a request was refused: the parameter, what it must be, and its value."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(Answer):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ModelCard(Answer):
    """A model that requests may name."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created_at: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Answer):
    """All of them."""

    object: Literal["list"]
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Version(Answer):
    """The version of the package."""

    version: str


class Health(Answer):
    """Whether the server is alive, or ready."""

    status: str


class ServerInfo(Answer):
    """Configuration of the server, without secrets; `engine` holds versions, devices, options and sizes."""

    version: str
    started: int
    uptime_seconds: int
    model: dict[str, Any]
    control: dict[str, Any]
    server: dict[str, Any]
    engine: dict[str, Any]


class PrefixCacheCounts(Answer):
    """Pages that left the prefix cache, and pages that stay because running sequences hold them."""

    released_pages: int
    pages_in_use: int


class ProfileState(Answer):
    """Whether a JAX trace is being recorded, and where it is written."""

    recording: bool
    folder: str


class EngineState(Answer):
    """State of the engine: counts, the use of the KV cache, and the sequences in flight."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class SleepState(Answer):
    """Whether the engine sleeps."""

    is_sleeping: bool
