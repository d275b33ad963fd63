"""Prefix-aware choice of a replica, bounded by load, for replicas that come and go."""

from collections.abc import Hashable, Sequence

from ..engine.prefix_cache import PageHash
from ..engine.routing import Router

CAPACITY = 2**16  # blocks whose last replica is remembered
RANKS = 2**31  # more than replicas are ever started; a rank is not used again


class PrefixRouting:
    """The rule of the data-parallel `Router`, with ranks given to replicas as they appear.

    Args:
        bound: requests that a replica may have more than the least loaded and still be chosen for a prefix.
    """

    def __init__(self, bound: int) -> None:
        self.router = Router(RANKS, bound, CAPACITY, lambda rank, page_hash: False)
        self.loads: dict[Hashable, int] = {}
        self._ranks: dict[Hashable, int] = {}

    def order(self, hashes: Sequence[PageHash], replicas: Sequence[Hashable]) -> list[Hashable]:
        """The replicas, the best for a prompt first.

        Args:
            hashes: the hashes of the blocks of the prompt.
            replicas: those that can be chosen.
        """
        by_rank = {self._ranks.setdefault(name, len(self._ranks)): name for name in replicas}
        loads = {rank: self.loads.get(name, 0) for rank, name in by_rank.items()}
        return [by_rank[rank] for rank in self.router.order(hashes, loads, list(by_rank))]

    def sent(self, hashes: Sequence[PageHash], replica: Hashable) -> None:
        """Note that a replica was given a request.

        Args:
            hashes: the hashes of the blocks of its prompt.
            replica: the replica that has the request until `ended`.
        """
        self.loads[replica] = self.loads.get(replica, 0) + 1
        self.router.sent(self._ranks.setdefault(replica, len(self._ranks)), hashes)

    def ended(self, replica: Hashable) -> None:
        """Note that a request of a replica has ended."""
        if replica in self.loads:
            self.loads[replica] = max(0, self.loads[replica] - 1)

    def died(self, replica: Hashable) -> None:
        """Forget the requests of a replica."""
        self.loads.pop(replica, None)
