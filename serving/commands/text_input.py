"""Text from files and from standard input, and files to write."""

import os
import stat
import sys
import tempfile
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


def read_texts(paths: list[str], argument: str) -> list[str]:
    """The texts of files, and of the files below folders in the order of their paths.

    Of a folder, hidden files and files that are not text in UTF-8 are left out. Raises RequestError for a
    path that is neither, or a folder without text.

    Args:
        paths: paths of files and folders; "-" is standard input.
        argument: the option that an error names.
    """
    texts = []
    for path in paths:
        if path == "-" or not Path(path).is_dir():
            texts.append(read_text(path, argument))
            continue
        texts += (below := [text for file in _visible_files(Path(path)) if (text := _decoded(file))])
        if not below:
            raise RequestError(f"{argument} must be a file, or a folder with text in UTF-8; got {path}")
    return texts


def _visible_files(folder: Path) -> list[Path]:
    """The regular files below a folder, sorted by path, without hidden ones."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    shown = [f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts)]
    return sorted(shown, key=lambda file: file.relative_to(folder).parts)


def _decoded(file: Path) -> str:
    """The text of a file, or an empty string where it is not text in UTF-8 or cannot be read."""
    try:
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if "\0" in text else text


def check_writable(file: Path, argument: str) -> None:
    """Say that a file cannot be written before a model has worked for it. Raises RequestError."""
    try:
        if file.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        with tempfile.NamedTemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise unwritable(file, argument, error) from None


def unwritable(file: Path, argument: str, error: OSError) -> RequestError:
    """The error that names the option of a file that cannot be written.

    Args:
        file: the file.
        argument: the option.
        error: says why.
    """
    return RequestError(f"{argument} must be a file in a writable directory; got {file} ({error.strerror})")


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
