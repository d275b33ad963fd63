"""Read-ahead: programs that an earlier process has used, loaded while this one imports and loads its model.

Processes that do the same work give it the same name. One that uses a program which the one before it did not
use notes its own.
"""

import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG = logging.getLogger("entropic_jax.programs")
MOST = 4  # programs


class ReadAhead:
    """Programs that threads load before they are asked for, by their files. Safe to call from any thread."""

    def __init__(self, load: Callable[[Path], Any]) -> None:
        """Nothing is loaded yet.

        Args:
            load: loads the program in a file for the default device; None if there is none.
        """
        self._load = load
        self._begun: dict[Path, tuple[threading.Thread, list[Any]]] = {}
        self._list: Path | None = None  # names the programs; None before any work has begun
        self._listed: list[str] = []
        self._used: list[str] = []
        self._lock = threading.Lock()

    def begin(self, folder: Path, work: str) -> None:
        """Begin to load what the latest process with this work has used.

        Args:
            folder: the folder of the programs.
            work: a name of all that decides which programs are used.
        """
        self._list = folder / f"{hashlib.sha256(work.encode()).hexdigest()[:16]}.used"
        try:
            names = json.loads(self._list.read_text("utf-8"))
            files = [folder / Path(name).name for name in names[:MOST]]
        except (OSError, ValueError, TypeError):
            return
        self._listed = [file.name for file in files]
        for file in files:
            loaded: list[Any] = []
            # No daemon: at the end of the process, XLA must not be at work.
            thread = threading.Thread(target=lambda f=file, to=loaded: to.append(self._load(f)))
            with self._lock:
                self._begun[file] = thread, loaded
            thread.start()

    def take(self, file: Path) -> Any:
        """The program in a file, if its loading has begun, once it is there; else None."""
        with self._lock:
            self._note(file.name)
            thread, loaded = self._begun.pop(file, (None, []))
        if thread is not None:
            thread.join()
        return loaded[0] if loaded else None

    def _note(self, name: str) -> None:
        """Note that a program is used, for the next process."""
        if name not in self._used:
            self._used.append(name)
        if self._list is None or name in self._listed:
            return
        self._listed = self._used[-MOST:]
        try:
            self._list.parent.mkdir(0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._list.parent, delete=False, encoding="utf-8"
            ) as stream:
                json.dump(self._listed, stream)
            os.replace(stream.name, self._list)
        except OSError as error:
            LOG.debug("which programs are used is not noted: %s", error)
