"""Warm-up: compiles the programs that the engine will run before it serves requests."""

import contextlib
import ctypes
import itertools
import sys
from collections.abc import Callable

import numpy as np

from entropic_jax.control_gains import MESO, SCALES

from .launch_planner import empty_chunk
from .options import EngineOptions, cores
from .programs import DecodeProgram, Programs
from .scheduler import Scheduler


def compile_ahead(
    programs: Programs,
    scheduler: Scheduler,
    options: EngineOptions,
    progress: Callable[[int, int], None],
    stopped: Callable[[], bool],
) -> None:
    """Compile all programs (`warmup` "full"), those that every request needs ("min"), or none.

    "full" also times verification passes, by which the draft-length law decides.

    "min" leaves out scored prompts, preemption, steps that leave pages unread unless the preset has the scale
    meso, and steps without the sampler if the preset is one. What is left out is compiled when it is first
    needed, and counted.

    Args:
        programs: Where to keep what is compiled.
        scheduler: Whose device state and planner have the shapes of the arguments.
        options: Of the engine.
        progress: As in `Programs.compile_ahead`.
        stopped: As there.
    """
    if options.warmup == "none":
        return
    workers = options.compile_workers or cores()
    programs.compile_ahead(_examples(programs, scheduler, options), workers, progress, stopped)
    if options.warmup == "full" and not stopped():
        row, device_state = np.int32(0), scheduler.device_state
        saved = programs.save_row(device_state, 0)
        programs.compile_ahead([(("restore",), (device_state, row, saved))], 1, progress, stopped)
    if options.warmup == "full" and not stopped():
        programs.measure_pass_costs(scheduler.device_state.state.cache)
    trim_memory()


def _examples(programs: Programs, scheduler: Scheduler, options: EngineOptions) -> list[tuple]:
    """Key and arguments of the programs to compile."""
    planner, device_state, shapes = scheduler.planner, scheduler.device_state, programs.shapes
    full = options.warmup == "full"
    examples: list[tuple] = [
        (("apply", penalised), (programs.blank, device_state, scheduler.updates.empty_batch(penalised)))
        for penalised in (False, True)
    ]
    for prompts, size in shapes.chunks:
        chunk = empty_chunk(prompts, size, scheduler.sizes.rows)
        for scored in (False, True) if full else (False,):
            arguments = (programs.params, device_state, chunk)
            examples.append((("prefill", prompts, size + 1, scored), arguments))
    if shapes.compression is not None:
        examples.append((("compress",), (device_state, np.int32(0))))
    prunes = MESO in SCALES.get(options.preset, ())
    page_policies = shapes.page_policies if full or prunes else shapes.page_policies[:1]
    samplers = shapes.samplers if full else shapes.samplers[-1:]
    decode = [DecodeProgram(*p) for p in itertools.product(shapes.widths, page_policies, samplers)]
    if shapes.speculates:
        decode += [DecodeProgram(width, page_policies[0], False, True) for width in shapes.widths]
    for program in decode:
        constraints, forced = planner.constraints({}), planner.nothing_forced(program.speculates)
        arguments = programs.decode_arguments(device_state, 1, constraints, forced, program)
        examples.append((("decode", *program), arguments))
    return examples


def trim_memory() -> None:
    """Return to the system the memory that the compiler has freed: with glibc, hundreds of megabytes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
