"""Prefix cache: full pages kept after use, looked up by a hash chain over the tokens up to their end.

Equal hashes are equal prefixes. The host holds one reference to every page in the cache; rows that share a
page hold their own. Pages that no row uses are evicted when the pool runs short, least recently used first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

PageHash = bytes
ROOT_HASH: PageHash = b""


def root_hash(context_key: Sequence[int], adapter: int = 0, salt: str = "") -> PageHash:
    """The hash before the first page of a text; texts share pages only if all of this is equal.

    Args:
        context_key: see `Decoder.context_key`.
        adapter: id of the LoRA adapter that writes the keys and values, 0 for none.
        salt: a text that only those know who may share the pages.
    """
    numbers = np.asarray((adapter, *context_key), np.int64).tobytes()
    return (
        ROOT_HASH + numbers + hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    )


def page_hashes(parent: PageHash, tokens: Sequence[int], page_size: int) -> Iterator[PageHash]:
    """Yield the hash of every full page of a text.

    Args:
        parent: hash of the page before; `root_hash` at the beginning of a text.
        tokens: what follows it; a last page that is not full has no hash.
        page_size: positions of a page.
    """
    length = len(tokens) // page_size * page_size
    for page in np.asarray(tokens[:length], np.int32).reshape(-1, page_size):
        parent = hashlib.blake2b(parent + page.tobytes(), digest_size=16).digest()
        yield parent


class PrefixCache:
    """Pages by the hash of the text they end. The caller keeps their reference counts on the device."""

    def __init__(self) -> None:
        self._pages: dict[PageHash, int] = {}
        self._users: dict[PageHash, int] = {}
        self._evictable: OrderedDict[PageHash, None] = OrderedDict()  # without a user, least recent first
        self.queries = self.hits = 0  # tokens looked up, and tokens found

    def __len__(self) -> int:
        """How many pages are cached."""
        return len(self._pages)

    @property
    def num_evictable(self) -> int:
        """How many cached pages no row uses."""
        return len(self._evictable)

    def pages(self) -> list[int]:
        """The numbers of the cached pages."""
        return list(self._pages.values())

    def __contains__(self, page_hash: PageHash) -> bool:
        return page_hash in self._pages

    def match(self, hashes: Iterable[PageHash]) -> list[int]:
        """The pages of the longest cached prefix of `hashes`."""
        pages = []
        for page_hash in hashes:
            if page_hash not in self._pages:
                break
            pages.append(self._pages[page_hash])
        return pages

    def acquire(self, hashes: Iterable[PageHash]) -> None:
        """Count a row as a user of these pages."""
        for page_hash in hashes:
            self._users[page_hash] += 1
            self._evictable.pop(page_hash, None)

    def insert(self, page_hash: PageHash, page: int) -> bool:
        """Cache a page of a row, and count the row as its user. False if the text is cached already."""
        if page_hash in self._pages:
            return False
        self._pages[page_hash], self._users[page_hash] = page, 1
        return True

    def release(self, hashes: Sequence[PageHash]) -> None:
        """Stop counting a row as a user. The later pages of a text become evictable first."""
        for page_hash in reversed(hashes):
            self._users[page_hash] -= 1
            if self._users[page_hash] == 0:
                self._evictable[page_hash] = None

    def evict(self, count: int) -> list[int]:
        """Evict up to `count` pages without a user; returns them, for the caller to release on the device."""
        pages = []
        while self._evictable and len(pages) < count:
            page_hash, _ = self._evictable.popitem(last=False)
            pages.append(self._pages.pop(page_hash))
            del self._users[page_hash]
        return pages
