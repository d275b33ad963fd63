"""Start of an engine: a model directory read, and the engines of the devices that the options name."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax

from entropic_jax import models
from entropic_jax.devices import use_device

from ..options import control_options, draft_model, parallelism
from ..options.control_options import Control, calibration_of
from ..options.model import default_dtype
from .data_parallel import DataParallelEngine, Progress
from .engine import LLMEngine, no_progress
from .metrics_hooks import MetricsHooks
from .options import EngineOptions


def start(
    path: str | Path,
    options: EngineOptions | None = None,
    metrics_hooks: MetricsHooks | None = None,
    progress: Callable[[int, int], None] = no_progress,
    control: Control | None = None,
) -> LLMEngine | DataParallelEngine:
    """The engine of a Hugging Face model directory, with the calibration in it if there is one.

    Programs are compiled in the background: requests may be submitted at once, and run when it `serves` them.
    With `data_parallel_size` above 1, it is as many engines behind one interface.

    Args:
        path: The directory.
        options: As in `LLMEngine`, like the rest.
        metrics_hooks: Called at each event.
        progress: Called after each program of the warm-up.
        control: Default control of the requests, checked before the model is loaded.

    Raises:
        ValueError: Where the directory or the options are at fault.
        OSError: Where a file cannot be read.
    """
    options = EngineOptions() if options is None else options
    calibration = calibration_of(Path(path))
    if control is not None:
        control_options.check_engine_control(control, calibration, options.policy)
    sizes = {name: getattr(options, name) for name in parallelism.SIZES}
    places = parallelism.places_of(**sizes, mesh=options.mesh)
    dtype = options.dtype or default_dtype()
    with use_device(places[0].device):
        model = models.load(path, dtype, mesh=places[0].mesh, quantization=options.quantization)
        model = draft_model.load(model, options.speculate, dtype, options.quantization)
    if len(places) == 1:
        engine = LLMEngine(model, options, calibration, metrics_hooks, progress, control)
        try:
            for adapter in options.lora_modules:
                engine.load_adapter(*adapter)
        except BaseException:
            engine.close()
            raise
        return engine
    shared = Progress(progress, len(places))
    engines: list[LLMEngine] = []
    for rank, (device, mesh) in enumerate(places):
        sharers = len(places) - rank if jax.default_backend() == "cpu" else 1
        with use_device(device):
            copy = model if rank == 0 else draft_model.copied(model, device, mesh)
            engines.append(
                LLMEngine(copy, options, calibration, metrics_hooks, shared.of(rank), control, sharers)
            )
        # The programs of the others have the same shapes, so that they are the same programs.
        options = dataclasses.replace(options, num_pages=engines[0].sizes.pages)
    return DataParallelEngine(engines)
