"""Assembly of an engine from a model and its options: its sizes, device state, programs and scheduler."""

import logging
from typing import Any, NamedTuple

import jax

from entropic_jax import models
from entropic_jax.control.entropy_drop import AR1
from entropic_jax.pallas.paged_attention.quantised import bytes_per_number
from entropic_jax.parameter_tables.control_gains import MACRO, SCALES
from entropic_jax.speculation import PassCosts

from ..memory import page_bytes
from ..options.control_options import Control
from ..options.kv_cache import pages_of
from . import description
from .block_manager import BlockManager
from .broadcast import Broadcaster
from .device_state import DeviceState
from .engine_controllers import row_controllers_of
from .initial_state import initial_device_state
from .metrics_hooks import MetricsHooks
from .options import EngineOptions, Sizes, sizes
from .prefix_cache import PrefixCache
from .priority import Ranking
from .programs import Programs
from .row_controllers import RowControllers, num_gains
from .scheduler import Scheduler
from .state_updates import StateUpdates

log = logging.getLogger(__name__)


class EngineParts(NamedTuple):
    """The parts of an engine, without its thread."""

    sizes: Sizes
    row_controllers: RowControllers
    programs: Programs
    scheduler: Scheduler


def assemble(
    model: models.Model,
    options: EngineOptions,
    calibration: Any = None,
    metrics_hooks: MetricsHooks | None = None,
    control: Control | None = None,
    sharers: int = 1,
    broadcaster: Broadcaster | None = None,
    costs: PassCosts | None = None,
) -> EngineParts:
    """The parts of an engine, with the KV cache allocated and no program compiled.

    Args:
        model: as in `LLMEngine`, like the rest up to `sharers`; with its adapters.
        options: the options of the engine.
        calibration: the calibration of the model, None without one.
        metrics_hooks: called at each event.
        control: control that is checked before anything is allocated.
        sharers: engines that share the memory of a CPU.
        broadcaster: as in `Programs`.
        costs: as in `Programs`.
    """
    cache_dtype = pages_of(options.kv_cache_dtype, model.params)
    itemsize = bytes_per_number(cache_dtype, model.decoder.shape.head_dim)
    allocated: Sizes = sizes(model, options, itemsize, sharers)
    log_cache(model, options, allocated, cache_dtype)
    row_controllers = row_controllers_of(model, options, allocated.shapes, calibration)
    if control is not None:
        row_controllers.row_gains(control)  # refused now rather than at each request
    belief_temperature = 1.0 if calibration is None else calibration.temperature
    device_state = initial_device_state(model, allocated, row_controllers, cache_dtype, belief_temperature)
    prior = row_controllers.prior
    programs = Programs(
        model.decoder, model.params, device_state, prior, allocated.shapes, broadcaster, costs
    )
    hooks = metrics_hooks or MetricsHooks()
    scheduler = scheduler_of(programs, device_state, allocated, options, model.tokenizer, prior, hooks)
    if broadcaster is not None:
        broadcaster.send_choices(allocated.pages, programs.known_costs)
    return EngineParts(allocated, row_controllers, programs, scheduler)


def scheduler_of(
    programs: Programs,
    device_state: DeviceState,
    sizes: Sizes,
    options: EngineOptions,
    tokenizer: Any,
    prior: AR1,
    metrics_hooks: MetricsHooks,
) -> Scheduler:
    """The scheduler of an engine, without a sequence.

    Args:
        programs: its compiled programs.
        device_state: without a sequence.
        sizes: its sizes.
        options: its options.
        tokenizer: the model's tokenizer.
        prior: model of H₁ along a sequence.
        metrics_hooks: called at each event.
    """
    text, vocabulary = device_state.state.text, programs.decoder.shape.vocabulary
    updates = StateUpdates(
        sizes.rows,
        sizes.pages,
        device_state.state.cache.table.shape[1],
        num_gains(device_state.controller),
        vocabulary,
        None if text is None else text.shape[1],
        adapters=device_state.state.adapter is not None,
    )
    log_order(options)
    prefix_cache = PrefixCache() if options.enable_prefix_caching else None
    return Scheduler(
        programs,
        device_state,
        sizes,
        BlockManager(sizes.rows, sizes.pages, sizes.page_size, prefix_cache),
        updates,
        Ranking(options.policy, prior),
        metrics_hooks,
        tokenizer,
        exact=options.batch_invariant,
        overlapped=jax.default_backend() != "cpu",
        chunked=options.enable_chunked_prefill,
    )


def log_cache(model: models.Model, options: EngineOptions, sizes: Sizes, dtype: Any) -> None:
    """Say how large the KV cache is, and why where `kv_cache_bytes` is more than its rows can use.

    Args:
        model: whose keys and values it holds.
        options: the options of the engine.
        sizes: the sizes that follow from them.
        dtype: the dtype of the pages.
    """
    described, shape = description.cache_size(model, sizes, dtype), model.decoder.shape
    log.info("KV cache", extra=described)
    of_page = page_bytes(shape, sizes.page_size, bytes_per_number(dtype, shape.head_dim))
    if options.num_pages is None and (options.kv_cache_bytes or 0) >= (sizes.pages + 1) * of_page:
        log.warning(
            "kv_cache_bytes is more than max_num_seqs sequences of max_model_len tokens can use: "
            "the KV cache has the size that they can use",
            extra={
                "kv_cache_bytes": options.kv_cache_bytes,
                "size": described["size"],
                "max_num_seqs": options.max_num_seqs,
                "max_model_len": options.max_model_len or model.config.longest_context,
            },
        )


def log_order(options: EngineOptions) -> None:
    """Say so where sequences are not served in the order of the scale macro, though the preset has it."""
    if options.policy != "entropic" and MACRO in SCALES.get(options.preset, ()):
        stated = options.scheduling_policy
        log.info("preset %s runs without macro: scheduling_policy is %s", options.preset, stated)
