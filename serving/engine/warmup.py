"""Compile what the engine will run before it takes work."""

import contextlib
import ctypes
import itertools
import sys
from collections.abc import Callable

import numpy as np

from .launch_planner import empty_chunk
from .options import EngineOptions, cores
from .programs import Programs
from .scheduler import Scheduler


def compile_ahead(
    programs: Programs, scheduler: Scheduler, options: EngineOptions, progress: Callable[[int, int], None]
) -> None:
    """Compile all programs (`full`), those that every job needs (`min`), or none.

    `min` leaves out prompts that are scored, preemption, and the pruned steps unless the preset of most jobs
    prunes, and steps without the sampler if the preset is one; what is left out is compiled when it is first
    asked for, and counted.
    """
    if options.warmup == "none":
        return
    _compile(programs, scheduler, options, progress)
    give_memory_back()


def _compile(
    programs: Programs, scheduler: Scheduler, options: EngineOptions, progress: Callable[[int, int], None]
) -> None:
    planner = scheduler.planner
    prunes = options.preset in ("meso", "full")
    full, device_state, shapes = options.warmup == "full", scheduler.device_state, programs.shapes
    examples: list[tuple[tuple, tuple]] = [
        (("apply", p), (programs.blank, device_state, scheduler.updates.blank(p))) for p in (False, True)
    ]
    for prompts, size in shapes.chunks:
        chunk = empty_chunk(prompts, size, scheduler.sizes.rows)
        for scored in (False, True)[: 1 + full]:
            examples.append((("prefill", prompts, size + 1, scored), (programs.params, device_state, chunk)))
    if shapes.compression is not None:
        examples.append((("compress",), (device_state, np.int32(0))))
    for width in shapes.widths:
        page_policies = shapes.page_policies if full or prunes else shapes.page_policies[:1]
        samplers = shapes.samplers if full else shapes.samplers[-1:]
        for page_policy, samples in itertools.product(page_policies, samplers):
            given = (
                programs.params,
                device_state,
                np.int32(1),
                planner.constraints({}),
                planner.unforced,
                programs.prior,
            )
            examples.append((("decode", width, page_policy, samples), given))
    programs.compile_ahead(examples, options.compile_workers or cores(), progress)
    if full:
        parked = programs.park(device_state, 0)
        programs.compile_ahead([(("unpark",), (device_state, np.int32(0), parked))], 1, progress)


def give_memory_back() -> None:
    """Return to the system what the compiler has left unused: with glibc, hundreds of megabytes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
