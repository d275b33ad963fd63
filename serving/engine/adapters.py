"""LoRA adapters of an engine: which are loaded, in which slot, and how many requests use each.

An adapter that is unloaded loses its name at once. Requests that have it, waiting or running, finish with it,
and its slot is free once the last of them has ended. The id of an adapter is never used again, so cached
prefixes of one that had its slot, or its name, are not mistaken for its own.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from entropic_jax.models.config import Config
from entropic_jax.models.lora import Adapters, Factors, capacity, install, zero_factors
from entropic_jax.models.lora_files import read_adapter

from ..executable_cache import load_or_compile
from ..options.adapted_model import ModelWithAdapters
from ..options.lora import check_name
from ..request import RequestError

NAME, PATH = "lora_name", "lora_path"


class LoadedAdapter(NamedTuple):
    """An adapter in its slot."""

    name: str
    path: str
    number: int  # on the device, 0 for none; the slot is one less
    id: int  # of no other adapter, 0 for none


NO_ADAPTER = LoadedAdapter("", "", 0, 0)


def factors_of(path: str, config: Config, largest_rank: int) -> dict[str, Factors]:
    """The factors of an adapter on disk.

    Args:
        path: a directory in PEFT's format.
        config: the model's configuration.
        largest_rank: the rank of the slots.

    Raises:
        RequestError: The directory cannot be used with the model.
    """
    try:
        return read_adapter(Path(path), config, largest_rank)
    except (ValueError, OSError) as error:
        raise RequestError(f"{PATH} must be an adapter that can be served: {error}", PATH) from error


class AdapterSlots:
    """The adapters of an engine. Methods may be called from any thread unless they say otherwise."""

    def __init__(self, model: ModelWithAdapters) -> None:
        """Slots without an adapter.

        Args:
            model: whose parameters hold the slots.
        """
        params: Any = model.params
        self._config, self._adapters = model.config, params.adapters
        self.slots, self.largest_rank = capacity(self._adapters)
        self._lock = threading.Lock()
        self._by_name: dict[str, LoadedAdapter] = {}
        self._taken: dict[int, LoadedAdapter] = {}  # by number; also in use after unloading
        self._loading: set[str] = set()  # names
        self._users: Counter[int] = Counter()  # requests, by number
        self._ids = 0
        empty = zero_factors(self._config, self.largest_rank)
        # Compiled now, so that loading an adapter while requests run compiles nothing.
        self._install = load_or_compile(
            partial(install, config=self._config), (self._adapters, np.int32(0), empty), 0
        )[0]

    def names(self) -> Mapping[str, str]:
        """The path of every adapter that requests may name."""
        with self._lock:
            return {name: adapter.path for name, adapter in self._by_name.items()}

    def acquire(self, name: str | None) -> LoadedAdapter:
        """The adapter of a new request, to be released when it ends. RequestError if there is none."""
        if name is None:
            return NO_ADAPTER
        with self._lock:
            if name not in self._by_name:
                raise RequestError(f"model must name a loaded adapter; got {name[:200]!r}", "model")
            adapter = self._by_name[name]
            self._users[adapter.number] += 1
            return adapter

    def release(self, adapter: LoadedAdapter) -> None:
        """Count a request that has ended."""
        if adapter.number:
            with self._lock:
                self._users[adapter.number] -= 1
                self._free_unused(adapter)

    def load(
        self,
        name: str,
        path: str,
        in_engine: Callable[[Callable[[], None]], "Future[None]"],
        replace: Callable[[Adapters], None],
    ) -> None:
        """Read an adapter from disk and put it into a free slot; blocks until requests may name it.

        Args:
            name: the name that requests state.
            path: a directory in PEFT's format.
            in_engine: calls a function in the engine's thread.
            replace: gives the programs new adapters; called in the engine's thread.

        Raises:
            RequestError: The name is taken, no slot is free, or the directory cannot be used.
        """
        adapter = self._reserve(name, path)
        try:
            factors = factors_of(path, self._config, self.largest_rank)

            def put() -> None:
                self._adapters = self._install(self._adapters, np.int32(adapter.number - 1), factors)
                replace(self._adapters)

            in_engine(put).result()
        except BaseException:
            with self._lock:
                del self._taken[adapter.number]
                self._loading.discard(name)
            raise
        with self._lock:
            self._by_name[name] = adapter
            self._loading.discard(name)

    def unload(self, name: str) -> None:
        """Refuse further requests for an adapter; RequestError if there is none of this name."""
        with self._lock:
            if name not in self._by_name:
                raise RequestError(f"{NAME} must be a loaded adapter; got {name[:200]!r}", NAME)
            self._free_unused(self._by_name.pop(name))

    def describe(self) -> dict[str, Any]:
        """Names, slots and users, as JSON can hold them."""
        with self._lock:
            users = {name: self._users[adapter.number] for name, adapter in self._by_name.items()}
            return {
                "loaded": users,
                "slots": self.slots,
                "slots_free": self.slots - len(self._taken),
                "max_lora_rank": self.largest_rank,
            }

    def _reserve(self, name: str, path: str) -> LoadedAdapter:
        check_name(name, NAME)
        with self._lock:
            if name in self._by_name or name in self._loading:
                raise RequestError(f"{NAME} must not be a loaded adapter; got {name!r}", NAME)
            number = next((n for n in range(1, self.slots + 1) if n not in self._taken), None)
            if number is None:
                raise RequestError(
                    f"{NAME} must be loaded into a free slot; all {self.slots} (max_loras) are in use; "
                    f"got {name!r}",
                    NAME,
                )
            self._ids += 1
            self._loading.add(name)
            self._taken[number] = LoadedAdapter(name, str(path), number, self._ids)
            return self._taken[number]

    def _free_unused(self, adapter: LoadedAdapter) -> None:
        """Free the slot of an adapter that no request has and none may name."""
        if not self._users[adapter.number] and self._by_name.get(adapter.name) != adapter:
            del self._users[adapter.number]
            if self._taken.get(adapter.number) == adapter:
                del self._taken[adapter.number]
