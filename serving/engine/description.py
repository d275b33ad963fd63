"""Configuration and state of an engine, as JSON can hold them."""

import dataclasses
import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any

import jax

from entropic_jax import models
from entropic_jax.methods.entropix_branches import SearchCounts
from entropic_jax.models.decoder import num_parameters
from entropic_jax.pallas.paged_attention.quantised import bytes_per_number

from ..memory import gibibytes, page_bytes
from ..options.draft_model import ModelWithDraft, target_of
from ..options.kv_cache import pages_of
from .installation import devices, versions
from .options import EngineOptions, Sizes
from .scheduler import Scheduler
from .sequence import DECODE, PREFILL, WAITING, Sequence


def describe(model: models.Model, options: EngineOptions, sizes: Sizes) -> Mapping[str, Any]:
    """The configuration of an engine, see `Engine.describe`.

    Args:
        model: the model that the engine runs.
        options: as its user set them; null is what suits the model and the device.
        sizes: what followed from them.
    """
    plain = dataclasses.replace(options, mesh=None)  # a mesh is no plain value; its devices are listed
    shapes = sizes.shapes
    return {
        "versions": versions(),
        "process_id": os.getpid(),
        "backend": jax.default_backend(),
        "devices": devices(),
        "model": _model(target_of(model)),
        "draft_model": _model(model.draft) if isinstance(model, ModelWithDraft) and model.draft else None,
        "options": {**dataclasses.asdict(plain), "mesh": _mesh(model), "scheduling_policy": options.policy},
        "kv_cache": {
            **cache_size(model, sizes, pages_of(options.kv_cache_dtype, model.params)),
            "page_size": sizes.page_size,
        },
        "batch": {
            "max_num_seqs": sizes.rows,
            "max_model_len": min(sizes.context, sizes.longest),
            "decode_rows": shapes.widths,
            "prefill_chunks": shapes.chunks,
            "steps_of_a_launch": shapes.capacity,
            "speculate": shapes.speculate,
            "branches": shapes.branches,
        },
    }


def snapshot(
    scheduler: Scheduler,
    live: Many[Sequence],
    queued: int,
    work_done: float,
    presets: Many[str],
    compilations: int,
) -> Mapping[str, Any]:
    """The state of an engine, see `Engine.snapshot`.

    Args:
        scheduler: the scheduler of the engine.
        live: sequences that have not been forgotten.
        queued: requests that have not had a row.
        work_done: work of the sequences that have been forgotten, in decode steps.
        presets: names that requests may state.
        compilations: programs compiled after the warm-up.
    """
    timestamp, sizes = time.perf_counter(), scheduler.sizes
    sequences = [s for s in live if not s.ended]
    block_manager, ranking = scheduler.block_manager, scheduler.ranking
    prefix_cache = block_manager.prefix_cache
    return {
        "running": sum(s.stage in (PREFILL, DECODE) for s in sequences),
        "waiting": queued + sum(s.stage == WAITING and s.preemptions > 0 for s in sequences),
        "rows": sizes.rows,
        "kv_usage": block_manager.usage,
        "pages": sizes.pages,
        "pages_free": block_manager.num_free_pages,
        "page_size": sizes.page_size,
        "scheduling_policy": ranking.policy,
        "presets": presets,
        "preemptions": scheduler.preemptions,
        "work_done": work_done + sum(s.work_done for s in live),
        "work_left": float(ranking.work_prediction.remaining(sequences).sum()),
        "longest_wait": ranking.longest_wait,
        "longest_wait_allowed": ranking.longest_allowed(sizes.rows),
        **dict(zip(SearchCounts._fields, scheduler.collector.tally.tolist(), strict=True)),
        **scheduler.collector.draft_counts._asdict(),
        "prefix_queries": 0 if prefix_cache is None else prefix_cache.queries,
        "prefix_hits": 0 if prefix_cache is None else prefix_cache.hits,
        "prefix_pages": 0 if prefix_cache is None else len(prefix_cache),
        "compilations": compilations,
        "sequences": [s.describe(timestamp) for s in sequences],
    }


def cache_size(model: models.Model, sizes: Sizes, dtype: Any) -> dict[str, Any]:
    """The chosen size of the page pool.

    Args:
        model: whose keys and values it holds.
        sizes: the engine's sizes.
        dtype: the dtype of the pages.
    """
    shape = model.decoder.shape
    of_page = page_bytes(shape, sizes.page_size, bytes_per_number(dtype, shape.head_dim))
    return {
        "pages": sizes.pages,
        "tokens": sizes.pages * sizes.page_size,
        "size": gibibytes(sizes.pages * of_page),
        "dtype": str(dtype),
        "decode_context_parallel_size": shape.page_shards,
    }


def _model(model: models.Model) -> dict[str, Any]:
    config, shape = model.config, model.decoder.shape
    leaves = jax.tree.leaves(model.params)
    return {
        "architecture": config.architecture,
        "dtype": str(leaves[0].dtype),
        "quantization": model.quantization,
        "layers": shape.layers,
        "hidden_size": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocabulary": shape.vocabulary,
        "parameters": num_parameters(config),
        "bytes": sum(leaf.nbytes for leaf in leaves),
    }


def _mesh(model: models.Model) -> dict[str, int] | None:
    return None if model.mesh is None else dict(model.mesh.shape)
