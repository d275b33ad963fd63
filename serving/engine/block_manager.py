"""The host's account of the pool: what the rows may come to hold, and what the prefix cache keeps.

The device grants pages by itself; the host makes sure beforehand that it can. What a row may come to hold is
reserved before it is given steps, so the account is never below what the device holds.
"""

from collections.abc import Sequence as Seq

import numpy as np

from .prefix_cache import PageHash, PrefixCache
from .state_updates import StateUpdates


class BlockManager:
    """Pages reserved for rows, and those of them that are in the prefix cache."""

    def __init__(self, rows: int, count: int, page_size: int, prefix: PrefixCache | None) -> None:
        self.num_pages, self.page_size, self.prefix = count, page_size, prefix
        self.reserved = np.zeros(rows, np.int64)  # a row's pages
        self.cached = np.zeros(rows, np.int64)  # those of them that are in the prefix cache
        self.learned = np.zeros(rows, np.int64)  # its first pages that were looked at for the prefix cache
        self.used: list[list[PageHash]] = [[] for _ in range(rows)]

    @property
    def num_free_pages(self) -> int:
        """Pages that no row holds or may come to hold, and that the prefix cache does not keep."""
        kept = 0 if self.prefix is None else len(self.prefix)
        return self.num_pages - kept - int(self.reserved.sum() - self.cached.sum())

    @property
    def usage(self) -> float:
        """The share of the pool that rows hold or may come to hold, in [0, 1]."""
        return 1 - (self.num_free_pages + self._num_evictable) / self.num_pages

    @property
    def _num_evictable(self) -> int:
        return 0 if self.prefix is None else self.prefix.num_evictable

    def _evict(self, pages: int, updates: StateUpdates) -> None:
        if pages > self.num_free_pages and self.prefix is not None:
            updates.released_pages += self.prefix.evict(pages - self.num_free_pages)

    def allocate(
        self,
        row: int,
        keys: Seq[PageHash],
        length: int,
        others: int,
        updates: StateUpdates,
        multiple: int = 1,
        spare: int = 0,
    ) -> list[int] | None:
        """Reserve `length` positions and `spare` pages for a row; the pages it shares, None without room.

        Room is left for `others`, rows that still grow, to grow by a page each; else one of them would soon
        have to give way. What it shares is a `multiple` of pages.
        """
        shared = [] if self.prefix is None else self.prefix.match(keys)
        shared = shared[: len(shared) // multiple * multiple]
        known = list(keys[: len(shared)])
        if self.prefix is not None:
            self.prefix.acquire(known)
        need = -(-length // self.page_size) + spare - len(shared)
        if need + others > self.num_free_pages + self._num_evictable:
            if self.prefix is not None:
                self.prefix.release(known)
            return None
        self._evict(need, updates)
        if self.prefix is not None:
            self.prefix.queries += length
            self.prefix.hits += len(shared) * self.page_size
        self.reserved[row] = need + len(shared)
        self.cached[row] = self.learned[row] = len(shared)
        self.used[row] = known
        return shared

    def reserve(self, rows: np.ndarray, lengths: np.ndarray, updates: StateUpdates) -> bool:
        """Reserve so many positions for the rows; False, and nothing is done, where there is no room."""
        need = np.maximum(-(-lengths // self.page_size), self.reserved[rows])
        more = int((need - self.reserved[rows]).sum())
        if more > 0:
            if more > self.num_free_pages + self._num_evictable:
                return False
            self._evict(more, updates)
            self.reserved[rows] = need
        return True

    def cache_prefix(self, row: int, keys: Seq[PageHash], table: np.ndarray, updates: StateUpdates) -> None:
        """Let the prefix cache keep the row's first pages, `keys` of them, that hold a text of their own."""
        if self.prefix is None:
            return
        for index in range(int(self.learned[row]), len(keys)):
            page = int(table[index])
            if self.prefix.insert(keys[index], page):
                updates.retained_pages.append(page)
                self.used[row].append(keys[index])
                self.cached[row] += 1
        self.learned[row] = max(self.learned[row], len(keys))

    def shrink(self, row: int, pages: int) -> None:
        """The row, which shares nothing, has given up all but so many pages."""
        self.reserved[row] = pages

    def free(self, row: int) -> None:
        """The row has ended; the device is told by whoever calls."""
        if self.prefix is not None:
            self.prefix.release(self.used[row])
        self.reserved[row] = self.cached[row] = self.learned[row] = 0
        self.used[row] = []
