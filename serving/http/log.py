"""Logs as JSON, one object a line, each with the id of the request that it is about."""

import contextvars
import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

REQUEST_ID = "[A-Za-z0-9._:/+=@-]{1,128}"  # a pattern of the ids that clients may give to requests
request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class JsonFormatter(logging.Formatter):
    """`{"time": …, "level": …, "logger": …, "message": …, "request_id": …}` and what `extra` holds."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := request_id.get()) is not None:
            line["request_id"] = request
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


class PlainFormatter(logging.Formatter):
    """The same for a person: the time, the message, and what `extra` holds."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, and a traceback where there is one."""
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        words = [f"{name}={value}" for name, value in extra.items() if value is not None]
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        text = " ".join([when, record.levelname.lower(), record.getMessage(), *words])
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class StandardErrorHandler(logging.StreamHandler):
    """Writes to what `sys.stderr` is at that moment: a program may replace it and close the old one."""

    @property
    def stream(self) -> TextIO:
        """The stream that records are written to."""
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        pass


def configure(form: str = "json", level: str = "info") -> None:
    """Send the logs of this package and of uvicorn to standard error, in the form "json" or "text"."""
    handler = StandardErrorHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else PlainFormatter())
    for name in ("entropic_jax", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
