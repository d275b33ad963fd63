"""Compiled programs over the device state, one for each shape, and a count of late compilations."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from entropic_jax.control.entropy_drop import AR1
from entropic_jax.mesh import sharding
from entropic_jax.models.lora import Adapters, without_adapters
from entropic_jax.phases.prefill import PrefillChunk, PrefillOutput
from entropic_jax.speculation import (
    DraftLength,
    HeadedDecoder,
    PassCosts,
    Speculator,
)
from entropic_jax.speculation.pass_timing import measure_pass_costs
from entropic_jax.speculation.pruned import WINDOW
from entropic_jax.speculation.stored_costs import TimedModel, known_costs, read_costs, write_costs
from entropic_jax.state.cache import Cache
from entropic_jax.state.constraints import Constraints

from ..executable_cache import is_stored, load_or_compile
from ..memory import page_bytes
from . import allocator
from .broadcast import Broadcaster
from .device_state import DecodeOutput, DeviceState, UpdateBatch, compress, decode, prefill
from .divided_programs import apply_divided, first_row, restore_divided, save_everywhere
from .program_compiler import ProgramCompiler
from .program_memory import ProgramMemory
from .program_shapes import DecodeProgram, Shapes
from .timed_sizes import timed_sizes

logger = logging.getLogger(__name__)
T = TypeVar("T")
SHORTEST_TIMED = 512  # positions of the context below which reading the cache is too quick to be timed
TIMING = threading.Lock()  # engines of one process time their passes one after the other


class Programs:
    """The compiled programs by shape; one that is not compiled yet is compiled when it is needed."""

    def __init__(
        self,
        decoder: Any,
        params: Any,
        device_state: DeviceState,
        prior: AR1,
        shapes: Shapes,
        broadcaster: Broadcaster | None = None,
        costs: PassCosts | None = None,
    ) -> None:
        """Start without a compiled program.

        Args:
            decoder: the model's pure functions.
            params: its parameters.
            device_state: a device state of the shapes to come, without a sequence.
            prior: model of H₁ along a sequence.
            shapes: what the programs are compiled for.
            broadcaster: to the other processes of the mesh, in process 0 of several.
            costs: the costs of passes as process 0 knows them, in the other processes.
        """
        self.broadcaster = broadcaster
        self.decoder, self.params, self.shapes, self.prior = decoder, params, shapes, prior
        self._alone = without_adapters(decoder, params)  # passes are timed without adapters
        no_cache: Any = None
        state = device_state.state._replace(cache=no_cache)
        self.blank = load_or_compile(first_row, (state,))[0](state)  # to clear other rows with
        self._speculators: dict[int, Speculator | None] = dict.fromkeys(shapes.widths)
        self.known_costs: PassCosts | None = None
        if shapes.speculates:
            self._use_costs(costs or known_costs(self._timed_model(device_state.state.cache)))
        self._compiled: dict[Any, Callable[..., Any]] = {}
        enabled = jax.default_backend() == "cpu" and broadcaster is None
        self.memory = ProgramMemory(shapes.widths, enabled)
        self._lock = threading.Lock()
        self.compilations = 0
        self.compile_seconds = 0.0
        self.compiler: ProgramCompiler | None = None  # None: a program is compiled when it first runs
        self.launches = 0

    def replace_adapters(self, adapters: Adapters) -> None:
        """Use other LoRA adapters from the next launch on."""
        self.params = self.params._replace(adapters=adapters)

    def measure_pass_costs(self, cache: Cache) -> None:
        """Time passes on this machine, unless that was done before, so that drafts are as long as they pay.

        What was measured while requests ran is used, but not stored. Where a mesh spans processes, nothing
        is timed.

        Args:
            cache: the cache of the engine: the passes run on pages of the same kind.
        """
        context = cache.table.shape[1] * cache.page_size
        if not self.shapes.speculates or context < SHORTEST_TIMED or self.broadcaster is not None:
            return
        with TIMING:
            self._measure_pass_costs(cache, context, self._timed_model(cache))

    def _measure_pass_costs(self, cache: Cache, context: int, model: TimedModel) -> None:
        """See `measure_pass_costs`.

        Args:
            cache: the cache of the engine.
            context: positions that a row of it has.
            model: under which the costs are stored.
        """
        most_tokens = max(max(law.widths) * rows for rows, law in self._laws())
        position_bytes = page_bytes(self._alone[0].shape, 1, cache.bytes_per_number)
        sizes = timed_sizes(max(self.shapes.widths), most_tokens, context, position_bytes)
        if (known := read_costs(model)) is not None and known.covers(most_tokens, sizes.batch):
            if known != self.known_costs:  # another engine of this process has timed them meanwhile
                self._use_costs(known)
            return
        launches, begin = self.launches, time.monotonic()
        logger.info("timing forward passes, by which the lengths of drafts are chosen")
        costs = measure_pass_costs(
            *self._alone,
            **sizes._asdict(),
            page_size=cache.page_size,
            dtype=jnp.dtype(cache.layers[0].keys.dtype).name,
            pages=WINDOW,
        )
        logger.info("forward passes timed", extra={"seconds": round(time.monotonic() - begin, 1)})
        if not costs.valid():
            logger.info("pass costs are not used: other work on the machine has hidden what passes cost")
            return
        if self.launches == launches:
            write_costs(costs, model)
        else:  # which makes passes look slow
            logger.info(
                "pass costs are not stored, since requests ran meanwhile: a later start times passes again"
            )
        self._use_costs(costs)

    def _timed_model(self, cache: Cache) -> TimedModel:
        return TimedModel(*self._alone, cache.page_size, cache.layers[0].keys.dtype)

    def _use_costs(self, costs: PassCosts) -> None:
        self.known_costs = costs
        headed = isinstance(self._alone[0], HeadedDecoder)
        self._speculators = {rows: self.shapes.speculator(rows, costs, headed) for rows in self.shapes.widths}

    def _laws(self) -> list[tuple[int, DraftLength]]:
        """The draft-length law for each number of rows."""
        return [(rows, speculator.law) for rows, speculator in self._speculators.items() if speculator]

    def apply(self, device_state: DeviceState, batch: UpdateBatch) -> DeviceState:
        """Run `apply_updates`."""
        return self._run(("apply", batch.prompt_history is not None), self.blank, device_state, batch)

    def prefill(
        self, device_state: DeviceState, chunk: PrefillChunk, scored: bool
    ) -> tuple[DeviceState, PrefillOutput]:
        """Run `prefill`.

        Args:
            device_state: consumed.
            chunk: tokens, and the branch groups they belong to.
            scored: whether to compute the log-probability of the token that follows each position.
        """
        self.launches += 1
        key = ("prefill", *chunk.tokens.shape, scored)
        return self._watched(key, self._run(key, self.params, device_state, chunk))

    def compress(self, device_state: DeviceState, row: int) -> tuple[DeviceState, jax.Array]:
        """Run `compress`."""
        return self._run(("compress",), device_state, np.int32(row))

    def decode(
        self,
        device_state: DeviceState,
        steps: int,
        constraints: Constraints,
        forced: Any,
        held: Any,
        program: DecodeProgram,
    ) -> tuple[DeviceState, DecodeOutput]:
        """Run `decode`.

        Args:
            device_state: consumed.
            steps: the most steps.
            constraints: the constraints of the rows.
            forced: int32 `[capacity, rows]`, tokens that rows replay; −1 elsewhere.
            held: bool `[rows]`, those that take no part.
            program: its static arguments.
        """
        self.launches += 1
        for missed in self.memory.launched(("decode", *program), time.monotonic()):
            self.require(missed)
        arguments = self.decode_arguments(device_state, steps, constraints, forced, held, program)
        return self._watched(("decode", *program), self._run(("decode", *program), *arguments))

    def decode_arguments(
        self,
        device_state: DeviceState,
        steps: int,
        constraints: Constraints,
        forced: Any,
        held: Any,
        program: DecodeProgram,
    ) -> tuple:
        """The arguments of a decode program, those that are not static.

        Args:
            device_state: consumed.
            steps: the most steps.
            constraints: the constraints of the rows.
            forced: int32 `[capacity, rows]`, tokens that rows replay; −1 elsewhere.
            held: bool `[rows]`, those that take no part.
            program: its static arguments.
        """
        speculator = self._speculators[program.width] if program.speculates else None
        return self.params, device_state, np.int32(steps), constraints, forced, held, self.prior, speculator

    def save_row(self, device_state: DeviceState, row: int) -> dict[str, Any]:
        """Run `save_row`."""
        saved = self._run(("save",), device_state, np.int32(row))
        return saved if self._mesh is None else jax.device_get(saved)

    def restore_row(self, device_state: DeviceState, row: int, saved: dict[str, Any]) -> DeviceState:
        """Run `restore_row`.

        Args:
            device_state: consumed.
            row: the branch group.
            saved: from `save_row`.
        """
        return self._run(("restore",), device_state, np.int32(row), saved)

    def is_compiled(self, key: tuple) -> bool:
        """Whether nothing has to be compiled to run a program, which may have to be loaded."""
        return key in self._compiled or self.memory.is_out(key)

    def available(self, key: tuple) -> bool:
        """Whether to choose a program: it can run at once, or it is compiled when it first runs."""
        return self.compiler is None or key in self._compiled

    def require(self, key: tuple) -> bool:
        """Whether a program is `available`; if not, it is loaded or compiled next."""
        if self.available(key) or self.compiler is None:
            return True
        if self.memory.require(key):
            self.compiler.forget(key)
        return not self.compiler.prefer(key)

    def drop_unused(self) -> float | None:
        """Free a program that has not run for long; returns the seconds until the next is due, if any."""
        unused, seconds = self.memory.drop(time.monotonic())
        if unused is not None:
            with self._lock:
                del self._compiled[unused]
            allocator.trim()
        return seconds

    def _run(self, key: tuple, *arguments: Any) -> Any:
        """Run a program, here and in the other processes of the mesh."""
        program = self._program(key, *arguments)
        if self.broadcaster is not None:
            self.broadcaster.launch(key, arguments)
        return program(*arguments)

    def _watched(self, key: tuple, result: tuple[DeviceState, T]) -> tuple[DeviceState, T]:
        if self.broadcaster is not None:
            self.broadcaster.watch(key, result[1])
        return result

    @property
    def _mesh(self) -> Mesh | None:
        return getattr(self.decoder, "mesh", None)

    def _program(self, key: tuple, *arguments: Any) -> Callable[..., Any]:
        if self.compiler is not None and not self.require(key):
            self.compiler.wait_for(key)
        if key not in self._compiled:
            self.compile(key, arguments)
        return self._compiled[key]

    def compile(self, key: tuple, arguments: tuple) -> None:
        """Compile a program, or load it from the cache, and keep it unless it may be left in the cache."""
        start_time = time.perf_counter()
        program, donated = self._function(key)
        optional = self.compiler is not None and self.memory.is_optional(key)
        if optional and is_stored(program, arguments, donated) and self.memory.leave_out(key):
            return
        if self.broadcaster is not None:
            self.broadcaster.begin_compilation(key)
        compiled, is_new = load_or_compile(program, arguments, donated)
        if self.broadcaster is not None:
            self.broadcaster.await_compilation(key)
        stored = optional and (not is_new or is_stored(program, arguments, donated))
        with self._lock:
            if not (stored and self.memory.leave_out(key)):
                self._compiled[key] = compiled
                self.memory.enter(key, stored, time.monotonic())
            self.compilations += is_new
            self.compile_seconds += time.perf_counter() - start_time
        if stored or is_new:  # the compiler has freed what it took, in the C library's pools
            allocator.trim()

    def compiled(self, key: tuple) -> Callable[..., Any]:
        """A program that has been compiled."""
        return self._compiled[key]

    def _function(self, key: tuple) -> tuple[Callable[..., Any], int | tuple[int, ...]]:
        """The function behind a key, with its static arguments, and the argument that it consumes."""
        mesh = self._mesh
        match key:
            case ("apply", _):
                return partial(apply_divided, mesh), 1
            case ("save",):
                return partial(save_everywhere, mesh), ()
            case ("restore",):
                return partial(restore_divided, mesh), 0
            case ("compress",):
                return partial(compress, method=self.shapes.method), 0
            case ("prefill", _, _, scored):
                return self._launch(
                    partial(prefill, self.decoder, scored=scored, method=self.shapes.method)
                ), 1
            case ("decode", width, page_policy, samples, _):
                static = dict(width=width, page_policy=page_policy, samples=samples)
                shared = dict(plan=self.shapes.plan, exact=self.shapes.exact)
                return self._launch(partial(decode, self.decoder, **static, **shared)), 1
        raise ValueError(f"key must name a program; got {key!r}")

    def _launch(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """A program of the parameters and the device state, on the mesh if the model has one."""
        return partial(sharding.launch, self.decoder, program)
