"""Stored files: a bounded folder of files, which belong to an API key and expire."""

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..request import RequestError

OVERHEAD = 4096  # bytes that each file counts for besides its contents, so that their number is bounded, too


class StoredFile(NamedTuple):
    """Metadata of a stored file."""

    id: str
    owner: str | None  # digest of an API key, as hexadecimal digits; None on a server without keys
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970
    expires_at: int


class StoreFullError(RequestError):
    """There is no room for a file."""


class FileStore:
    """Files by id, from the oldest to the newest, in a folder that one server uses at a time.

    A file is complete or not there, whenever the process ends. Methods may be called from any thread.
    """

    def __init__(
        self, folder: Path, max_bytes: int, seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        """The files that are in the folder.

        Args:
            folder: is made if it does not exist.
            max_bytes: largest size of all files, with `OVERHEAD` for each.
            seconds: life of a file that states no other.
            clock: returns seconds since 1970.

        Raises:
            RequestError: The folder cannot be used, or another server uses it.
        """
        self.folder, self.max_bytes, self.seconds, self.clock = folder, max_bytes, seconds, clock
        self._contents = folder / "files"
        self._mutex = threading.RLock()  # held for changes of the two below, not while files are written
        self._set_aside: dict[str, int] = {}  # bytes for what is not stored yet, by key
        try:
            self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
            _lock(self._lock)
        except BlockingIOError:
            raise RequestError(f"--files-dir must not be in use by another server; got {folder}") from None
        except OSError as error:
            raise RequestError(
                f"--files-dir must be a folder that can be written; got {folder} ({error.strerror})"
            ) from None
        described = [_described(file) for file in self._contents.glob("*.json")]
        self._files = {f.id: f for f in sorted(described, key=lambda file: (file.created_at, file.id))}
        for file in self._contents.iterdir():
            if file.name.removesuffix(".json") not in self._files:
                file.unlink()  # of an upload that was cut off

    def close(self) -> None:
        """Let another server use the folder."""
        self._lock.close()

    @property
    def size(self) -> int:
        """Bytes of all files and of what is set aside for others, with `OVERHEAD` for each."""
        with self._mutex:
            coming = [size for key, size in self._set_aside.items() if key not in self._files]
            sizes = [*coming, *(file.bytes for file in self._files.values())]
        return sum(sizes) + OVERHEAD * len(sizes)

    def set_aside(self, key: str, size: int, name: str = "file") -> None:
        """Set room aside, in place of what was set aside for the same key.

        Args:
            key: an id, or another key, which `give_back` is called with in the end.
            size: bytes of what is to be stored.
            name: what the message calls it.

        Raises:
            StoreFullError: There is no room; what was set aside before stays so.
        """
        self.drop_expired()
        with self._mutex:
            before = self._set_aside.pop(key, None)
            left = max(0, self.max_bytes - self.size - OVERHEAD)
            if size <= left:
                self._set_aside[key] = size
                return
            if before is not None:
                self._set_aside[key] = before
        message = f"{name} must fit into the {left} bytes that are left of {self.max_bytes}; got {size}"
        raise StoreFullError(message, name)

    def give_back(self, key: str) -> None:
        """End what `set_aside` has begun."""
        with self._mutex:
            self._set_aside.pop(key, None)

    def put(
        self,
        owner: str | None,
        content: bytes,
        filename: str,
        purpose: str,
        seconds: float | None = None,
    ) -> StoredFile:
        """Store a file under a new id.

        Args:
            owner: who may read it.
            content: its bytes.
            filename: the name that its owner gives it.
            purpose: the use of the file.
            seconds: its life; None is that of the store.

        Raises:
            StoreFullError: There is no room.
        """
        name = f"file-{uuid.uuid4().hex}"
        self.set_aside(name, len(content))
        try:
            return self.keep(owner, content, filename, purpose, seconds, name)
        finally:
            self.give_back(name)

    def keep(
        self,
        owner: str | None,
        content: bytes,
        filename: str,
        purpose: str,
        seconds: float | None,
        name: str,
    ) -> StoredFile:
        """Store a file for which there is room under its id, in place of one that has it.

        Args:
            owner: who may read it.
            content: its bytes.
            filename: the name that its owner gives it.
            purpose: the use of the file.
            seconds: its life; None is that of the store.
            name: the id.
        """
        current = int(self.clock())
        life = self.seconds if seconds is None else seconds
        file = StoredFile(name, owner, filename, purpose, len(content), current, int(current + life))
        write(self._contents / name, content)
        write(self._contents / f"{name}.json", json.dumps(file._asdict()).encode())
        with self._mutex:
            self._files[name] = file
        return file

    def get(self, owner: str | None, name: str) -> StoredFile | None:
        """The file with an id; None if it is not there, has expired, or has another owner."""
        self.drop_expired()
        file = self._files.get(name)
        return file if file is not None and file.owner == owner else None

    def of_owner(self, owner: str | None) -> list[StoredFile]:
        """The files of an owner, from the oldest to the newest."""
        self.drop_expired()
        with self._mutex:
            return [file for file in self._files.values() if file.owner == owner]

    def content(self, file: StoredFile) -> bytes:
        """The bytes of a file. FileNotFoundError if it has been deleted."""
        return (self._contents / file.id).read_bytes()

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with self._mutex:
            self._files.pop(name, None)
        (self._contents / f"{name}.json").unlink(missing_ok=True)
        (self._contents / name).unlink(missing_ok=True)

    def drop_expired(self) -> None:
        """Delete the files whose time is over."""
        current = self.clock()
        with self._mutex:
            expired = [file.id for file in self._files.values() if file.expires_at <= current]
        for name in expired:
            self.delete(name)


def _described(file: Path) -> StoredFile:
    """The metadata in a file; a name that is not Unicode, which was accepted once, is replaced."""
    stored = StoredFile(**load_json(file))
    return stored._replace(filename=stored.filename.encode("utf-8", "replace").decode())


def _lock(file: Any) -> None:
    """Lock an open file. BlockingIOError if another process has done so, OSError where there are no locks."""
    try:
        import fcntl
    except ImportError:  # on Windows
        raise OSError(0, "this system has no file locks") from None
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def page_of(entries: Iterable[Any], limit: int, after: str | None) -> dict[str, Any]:
    """A list object with a page of entries, in OpenAI's form.

    Args:
        entries: objects with an id, in the order of the list.
        limit: entries of the page, at most.
        after: the id of the entry before the page; None begins the list.

    Raises:
        RequestError: No entry has that id.
    """
    entries = list(entries)
    if after is not None:
        place = next((i for i, entry in enumerate(entries) if entry["id"] == after), None)
        if place is None:
            raise RequestError(f"after must be the id of an entry of the list; got {after[:200]!r}", "after")
        entries = entries[place + 1 :]
    page = entries[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return {"object": "list", "data": page, "has_more": len(entries) > limit, **ends}


def write(file: Path, content: bytes) -> None:
    """Write a file so that it is complete or not there."""
    part = file.with_name(f"{file.name}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(content)
    part.replace(file)


def load_json(file: Path) -> Any:
    """The value in a JSON file that this module wrote."""
    return json.loads(file.read_bytes())
