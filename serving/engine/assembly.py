"""Assembly of an engine's scheduler from its parts and options."""

from typing import Any

import jax

from entropic_jax.control.entropy_drop import AR1

from .block_manager import BlockManager
from .device_state import DeviceState
from .metrics_hooks import MetricsHooks
from .options import EngineOptions, Sizes
from .prefix_cache import PrefixCache
from .priority import Ranking
from .programs import Programs
from .row_controllers import num_gains
from .scheduler import Scheduler
from .state_updates import StateUpdates


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
        programs: Its compiled programs.
        device_state: Without a sequence.
        sizes: Its sizes.
        options: Its options.
        tokenizer: The model's tokenizer.
        prior: Model of H₁ along a sequence.
        metrics_hooks: Called at each event.
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
    )
