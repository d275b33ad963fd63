"""Compiled programs over the device state, one for each shape, and a count of late compilations."""

import dataclasses
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from entropic_jax.attention.page_selection import PagePolicy
from entropic_jax.control.entropy_drop import AR1
from entropic_jax.mesh import sharding
from entropic_jax.methods.entropix_branches import SearchPlan
from entropic_jax.methods.method import Method
from entropic_jax.methods.policies import CompressionPolicy
from entropic_jax.models.lora import Adapters, without_adapters
from entropic_jax.parameter_tables.speculation_names import DEFAULT_DRAFTED, OFF
from entropic_jax.phases.prefill import PrefillChunk, PrefillOutput
from entropic_jax.speculation import (
    DraftLength,
    HeadedDecoder,
    PassCosts,
    Speculator,
    drafts_tokens,
    make_speculator,
)
from entropic_jax.speculation.pass_timing import measure_pass_costs
from entropic_jax.speculation.pruned import WINDOW
from entropic_jax.speculation.stored_costs import TimedModel, known_costs, read_costs, write_costs
from entropic_jax.state.cache import Cache
from entropic_jax.state.constraints import Constraints

from ..executable_cache import load_or_compile
from ..memory import page_bytes
from .broadcast import Broadcaster
from .device_state import DecodeOutput, DeviceState, UpdateBatch, compress, decode, prefill
from .divided_programs import apply_divided, first_row, restore_divided, save_everywhere
from .program_compiler import ProgramCompiler
from .timed_sizes import timed_sizes

T = TypeVar("T")
SHORTEST_TIMED = 512  # positions of the context below which reading the cache is too quick to be timed
TIMING = threading.Lock()  # engines of one process time their passes one after the other


class DecodeProgram(NamedTuple):
    """Which decode program it is: its static arguments."""

    width: int  # rows that a step computes
    page_policy: PagePolicy | None  # which pages the steps read
    samples: bool  # whether the engine's sampler draws the tokens of some rows
    speculates: bool = False  # whether steps draft tokens and verify several at once


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes and static arguments that programs are compiled for."""

    widths: tuple[int, ...]  # batch buckets: rows of a decode step, ascending
    chunks: tuple[tuple[int, int], ...]  # prefill chunks: (prompts, tokens of each)
    capacity: int  # steps of a launch, at most
    page_policies: tuple[PagePolicy | None, ...]
    samplers: tuple[bool, ...] = (False,)  # whether the engine's sampler draws the tokens of some rows
    method: Method | None = None  # sparse prefill or KV compression
    plan: SearchPlan | None = None  # of the branches that sequences may have
    exact: bool = False  # a step computes the same rows whether any branches or none
    speculate: str = OFF  # name of the drafter
    num_speculative_tokens: int | None = None  # k, tokens drafted for a row in a step, at most

    @property
    def speculates(self) -> bool:
        """Whether there are programs that draft tokens."""
        return bool(self.drafting_widths)

    @property
    def drafting_widths(self) -> tuple[int, ...]:
        """The batch buckets that draft tokens: a larger batch is bound by arithmetic without any."""
        return tuple(rows for rows in self.widths if drafts_tokens(self.speculate, rows, self.drafted))

    @property
    def drafted(self) -> int:
        """k, tokens drafted for a row in a step, at most."""
        return DEFAULT_DRAFTED if self.num_speculative_tokens is None else self.num_speculative_tokens

    def tokens(self, speculates: bool) -> int:
        """Tokens that a row emits in a step, at most."""
        return 1 + self.drafted if speculates else 1

    @property
    def planned_tokens(self) -> int:
        """Tokens that the plan of a sequence with a grammar expects, at most.

        0 where sequences may branch, so that a launch with a sequence that has a grammar has one step.
        """
        return 0 if self.plan is not None else self.tokens(True) - 1

    def speculator(
        self, rows: int, costs: PassCosts | None = None, headed: bool = False
    ) -> Speculator | None:
        """What drafts the tokens of a batch.

        Args:
            rows: number of rows of the batch.
            costs: the costs of passes on this machine.
            headed: whether the model has a draft head.
        """
        if rows not in self.drafting_widths:
            return None
        return make_speculator(self.speculate, rows, self.drafted, costs, headed)

    @property
    def longest_chunk(self) -> tuple[int, int]:
        """The chunk of the most tokens among those of the fewest prompts."""
        return max(self.chunks, key=lambda chunk: (-chunk[0], chunk[1]))

    @property
    def segment(self) -> int | None:
        """Tokens that every prefill chunk of a prompt but the last must have; None if any number will do."""
        return None if self.method is None or self.method.prefill is None else self.method.segment

    @property
    def branches(self) -> int:
        """Rows of the state that a sequence has."""
        return 1 if self.plan is None else self.plan.branches

    @property
    def compression(self) -> CompressionPolicy | None:
        """How the KV cache of a prompt is compressed."""
        return None if self.method is None else self.method.compression


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
        launches = self.launches
        costs = measure_pass_costs(
            *self._alone,
            **sizes._asdict(),
            page_size=cache.page_size,
            dtype=jnp.dtype(cache.layers[0].keys.dtype).name,
            pages=WINDOW,
        )
        if not costs.valid():  # other work on the machine has hidden what passes cost
            return
        if self.launches == launches:  # requests that run meanwhile make passes look slow
            write_costs(costs, model)
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
        return self._watched(self._run(key, self.params, device_state, chunk))

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
        arguments = self.decode_arguments(device_state, steps, constraints, forced, held, program)
        return self._watched(self._run(("decode", *program), *arguments))

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
        """Whether a program can run at once."""
        return key in self._compiled

    def available(self, key: tuple) -> bool:
        """Whether to choose a program: it can run at once, or it is compiled when it first runs."""
        return self.compiler is None or key in self._compiled

    def require(self, key: tuple) -> bool:
        """Whether a program is `available`; if not, it is compiled next."""
        return self.available(key) or not (self.compiler and self.compiler.prefer(key))

    def _run(self, key: tuple, *arguments: Any) -> Any:
        """Run a program, here and in the other processes of the mesh."""
        program = self._program(key, *arguments)
        if self.broadcaster is not None:
            self.broadcaster.launch(key, arguments)
        return program(*arguments)

    def _watched(self, result: tuple[DeviceState, T]) -> tuple[DeviceState, T]:
        if self.broadcaster is not None:
            self.broadcaster.watch(result[1])
        return result

    @property
    def _mesh(self) -> Mesh | None:
        return getattr(self.decoder, "mesh", None)

    def _program(self, key: tuple, *arguments: Any) -> Callable[..., Any]:
        if self.compiler is not None and key not in self._compiled:
            self.compiler.wait_for(key)
        return self._compiled.get(key) or self.compile(key, arguments)

    def compile(self, key: tuple, arguments: tuple) -> Callable[..., Any]:
        """Compile a program, or load it from the cache, and keep it."""
        start_time = time.perf_counter()
        program, donated = self._function(key)
        if self.broadcaster is not None:
            self.broadcaster.begin_compilation(key)
        compiled, is_new = load_or_compile(program, arguments, donated)
        if self.broadcaster is not None:
            self.broadcaster.await_compilation(key)
        with self._lock:
            self._compiled[key] = compiled
            self.compilations += is_new
            self.compile_seconds += time.perf_counter() - start_time
        return compiled

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
