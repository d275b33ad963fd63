"""LoRA adapters of `LLM`: what a call names, and which are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropic_jax.parameter_tables.table import short

from ..engine.interface import Engine
from ..engine.options import EngineOptions

EXPECTED = "lora_request must be a LoRARequest, a list with one or None for each prompt, or None"


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for some prompts, as in vLLM. Equal ids stand for the same adapter.

    Args:
        lora_name: its name.
        lora_int_id: its id, at least 1.
        lora_path: a directory in PEFT's format.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, value, kinds in (
            ("lora_name", self.lora_name, str),
            ("lora_path", self.lora_path, str | Path),
        ):
            if not isinstance(value, kinds) or not str(value):
                accepted = "a string that is not empty" + " or a Path" * (name == "lora_path")
                raise ValueError(f"{name} must be {accepted}; got {short(value)}")
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"lora_int_id must be an integer of at least 1; got {short(number)}")

    @property
    def name(self) -> str:
        """Its name in the engine."""
        return f"{self.lora_name}#{self.lora_int_id}"


class RequestedAdapters:
    """Adapters loaded for the requests of an `LLM`; the least recently used make room for others."""

    def __init__(self, engine: Engine, options: EngineOptions) -> None:
        """No adapter; `engine` loads them, as its options allow."""
        self.engine, self.options = engine, options
        self._loaded: dict[int, LoRARequest] = {}  # by id, the least recently used first

    def names(self, requests: Any, count: int) -> list[str | None]:
        """The adapter of each prompt, loaded.

        Args:
            requests: one for all prompts, or one or None for each.
            count: number of prompts.

        Raises:
            TypeError: It is something else.
            ValueError: An adapter cannot be loaded, an id stands for another, or there are too many.
        """
        if requests is None or isinstance(requests, LoRARequest):
            requests = [requests] * count
        if not isinstance(requests, Sequence) or not all(isinstance(r, LoRARequest | None) for r in requests):
            raise TypeError(f"{EXPECTED}; got {short(requests)}")
        if len(requests) != count:
            raise ValueError(f"{EXPECTED}: {count} of them; got {len(requests)}")
        distinct = {request.lora_int_id: request for request in requests if request is not None}
        for request in requests:
            if request is not None and distinct[request.lora_int_id] != request:
                raise ValueError(f"lora_int_id must stand for one adapter; got {request.lora_int_id} for two")
        self._load(distinct)
        return [None if request is None else request.name for request in requests]

    def _load(self, requested: dict[int, LoRARequest]) -> None:
        slots = self.options.lora_slots
        if requested and not self.options.enable_lora:
            raise ValueError("lora_request must be None unless enable_lora is on")
        if len(requested) > slots:
            raise ValueError(
                f"lora_request must name at most {slots} adapters (max_loras); got {len(requested)}"
            )
        for number, request in requested.items():
            if (known := self._loaded.get(number)) is not None and known != request:
                raise ValueError(
                    f"lora_int_id {number} must stand for {known.name}; got {request.lora_name!r}"
                )
        for number, request in requested.items():
            if self._loaded.pop(number, None) is None:
                unused = [n for n in self._loaded if n not in requested]
                if len(self.engine.adapter_paths()) >= slots and unused:
                    self.engine.unload_adapter(self._loaded.pop(unused[0]).name)
                self.engine.load_adapter(request.name, str(request.lora_path))
            self._loaded[number] = request
