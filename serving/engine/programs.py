"""The compiled programs over the board: for a few shapes, ahead where it matters; every later one counts."""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax.attention.page_selection import PagePolicy
from entropic_jax.control.entropy_drop import AR1
from entropic_jax.methods.entropix_branches import Plan
from entropic_jax.methods.method import Method
from entropic_jax.methods.policies import CompressionPolicy
from entropic_jax.sampling.constraints import Constraints

from .device_state import (
    DecodeOutput,
    DeviceState,
    PrefillChunk,
    PrefillOutput,
    UpdateBatch,
    apply_updates,
    compress,
    decode,
    park,
    prefill,
    unpark,
)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes that programs are compiled for."""

    widths: tuple[int, ...]  # rows of a step, ascending
    chunks: tuple[tuple[int, int], ...]  # (prompts, positions of each), by what they hold
    capacity: int  # most steps of a launch
    page_policies: tuple[PagePolicy | None, ...]
    samplers: tuple[bool, ...] = (False,)  # whether rows are drawn by the engine's sampler
    method: Method | None = None  # of reading prompts and keeping what was read
    plan: Plan | None = None  # of the branches that the sampler's sequences may have
    exact: bool = False  # a step computes the same rows whether any branch or none

    @property
    def segment(self) -> int | None:
        """Positions of a piece of a prompt, if it must have so many unless it is the last."""
        return None if self.method is None or self.method.prefill is None else self.method.segment

    @property
    def branches(self) -> int:
        """Rows of the state that a sequence has."""
        return 1 if self.plan is None else self.plan.branches

    @property
    def compression(self) -> CompressionPolicy | None:
        """What the rows keep of their prompts."""
        return None if self.method is None else self.method.compression


class Programs:
    """The compiled programs, by shape."""

    def __init__(
        self, decoder: Any, params: Any, device_state: DeviceState, prior: AR1, shapes: Shapes
    ) -> None:
        self.decoder, self.params, self.shapes, self.prior = decoder, params, shapes, prior
        rows = device_state.state.status.shape[0]
        # One row that holds nothing, to clear others with. Copied: the board will be consumed.
        nothing: Any = None
        self.blank = jax.tree.map(
            lambda x: jnp.copy(x[:1]) if x.ndim and x.shape[0] == rows else jnp.copy(x),
            device_state.state._replace(cache=nothing),
        )
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self.compilations = 0
        self.compile_seconds = 0.0

    def apply(self, device_state: DeviceState, batch: UpdateBatch) -> DeviceState:
        """`apply_updates`."""
        run = self._program(("apply", batch.prompt is not None), self.blank, device_state, batch)
        return run(self.blank, device_state, batch)

    def prefill(
        self, device_state: DeviceState, chunk: PrefillChunk, scored: bool
    ) -> tuple[DeviceState, PrefillOutput]:
        """`prefill`."""
        key = ("prefill", *chunk.tokens.shape, scored)
        return self._program(key, self.params, device_state, chunk)(self.params, device_state, chunk)

    def compress(self, device_state: DeviceState, row: int) -> tuple[DeviceState, jax.Array]:
        """`compress`."""
        return self._program(("compress",), device_state, np.int32(row))(device_state, np.int32(row))

    def decode(
        self,
        device_state: DeviceState,
        steps: int,
        constraints: Constraints,
        forced: Any,
        kind: tuple[int, PagePolicy | None, bool],
    ) -> tuple[DeviceState, DecodeOutput]:
        """`decode`, of a kind: width, selection, and whether some rows are drawn by the sampler."""
        given = (self.params, device_state, np.int32(steps), constraints, forced, self.prior)
        return self._program(("decode", *kind), *given)(*given)

    def park(self, device_state: DeviceState, row: int) -> dict[str, Any]:
        """`park`."""
        return self._program(("park",), device_state, np.int32(row))(device_state, np.int32(row))

    def unpark(self, device_state: DeviceState, row: int, parked: dict[str, Any]) -> DeviceState:
        """`unpark`."""
        return self._program(("unpark",), device_state, np.int32(row), parked)(
            device_state, np.int32(row), parked
        )

    def _program(self, key: tuple, *given: Any) -> Callable[..., Any]:
        return self._compiled.get(key) or self._compile(key, given)

    def _compile(self, key: tuple, given: tuple) -> Callable[..., Any]:
        begun = time.perf_counter()
        program, donated = {
            "apply": lambda: (apply_updates, 1),
            "park": lambda: (park, ()),
            "unpark": lambda: (unpark, 0),
            "compress": lambda: (partial(compress, method=self.shapes.method), 0),
            "prefill": lambda: (
                partial(prefill, self.decoder, scored=key[-1], method=self.shapes.method),
                1,
            ),
            "decode": lambda: (
                partial(
                    decode,
                    self.decoder,
                    width=key[1],
                    page_policy=key[2],
                    samples=key[3],
                    plan=self.shapes.plan,
                    exact=self.shapes.exact,
                ),
                1,
            ),
        }[key[0]]()
        compiled = jax.jit(program, donate_argnums=donated).lower(*given).compile()
        with self._lock:
            self._compiled[key] = compiled
            self.compilations += 1
            self.compile_seconds += time.perf_counter() - begun
        return compiled

    def compile_ahead(
        self, examples: list[tuple], workers: int, progress: Callable[[int, int], None]
    ) -> None:
        """Compile programs of `(key, arguments)` in parallel; `progress(done, all)` after each."""
        examples = [example for example in examples if example[0] not in self._compiled]
        with ThreadPoolExecutor(workers) as pool:
            done = pool.map(lambda example: self._compile(*example), examples)
            for number, _ in enumerate(done, 1):
                progress(number, len(examples))
