"""Block manager: the host's account of the page pool, by which it reserves pages for rows.

The device takes pages from the pool by itself; the host makes sure beforehand that there are enough. It
reserves what a row may come to hold before it gives the row steps, so the reserved pages are never fewer than
those that the device has in use.
"""

from collections.abc import Sequence

import numpy as np

from .interface import PrefixCacheReset
from .prefix_cache import PageHash, PrefixCache
from .state_updates import StateUpdates


class BlockManager:
    """Reserves pages for rows and shares cached prefixes among them.

    Args:
        rows: rows of the batch.
        num_pages: pages of the pool.
        page_size: positions per page.
        prefix_cache: cached prefixes, None to share none.
    """

    def __init__(self, rows: int, num_pages: int, page_size: int, prefix_cache: PrefixCache | None) -> None:
        self.num_pages, self.page_size, self.prefix_cache = num_pages, page_size, prefix_cache
        self.reserved = np.zeros(rows, np.int64)  # pages of each row
        self.cached = np.zeros(rows, np.int64)  # those of them that the prefix cache holds too
        self.offered = np.zeros(rows, np.int64)  # first pages of each row, offered to the prefix cache
        self.acquired: list[list[PageHash]] = [[] for _ in range(rows)]

    @property
    def num_free_pages(self) -> int:
        """Pages that are neither reserved for a row nor in the prefix cache."""
        kept = 0 if self.prefix_cache is None else len(self.prefix_cache)
        return self.num_pages - kept - int(self.reserved.sum() - self.cached.sum())

    @property
    def usage(self) -> float:
        """The fraction of the pool that is reserved for rows, in [0, 1]."""
        return 1 - self._num_available / self.num_pages

    @property
    def _num_available(self) -> int:
        """Free pages, and those that the prefix cache can evict."""
        evictable = 0 if self.prefix_cache is None else self.prefix_cache.num_evictable
        return self.num_free_pages + evictable

    def _evict(self, pages: int, updates: StateUpdates) -> None:
        """Evict from the prefix cache until that number of pages is free."""
        if pages > self.num_free_pages and self.prefix_cache is not None:
            updates.released_pages += self.prefix_cache.evict(pages - self.num_free_pages)

    def allocate(
        self,
        row: int,
        hashes: Sequence[PageHash],
        length: int,
        growing: int,
        updates: StateUpdates,
        multiple: int = 1,
        spare: int = 0,
    ) -> list[int] | None:
        """Reserve pages for a sequence that gets a row, part of them shared with the prefix cache.

        Args:
            row: an empty row.
            hashes: the hashes of the prompt's full pages, as far as they may be shared.
            length: positions to reserve.
            growing: rows that may still grow. A page is left for each; otherwise one of them would soon be
                preempted.
            updates: where evicted pages are released.
            multiple: the number of shared pages is a multiple of this.
            spare: pages to reserve beyond `length`.

        Returns:
            The shared pages; None, with nothing changed, where the pool has no room.
        """
        shared = [] if self.prefix_cache is None else self.prefix_cache.match(hashes)
        shared = shared[: len(shared) // multiple * multiple]
        acquired = list(hashes[: len(shared)])
        if self.prefix_cache is not None:
            self.prefix_cache.acquire(acquired)
        new = -(-length // self.page_size) + spare - len(shared)
        if new + growing > self._num_available:
            if self.prefix_cache is not None:
                self.prefix_cache.release(acquired)
            return None
        self._evict(new, updates)
        if self.prefix_cache is not None:
            self.prefix_cache.queries += length
            self.prefix_cache.hits += len(shared) * self.page_size
        self.reserved[row] = new + len(shared)
        self.cached[row] = self.offered[row] = len(shared)
        self.acquired[row] = acquired
        return shared

    def reserve(self, rows: np.ndarray, lengths: np.ndarray, updates: StateUpdates) -> bool:
        """Reserve positions for rows that grow.

        Args:
            rows: int `[n]`.
            lengths: int `[n]`, positions that each row may come to hold.
            updates: where evicted pages are released.

        Returns:
            Whether the pool has room; otherwise nothing changes.
        """
        needed = np.maximum(-(-lengths // self.page_size), self.reserved[rows])
        new = int((needed - self.reserved[rows]).sum())
        if new > 0:
            if new > self._num_available:
                return False
            self._evict(new, updates)
            self.reserved[rows] = needed
        return True

    def cache_prefix(
        self, row: int, hashes: Sequence[PageHash], table: np.ndarray, updates: StateUpdates
    ) -> None:
        """Offer the first pages of a row to the prefix cache.

        Args:
            row: the row that holds them.
            hashes: the hashes of its first full pages, at least as many as in the call before.
            table: int `[pages per row]`, its page table.
            updates: where the pages that the cache keeps are retained.
        """
        if self.prefix_cache is None:
            return
        for index in range(int(self.offered[row]), len(hashes)):
            page = int(table[index])
            if self.prefix_cache.insert(hashes[index], page):
                updates.retained_pages.append(page)
                self.acquired[row].append(hashes[index])
                self.cached[row] += 1
        self.offered[row] = len(hashes)

    def reset_prefix_cache(self, updates: StateUpdates) -> PrefixCacheReset:
        """Evict every cached page that no row uses; `updates` is where they are released."""
        if self.prefix_cache is None:
            return PrefixCacheReset(0, 0)
        released = self.prefix_cache.evict(len(self.prefix_cache))
        updates.released_pages += released
        return PrefixCacheReset(len(released), len(self.prefix_cache))

    def shrink(self, row: int, pages: int) -> None:
        """Record that a row, which shares no page, holds only that number of pages after compression."""
        self.reserved[row] = pages

    def trim(self, row: int, length: int) -> None:
        """Record that a row has given back its pages past the first `length` positions."""
        self.reserved[row] = min(self.reserved[row], -(-length // self.page_size))

    def free(self, row: int) -> None:
        """Return the pages of a row whose sequence leaves; the caller frees the row on the device."""
        if self.prefix_cache is not None:
            self.prefix_cache.release(self.acquired[row])
        self.reserved[row] = self.cached[row] = self.offered[row] = 0
        self.acquired[row] = []
