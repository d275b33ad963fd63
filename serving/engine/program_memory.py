"""Program memory: unloads idle decode programs for which another can stand in.

A loaded program of a CPU takes many times the memory of its file. In place of one for some rows, the
program for the most rows can run; in place of one that drafts tokens, one that does not. So after warm-up
those stay in the cache of programs until launches miss them, and leave memory again after some time without a
launch. Nothing is compiled for that, and no request waits for a program; until it is loaded, steps take
longer.
"""

import threading

# Launches that miss a program before it is loaded, without and with drafts. Loading takes as long as several.
# The program for the most rows takes much longer a step than one for few; steps without drafts little longer.
PATIENCE = {False: 2, True: 48}
KEPT_SECONDS = 30.0  # that a program stays in memory after its latest launch, and launches that miss it count


class ProgramMemory:
    """Keeps count of the programs that may be left in the cache. Safe to call from any thread."""

    def __init__(self, widths: tuple[int, ...], enabled: bool) -> None:
        """Start with no program, in memory or out of it.

        Args:
            widths: batch buckets, ascending.
            enabled: whether any program may be left in the cache.
        """
        self._smallest, self._largest, self._enabled = widths[0], widths[-1], enabled
        self._lock = threading.Lock()
        self._out: set[tuple] = set()  # in the cache alone, or being loaded
        self._required: set[tuple] = set()  # to be kept in memory when they are loaded or compiled
        # Launches that missed a program, and the time of the latest.
        self._misses: dict[tuple, tuple[int, float]] = {}
        self._missed: set[tuple] = set()  # by the launch that is being planned
        self._last_run: dict[tuple, float] = {}  # of the programs in memory that are in the cache, too

    def is_optional(self, key: tuple) -> bool:
        """Whether another program can run in place of this one."""
        match key:
            case ("decode", width, _, _, speculates) if self._enabled:
                return width > self._smallest if speculates else self._smallest < width < self._largest
        return False

    def is_out(self, key: tuple) -> bool:
        """Whether a program is in the cache alone, or is being loaded."""
        return key in self._out

    def misses(self, key: tuple) -> bool:
        """Whether a program is out of memory, which counts once a launch."""
        if key in self._out:
            self._missed.add(key)
        return key in self._out

    def launched(self, key: tuple, timestamp: float) -> list[tuple]:
        """Note a launch; returns the programs that enough launches have missed.

        Args:
            key: the program that runs.
            timestamp: seconds.
        """
        with self._lock:
            if key in self._last_run:
                self._last_run[key] = timestamp
            due = [
                missed for missed in self._missed if self._count(missed, timestamp) >= PATIENCE[missed[-1]]
            ]
            self._missed.clear()
        return due

    def _count(self, missed: tuple, timestamp: float) -> int:
        """Launches that have missed a program, this one included, without a long pause between them."""
        number, latest = self._misses.get(missed, (0, timestamp))
        number = 1 if timestamp - latest >= KEPT_SECONDS else number + 1
        self._misses[missed] = number, timestamp
        return number

    def require(self, key: tuple) -> bool:
        """Ask for a program in memory; whether it was left in the cache before."""
        with self._lock:
            first = key not in self._required
            self._required.add(key)
            return first and key in self._out

    def leave_out(self, key: tuple) -> bool:
        """Leave a program in the cache; False if it is required."""
        with self._lock:
            if key not in self._required:
                self._out.add(key)
            return key not in self._required

    def enter(self, key: tuple, is_stored: bool, timestamp: float) -> None:
        """Note that a program is in memory.

        Args:
            key: the program.
            is_stored: whether it may leave again.
            timestamp: seconds.
        """
        with self._lock:
            self._out.discard(key)
            self._misses.pop(key, None)
            if is_stored:
                self._last_run[key] = timestamp

    def drop(self, timestamp: float) -> tuple[tuple | None, float | None]:
        """The program that leaves memory now, if one does, and the seconds until the next is due, if any.

        Args:
            timestamp: seconds.
        """
        with self._lock:
            if not self._last_run:
                return None, None
            key = min(self._last_run, key=lambda key: self._last_run[key])
            left = self._last_run[key] + KEPT_SECONDS - timestamp
            if left > 0:
                return None, left
            del self._last_run[key]
            self._required.discard(key)
            self._out.add(key)
            return key, 0.0
