"""Stored responses: a bounded store in memory, whose entries belong to an API key and expire."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pydantic_core


class StoredResponse(NamedTuple):
    """A response and the conversation up to its end."""

    owner: bytes | None  # digest of an API key; None on a server without keys
    answer: Mapping[str, Any]
    messages: Sequence[dict[str, Any]]  # in the form of chat, without instructions
    expires: float  # by the store's clock
    size: int  # bytes, as JSON
    items: Sequence[dict[str, Any]]  # of its own input, each with an id


class ResponseStore:
    """Responses by id, from the oldest to the newest; the oldest are dropped when there is no room."""

    def __init__(
        self, most: int, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """An empty store.

        Args:
            most: responses kept.
            max_bytes: size of all responses and conversations as JSON.
            seconds: life of a response.
            clock: returns seconds.
        """
        self.most, self.max_bytes, self.seconds, self.clock = most, max_bytes, seconds, clock
        self.size = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def put(
        self,
        owner: bytes | None,
        answer: Mapping[str, Any],
        messages: Sequence[dict[str, Any]],
        items: Sequence[dict[str, Any]] = (),
    ) -> bool:
        """Store a response, and return whether it fits.

        Args:
            owner: who may read it.
            answer: with its `id`.
            messages: the conversation up to its end.
            items: the input of the response, each item with an id.
        """
        size = len(pydantic_core.to_json([answer, messages, items]))
        if size > self.max_bytes:
            return False
        self._responses[answer["id"]] = StoredResponse(
            owner, answer, messages, self.clock() + self.seconds, size, items
        )
        self.size += size
        self._drop()
        return True

    def get(self, owner: bytes | None, name: str) -> StoredResponse | None:
        """The response with the id `name`; None if it is not there, has expired, or has another owner."""
        self._drop()
        stored = self._responses.get(name)
        return stored if stored is not None and stored.owner == owner else None

    def delete(self, owner: bytes | None, name: str) -> bool:
        """Forget a response, and return whether it was there."""
        if self.get(owner, name) is None:
            return False
        self.size -= self._responses.pop(name).size
        return True

    def _drop(self) -> None:
        """Forget what has expired, and the oldest while there is too much."""
        current = self.clock()
        while self._responses:
            oldest = next(iter(self._responses.values()))
            if oldest.expires > current and self.size <= self.max_bytes and len(self) <= self.most:
                return
            self.size -= self._responses.popitem(last=False)[1].size
