"""Start of an engine: a model directory read, and the engines of the devices that the options name."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from entropic_jax import models
from entropic_jax.mesh.devices import use_device
from entropic_jax.models.layer_stack import scans_layers
from entropic_jax.models.model import read_config
from entropic_jax.models.sharding import kv_head_sharers, model_devices, why_copied

from ..options import control_options, draft_model, parallelism
from ..options.control_options import Control, calibration_of
from ..options.model import computing_dtype
from .adapters import factors_of
from .broadcast import Broadcaster
from .data_parallel import DataParallelEngine, Progress
from .engine import LLMEngine, no_progress
from .follower import check_identity, follow
from .metrics_hooks import MetricsHooks
from .options import EngineOptions
from .process_group import ProcessGroup

log = logging.getLogger(__name__)


def start(
    path: str | Path,
    options: EngineOptions | None = None,
    metrics_hooks: MetricsHooks | None = None,
    progress: Callable[[int, int], None] = no_progress,
    control: Control | None = None,
    group: ProcessGroup | None = None,
) -> LLMEngine | DataParallelEngine:
    """The engine of a Hugging Face model directory, with the calibration in it if there is one.

    Programs are compiled in the background: requests may be submitted at once, and run when it `serves` them.
    With `data_parallel_size` above 1, it is as many engines behind one interface.

    Args:
        path: the directory.
        options: as in `LLMEngine`, like the rest.
        metrics_hooks: called at each event.
        progress: called after each program of the warm-up.
        control: default control of the requests, checked before the model is loaded.
        group: the processes that the engine spans, of which this is process 0; None for this one alone.

    Raises:
        ValueError: Where the directory or the options are at fault.
        OSError: Where a file cannot be read.
    """
    options = EngineOptions() if options is None else options
    model, calibration, places = _prepare(Path(path), options, control, group)
    if len(places) == 1:
        broadcaster = None if group is None else Broadcaster(group)
        engine = LLMEngine(
            model, options, calibration, metrics_hooks, progress, control, broadcaster=broadcaster
        )
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


def follow_process_0(
    path: str | Path, options: EngineOptions, control: Control | None, group: ProcessGroup
) -> int:
    """Run the launches of process 0 until it ends; the exit status.

    Args:
        path: as in `start`, like the rest.
        options: the same as in process 0.
        control: the same as in process 0.
        group: the processes, of which this is not process 0.
    """
    model, calibration, _ = _prepare(Path(path), options, control, group)
    return follow(model, options, calibration, control, group)


def _prepare(
    path: Path, options: EngineOptions, control: Control | None, group: ProcessGroup | None
) -> tuple[models.Model, Any, list[parallelism.Place]]:
    """The model, its calibration, and where engines run; checked before weights are read.

    Args:
        path: as in `start`, like the rest.
        options: the options of the engine.
        control: default control of the requests.
        group: the processes.
    """
    calibration = calibration_of(path)
    if control is not None:
        control_options.check_engine_control(control, calibration, options.policy)
    if group is not None:
        parallelism.check_processes(options, group.num_processes)
    sizes = {name: getattr(options, name) for name in parallelism.SIZES}
    places = parallelism.places_of(**sizes, mesh=options.mesh)
    device, mesh = places[0]
    page_shards = options.decode_context_parallel_size
    if group is not None and mesh is not None:
        check_identity(group, path, options)
        read_config(path, mesh, page_shards)  # says what is wrong while JAX still connects the processes
        group.settle(mesh)
    for adapter in options.lora_modules:  # says what is wrong before weights are read
        factors_of(adapter.path, read_config(path), options.max_lora_rank)
    dtype = computing_dtype(options.dtype, path)
    with use_device(device):
        if options.enable_lora and scans_layers():
            log.info("layers are unrolled, not scanned, in programs of a model with adapters")
        model = models.load(
            path,
            dtype,
            mesh=mesh,
            quantization=options.quantization,
            blocked=len(places) == 1,
            stacked=False if options.enable_lora else None,
            page_shards=page_shards,
        )
        _log_page_shards(model)
        joins = mesh is None and not options.enable_lora
        model = draft_model.load(model, options.drafter, dtype, options.quantization, path, joins)
    return model, calibration, places


def _log_page_shards(model: models.Model) -> None:
    """Log at info how KV heads are held, where several devices have the same one."""
    devices = model_devices(model.mesh)
    sharers, divided = kv_head_sharers(model.config, devices), model.decoder.shape.page_shards
    if sharers == divided > 1:
        log.info("each KV head, and its pages, is divided over %d devices", sharers)
    elif sharers > 1:
        reason = why_copied(model.config, sharers) or "decode_context_parallel_size"
        log.info("%d devices have the same KV head, in %d copies: %s", sharers, sharers // divided, reason)
