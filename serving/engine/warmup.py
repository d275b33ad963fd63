"""Warm-up: the order in which the engine's programs are compiled, the most needed first."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from entropic_jax.parameter_tables.control_gains import PRUNING, SCALES

from ..executable_cache.compilation import Notice, notice
from . import allocator
from .device_state import save_row
from .options import EngineOptions
from .prefill_planner import empty_chunk
from .program_compiler import ProgramCompiler, cores
from .program_shapes import DecodeProgram, Shapes
from .programs import Programs
from .scheduler import Scheduler


class CompilationCount:
    """Progress of the warm-up for a user who waits; the engine's `progress`, called after each program."""

    def __init__(self, notice: Notice = notice) -> None:
        self.left, self.notice = 0, notice

    def __call__(self, done: int, total: int) -> None:
        """Count what is left of the warm-up."""
        self.left = total - done

    @property
    def doing(self) -> str:
        """The program being compiled; "" for none. Without a warm-up, it is not known how many are left."""
        if not self.notice.running:
            return ""
        return f"compiling, {self.left} left" if self.left else f"compiling program {self.notice.ended + 1}"


class Warmup:
    """Compiles the programs of the warm-up behind the engine's thread, which serves with those that exist.

    The first programs serve one request at a time, by short prefill chunks. Larger ones follow once these are
    compiled. With `warmup`
    "full", the warm-up ends once all programs are compiled. "min" leaves out preemption, steps that leave
    pages unread unless the preset does so, steps without the sampler if the preset is one, and all
    but one program for scored prompts. Those are compiled when a request needs them. It waits for them while
    others run, unless another program serves it meanwhile. With "none", nothing is compiled ahead, and all
    requests wait for a missing program.

    At its end, it times passes, by which the draft-length law decides, unless those of this model were timed
    on this machine before. Requests that run meanwhile wait longer.
    """

    def __init__(
        self,
        programs: Programs,
        scheduler: Scheduler,
        options: EngineOptions,
        progress: Callable[[int, int], None],
        notify: Callable[[BaseException | None], None],
    ) -> None:
        """Begin to compile.

        Args:
            programs: where to keep what is compiled.
            scheduler: whose device state and planner have the shapes of the arguments.
            options: the options of the engine.
            progress: `progress(done, total)` is called after each program of the warm-up.
            notify: called after each program, in any thread, with the exception if it failed.
        """
        self._programs, self._progress, self._notify = programs, progress, notify
        self._cache = scheduler.device_state.state.cache
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.late = 0  # programs compiled when the warm-up ended
        self.first: list[tuple] = []
        self._keys: list[tuple] = []
        self._later: list[tuple] = []  # those that are not in the queue yet
        if options.warmup == "none":
            self.ended.set()
            return
        examples = examples_of(programs, scheduler)
        self.first = _first(programs.shapes, options)
        self._keys = list(dict.fromkeys([*self.first, *_rest(programs.shapes, options, list(examples))]))
        self._later = self._keys[len(self.first) :]
        compiler = ProgramCompiler(
            programs.compile, examples, options.compile_workers or cores(), self._compiled
        )
        programs.compiler = compiler
        compiler.enqueue(self.first)  # alone, so that nothing delays them

    @property
    def serves(self) -> bool:
        """Whether most requests can run, if only with some of the programs."""
        return all(map(self._programs.is_compiled, self.first))

    @property
    def late_compilations(self) -> int:
        """Programs compiled after the warm-up."""
        return self._programs.compilations - self.late if self.ended.is_set() else 0

    def stop(self, timeout: float | None) -> bool:
        """Compile no more; whether nothing is being compiled within `timeout` seconds."""
        compiler = self._programs.compiler
        return compiler is None or compiler.stop(timeout)

    def _compiled(self, failure: BaseException | None) -> None:
        with self._lock:
            if failure is None and not self.ended.is_set():
                if self.serves and self._programs.compiler is not None:
                    later, self._later = self._later, []
                    self._programs.compiler.enqueue(later)
                done = sum(map(self._programs.is_compiled, self._keys))
                if done == len(self._keys):
                    failure = self._end()
                if failure is None:
                    self._progress(done, len(self._keys))
        self._notify(failure)

    def _end(self) -> BaseException | None:
        """End the warm-up; returns the exception that prevents it."""
        try:
            self._programs.measure_pass_costs(self._cache)
        except BaseException as error:  # for the engine's thread to raise
            return error
        self.late = self._programs.compilations
        self.ended.set()
        allocator.trim()
        return None


