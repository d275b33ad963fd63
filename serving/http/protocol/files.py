"""`/v1/files` and `/v1/batches`, in the form of OpenAI's API."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..batch_lines import Endpoint
from .fields import Answer, Body, at_most, unicode

SHORTEST, LONGEST = 3600, 30 * 86400  # seconds that a file may be stated to live
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    at_most(16),
]


class ExpiresAfter(Body):
    """How long a file lives."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=SHORTEST, le=LONGEST)]


class BatchBody(Body):
    """A batch to be run."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=200)]
    endpoint: Endpoint = Field(description="the path that all lines of the file name")
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    _unicode = model_validator(mode="before")(unicode)


class FileObject(Answer):
    """A stored file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(Answer):
    """A page of the files."""

    object: Literal["list"]
    data: list[FileObject]
    has_more: bool


class DeletedFile(Answer):
    """A file that is no longer stored."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchErrors(Answer):
    """Errors in the input of a batch."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class RequestCounts(Answer):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(Answer):
    """A batch; a time that has not come is absent."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    errors: BatchErrors | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Answer):
    """A page of the batches."""

    object: Literal["list"]
    data: list[BatchObject]
    has_more: bool
