"""Rate limit of requests, for each API key: a bucket of tokens that fills at a steady rate."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

MOST = 16384  # buckets that are kept; a full one need not be


class RateLimit(NamedTuple):
    """At most `requests` at once, and as many again in each `seconds`."""

    requests: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.requests} in {self.seconds:g} s"


class RateLimiter:
    """A bucket for each client. One that has no request left waits until the bucket has filled by one."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        """Full buckets.

        Args:
            limit: the limit of every client.
            clock: returns seconds.
        """
        self.limit, self.clock = limit, clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # requests left, and when

    def __len__(self) -> int:
        return len(self._buckets)

    def admit(self, client: Hashable) -> float:
        """Count a request of a client: 0 if it is admitted, else the seconds until the next one would be."""
        current, rate = self.clock(), self.limit.requests / self.limit.seconds
        left, since = self._buckets.pop(client, (float(self.limit.requests), current))
        left = min(float(self.limit.requests), left + (current - since) * rate)
        admitted = left >= 1
        self._buckets[client] = (left - admitted, current)
        self._forget_full(current)
        return 0.0 if admitted else (1 - left) / rate

    def _forget_full(self, current: float) -> None:
        """Drop the buckets that have filled since their last request, and the oldest of too many."""
        while self._buckets:
            client, (_, since) = next(iter(self._buckets.items()))
            if current - since < self.limit.seconds and len(self._buckets) <= MOST:
                return
            del self._buckets[client]