def examples_of(programs: Programs, scheduler: Scheduler) -> dict[tuple, tuple]:
    """Arguments of every program, by its key."""
    planner, device_state, shapes = scheduler.planner, scheduler.device_state, programs.shapes
    row = np.int32(0)
    examples: dict[tuple, tuple] = {
        ("apply", penalised): (programs.blank, device_state, scheduler.updates.empty_batch(penalised))
        for penalised in (False, True)
    }
    for (prompts, size), scored in itertools.product(shapes.chunks, (False, True)):
        chunk = empty_chunk(prompts, size, scheduler.sizes.rows)
        examples["prefill", prompts, size + 1, scored] = (programs.params, device_state, chunk)
    if shapes.compression is not None:
        examples["compress",] = (device_state, row)
    decode = [
        DecodeProgram(*program)
        for program in itertools.product(shapes.widths, shapes.page_policies, shapes.samplers)
    ]
    if shapes.speculates:
        decode += [
            DecodeProgram(width, shapes.page_policies[0], False, True) for width in shapes.drafting_widths
        ]
    for program in decode:
        constraints, forced, held = planner.constraints({}), planner.nothing_forced, planner.held_rows(())
        arguments = programs.decode_arguments(device_state, 1, constraints, forced, held, program)
        examples["decode", *program] = arguments
    examples["save",] = (device_state, row)
    examples["restore",] = (device_state, row, jax.eval_shape(save_row, device_state, row))
    return examples


def _prunes(options: EngineOptions) -> bool:
    """Whether most requests may leave pages unread."""
    return PRUNING in SCALES.get(options.preset, ())


def _first(shapes: Shapes, options: EngineOptions) -> list[tuple]:
    """Keys of the programs that serve one request of the usual kind, the longest to compile first.

    Steps that may leave pages unread, or have a sampler, serve the other requests, too.
    """
    policy = shapes.page_policies[-1 if _prunes(options) else 0]
    program = DecodeProgram(shapes.widths[0], policy, shapes.samplers[-1])
    fitting = [chunk for chunk in shapes.chunks if chunk[1] >= (shapes.segment or 0)]
    prompts, size = min(fitting, key=lambda chunk: (chunk[0] * chunk[1], chunk))
    keys: list[tuple] = [("decode", *program), ("prefill", prompts, size + 1, False), ("apply", False)]
    return [*keys, ("compress",)] if shapes.compression is not None else keys


def _rest(shapes: Shapes, options: EngineOptions, keys: list[tuple]) -> list[tuple]:
    """Keys of the other programs of the warm-up, the most needed first.

    Args:
        shapes: the shapes of the programs.
        options: say which programs the warm-up compiles.
        keys: the keys of all programs.
    """
    full, prunes = options.warmup == "full", _prunes(options)
    usual = shapes.page_policies[-1 if prunes else 0]
    longest = ("prefill", shapes.longest_chunk[0], shapes.longest_chunk[1] + 1)

    def rank(key: tuple) -> Any:
        """Order of need; None leaves a program out."""
        match key:
            case ("apply", _):
                return 0, 0
            case ("prefill", prompts, tokens, scored):
                if scored:
                    return (5, 0) if key[:3] == longest else (8, prompts * tokens) if full else None
                return (1, 0) if key[:3] == longest else (4, prompts * tokens)
            case ("decode", width, policy, samples, speculates):
                if speculates or (policy == usual and samples == shapes.samplers[-1]):
                    return 3 if width > shapes.widths[0] else 2, width
                if not full and (samples != shapes.samplers[-1] or not prunes):
                    return None
                return 6, width
            case ("compress",):
                return 0, 0
        return (7, 0) if full else None

    ranked = [(rank(key), place) for place, key in enumerate(keys)]
    return [keys[place] for order, place in sorted(pair for pair in ranked if pair[0] is not None)]
