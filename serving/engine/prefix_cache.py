"""Which full pages hold which beginnings of texts: a hash chain over pages, with their users counted.

A page's key stands for all tokens up to its end, so equal keys are equal prefixes. The host holds one
reference to every page in here; rows that share it hold their own. Pages that no row uses wait in the order
of their last use, and are given up from the oldest on when the pool runs short.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

PageHash = bytes
ROOT_HASH: PageHash = b""


def page_hashes(parent: PageHash, tokens: Sequence[int], page_size: int) -> Iterator[PageHash]:
    """The keys of the full pages that `tokens` fill, after those that `parent` stands for."""
    whole = len(tokens) // page_size * page_size
    for page in np.asarray(tokens[:whole], np.int32).reshape(-1, page_size):
        parent = hashlib.blake2b(parent + page.tobytes(), digest_size=16).digest()
        yield parent


class PrefixCache:
    """Pages by the text they end; the caller sees to their references on the device."""

    def __init__(self) -> None:
        self._pages: dict[PageHash, int] = {}
        self._users: dict[PageHash, int] = {}
        self._evictable: OrderedDict[PageHash, None] = (
            OrderedDict()
        )  # without a user, the longest unused first
        self.queries = self.hits = 0  # tokens asked for, and found

    def __len__(self) -> int:
        """How many pages are held."""
        return len(self._pages)

    @property
    def num_evictable(self) -> int:
        """How many of them no row uses."""
        return len(self._evictable)

    def pages(self) -> list[int]:
        """The numbers of the pages held."""
        return list(self._pages.values())

    def __contains__(self, key: PageHash) -> bool:
        return key in self._pages

    def match(self, keys: Iterable[PageHash]) -> list[int]:
        """The pages of the longest beginning of `keys` that is known."""
        found = []
        for key in keys:
            if key not in self._pages:
                break
            found.append(self._pages[key])
        return found

    def acquire(self, keys: Iterable[PageHash]) -> None:
        """A row shares these pages from now on."""
        for key in keys:
            self._users[key] += 1
            self._evictable.pop(key, None)

    def insert(self, key: PageHash, page: int) -> bool:
        """Keep a page that a row holds, which is thereby its user. False if the text is known already."""
        if key in self._pages:
            return False
        self._pages[key], self._users[key] = page, 1
        return True

    def release(self, keys: Sequence[PageHash]) -> None:
        """A row has ended that used these pages; the later ones of a text are given up before the earlier."""
        for key in reversed(keys):
            self._users[key] -= 1
            if self._users[key] == 0:
                self._evictable[key] = None

    def evict(self, count: int) -> list[int]:
        """Forget up to `count` pages without a user; returns them, to be dropped on the device."""
        given = []
        while self._evictable and len(given) < count:
            key, _ = self._evictable.popitem(last=False)
            given.append(self._pages.pop(key))
            del self._users[key]
        return given
