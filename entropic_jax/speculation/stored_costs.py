"""Stored pass costs: what passes of a model cost on this machine, measured once and kept on disk.

Until they are measured, a roofline stands for them. `measure_pass_costs` takes longer than a short program
runs, so a server measures at the end of its warm-up, and every later process uses what it stored: under
XDG_CACHE_HOME (`~/.cache`), or in the folder that ENTROPIC_COST_CACHE names; if that is empty, nothing is
stored.
"""

import hashlib
import json
import logging
import os
import platform
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..mesh.devices import default_device, processor, user_cache
from ..pallas.paged_attention.quantised import bytes_per_number
from ..phases.forward import narrowest
from ..phases.headed_decoder import HeadedDecoder
from ..state.cache import ModelShape
from ..state.decoder import Decoder
from ..state.ledger import Hardware, default_hardware, weights_read
from .pass_costs import PassCosts
from .pruned import WINDOW
from .registry import UNMEASURED_CONTEXT

LOG = logging.getLogger("entropic_jax.speculation")
VARIABLE = "ENTROPIC_COST_CACHE"
LARGEST, WIDEST = 4096, 32  # tokens of a pass, and of one row, up to which a roofline is tabulated
VERSION = 7  # of the file, and of the kernels whose costs it holds


class TimedModel(NamedTuple):
    """Key of stored pass costs: everything but the machine that they depend on."""

    decoder: Decoder  # the model's pure functions
    params: Any  # its parameters
    page_size: int  # positions per page
    dtype: Any  # of keys and values


def known_costs(model: TimedModel) -> PassCosts:
    """Costs of a model's passes: those stored for this machine, else those of a roofline."""
    costs = read_costs(model)
    if costs is not None:
        LOG.info("draft lengths follow pass costs that were measured on this machine")
        return costs
    LOG.info("draft lengths follow a roofline: the pass costs of this model were not measured here yet")
    shape = model.decoder.shape
    options = dict(
        bytes_per_weight=narrowest(model.params),
        bytes_per_cache=bytes_per_number(model.dtype, shape.head_dim),
        kept=WINDOW.kept(shape.layers),
    )
    costs = roofline_pass_costs(shape, default_hardware(), **options)
    if not isinstance(model.decoder, HeadedDecoder):
        return costs
    with_head = shape._replace(drafters=(model.decoder.head.shape,))
    return costs._replace(head_step=roofline_pass_costs(with_head, default_hardware(), **options).draft_step)


def read_costs(model: TimedModel) -> PassCosts | None:
    """The stored costs of a model's passes; None if there are none."""
    file = _file(model)
    try:
        stored = json.loads(file.read_text("utf-8")) if file else None
        if stored is None:
            return None
        costs = PassCosts.from_json({name: stored[name] for name in PassCosts._fields})
        return costs if costs.valid() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_costs(costs: PassCosts, model: TimedModel) -> None:
    """Stores the measured costs of a model's passes. A folder that cannot be written to is not an error."""
    file = _file(model)
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as stream:
            json.dump(costs._asdict(), stream)
        os.replace(stream.name, file)
    except OSError as error:
        LOG.debug("pass costs are not stored: %s", error)


def _file(model: TimedModel) -> Path | None:
    """The file of a model on this machine: another machine, model, dtype or page size has another."""
    parent = os.environ.get(VARIABLE)
    if parent == "":
        return None
    device = default_device()
    described = (
        VERSION,
        platform.platform(),
        processor() if device.platform == "cpu" else device.device_kind,
        os.cpu_count(),
        os.environ.get("NPROC"),  # XLA's threads
        jax.__version__,
        model.decoder,
        sorted({str(x.dtype) for x in jax.tree.leaves(model.params)}),
        model.page_size,
        jnp.dtype(model.dtype).name,
        WINDOW,
    )
    name = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    return (Path(parent) if parent else user_cache()) / f"pass-costs-{name}.json"


def roofline_pass_costs(
    shape: ModelShape,
    hardware: Hardware,
    *,
    bytes_per_weight: float,
    bytes_per_cache: float,
    kept: float,
) -> PassCosts:
    """Pass costs by a roofline, for where none were measured.

        a(T) = max(b_W W(T) / bandwidth, 2 W T / peak)
        b(n) = layers · max(2 d b_KV · KV heads / bandwidth, 4 d n · heads / peak)

    Args:
        shape: sizes of the model: W weights, W(T) those that T tokens read together, d = head_dim.
        hardware: peak FLOP/s and memory bandwidth.
        bytes_per_weight: b_W.
        bytes_per_cache: b_KV, per number of K or V.
        kept: fraction of the cache that a step of the pruned drafter reads. A draft model reads all of its
            own.
    """
    peak, bandwidth = float(hardware.peak), float(hardware.bandwidth)
    tokens = tuple(1 << n for n in range(LARGEST.bit_length()))
    widths = tuple(1 << n for n in range(WIDEST.bit_length()))
    read = [bytes_per_weight * float(weights_read(shape, t)) / bandwidth for t in tokens]
    computed = [2 * shape.weights * t / peak for t in tokens]
    position = 2 * shape.head_dim * bytes_per_cache * shape.kv_heads / bandwidth
    score = 4 * shape.head_dim * shape.heads / peak
    slopes = tuple(shape.layers * max(position, score * n) for n in widths)
    seconds = tuple(max(pair) for pair in zip(read, computed, strict=True))
    if shape.drafters:
        draft = roofline_pass_costs(
            shape.drafters[0],
            hardware,
            bytes_per_weight=bytes_per_weight,
            bytes_per_cache=bytes_per_cache,
            kept=1.0,
        )
        return PassCosts(tokens, seconds, widths, slopes, draft.draft_step)
    # What a draft step costs beyond its bytes is unknown, so nothing is drafted from few pages while contexts
    # are short.
    return PassCosts(tokens, seconds, widths, slopes, (seconds[0], kept * slopes[0]), UNMEASURED_CONTEXT)
