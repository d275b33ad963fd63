"""Routing of requests to data-parallel engines: by the cached prefix of the prompt, and by load.

A rank, one of the engines, holds a prefix if its prefix cache does, or if it was the last to be sent a prompt
with it: requests that come together share a prefix before any of them has been prefilled. Prefixes count only
among ranks whose load is within a bound of the least loaded, so a prefix that everybody sends fills one rank
no further than that before others compute it, too.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

from .prefix_cache import PageHash


class Router:
    """Orders the ranks for each request.

    Args:
        ranks: number of engines.
        bound: requests that a rank may have more than the least loaded and still be chosen for its prefix.
        capacity: pages whose last rank is remembered.
        is_cached: `is_cached(rank, page_hash)`: whether the prefix cache of a rank holds a page.
    """

    def __init__(
        self, ranks: int, bound: int, capacity: int, is_cached: Callable[[int, PageHash], bool]
    ) -> None:
        self.ranks, self.bound, self.capacity, self.is_cached = ranks, bound, capacity, is_cached
        self._sent: OrderedDict[PageHash, int] = OrderedDict()
        self._next = 0  # equal ranks are chosen in turn

    def order(
        self,
        hashes: Sequence[PageHash],
        loads: Sequence[int] | Mapping[int, int],
        able: Collection[int],
    ) -> list[int]:
        """The ranks that may be given a request, the best first, then by load.

        Args:
            hashes: one for each full page of the prompt.
            loads: requests that each rank has accepted and not ended.
            able: the ranks that can be chosen.
        """
        place = lambda rank: (rank - self._next) % self.ranks
        by_load = sorted(able, key=lambda rank: (loads[rank], place(rank)))
        if not by_load:
            return []
        near = [rank for rank in by_load if loads[rank] <= loads[by_load[0]] + self.bound]
        best = max(near, key=lambda rank: (self.match(rank, hashes), -loads[rank], -place(rank)))
        return [best, *(rank for rank in by_load if rank != best)]

    def match(self, rank: int, hashes: Sequence[PageHash]) -> int:
        """Pages of a prompt's longest prefix that a rank holds, or will."""
        for number, page_hash in enumerate(hashes):
            if self._sent.get(page_hash) != rank and not self.is_cached(rank, page_hash):
                return number
        return len(hashes)

    def sent(self, rank: int, hashes: Sequence[PageHash]) -> None:
        """Remember which rank was given a prompt."""
        self._next = (rank + 1) % self.ranks
        for page_hash in hashes:
            self._sent[page_hash] = rank
            self._sent.move_to_end(page_hash)
        while len(self._sent) > self.capacity:
            self._sent.popitem(last=False)

    def forget(self) -> None:
        """Forget all prompts, as the prefix caches do."""
        self._sent.clear()
