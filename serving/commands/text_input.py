"""Text from files and from standard input."""

import os
import stat
import sys
import threading
from pathlib import Path

from ..request import RequestError

PATIENCE = 2.0  # seconds without an end of standard input, after which to say what is waited for


def read_text(path: str, argument: str) -> str:
    """The text of a file, or of standard input where `path` is "-"; RequestError names the `argument`."""
    try:
        return (_standard_input() if path == "-" else Path(path).read_bytes()).decode()
    except OSError as error:
        raise RequestError(f"{argument} must be a readable file; got {path} ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{argument} must be text in UTF-8; got {path} with {error.reason} at byte {error.start}"
        ) from None


def has_standard_input() -> bool:
    """Whether standard input is a file or a pipe: not a terminal, not the null device, not closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _standard_input() -> bytes:
    def tell():
        return print("entropic: reading standard input, which has not ended yet …", file=sys.stderr)

    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        return sys.stdin.buffer.read()
    finally:
        timer.cancel()
