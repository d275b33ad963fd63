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
from typing import Any

import jax
import jax.numpy as jnp

from ..cache import ModelShape
from ..devices import default_device, processor
from ..ledger import Hardware, default_hardware, weights_read
from ..pallas.paged_attention.quantised import bytes_per_number
from ..phases.forward import Decoder
from ..speculation.pass_costs import PassCosts
from ..speculation.pruned import WINDOW
from ..speculation.registry import UNMEASURED_CONTEXT

LOG = logging.getLogger("entropic_jax.speculation")
VARIABLE = "ENTROPIC_COST_CACHE"
LARGEST, WIDEST = 4096, 32  # tokens of a pass, and of one row, up to which a roofline is tabulated
VERSION = 1  # of the file, and of the kernels whose costs it holds


def known_costs(decoder: Decoder, params: Any, page_size: int, dtype: Any) -> PassCosts:
    """Costs of a model's passes: those stored for this machine, else those of a roofline.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        page_size: positions per page.
        dtype: of keys and values.
    """
    costs = read_costs(decoder, params, page_size, dtype)
    if costs is not None:
        LOG.info("draft lengths follow pass costs that were measured on this machine")
        return costs
    LOG.info("draft lengths follow a roofline: the pass costs of this model were not measured here yet")
    itemsize = min(x.dtype.itemsize for x in jax.tree.leaves(params))
    return roofline_pass_costs(
        decoder.shape,
        default_hardware(),
        bytes_per_weight=itemsize,
        bytes_per_cache=bytes_per_number(dtype, decoder.shape.head_dim),
        kept=WINDOW.kept(decoder.shape.layers),
    )


def read_costs(decoder: Decoder, params: Any, page_size: int, dtype: Any) -> PassCosts | None:
    """The stored costs; None if there are none. The arguments are those of `known_costs`.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        page_size: positions per page.
        dtype: of keys and values.
    """
    file = _file(decoder, params, page_size, dtype)
    try:
        stored = json.loads(file.read_text("utf-8")) if file else None
        if stored is None:
            return None
        costs = PassCosts(**{name: _as_tuple(stored[name]) for name in PassCosts._fields})
        return costs if costs.valid() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_costs(costs: PassCosts, decoder: Decoder, params: Any, page_size: int, dtype: Any) -> None:
    """Stores costs. A folder that cannot be written to is not an error.

    Args:
        costs: as measured.
        decoder: the model's pure functions.
        params: its parameters.
        page_size: positions per page.
        dtype: of keys and values.
    """
    file = _file(decoder, params, page_size, dtype)
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as stream:
            json.dump(costs._asdict(), stream)
        os.replace(stream.name, file)
    except OSError as error:
        LOG.debug("pass costs are not stored: %s", error)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _file(decoder: Decoder, params: Any, page_size: int, dtype: Any) -> Path | None:
    """The file of a model on this machine: another machine, model, dtype or page size has another."""
    parent = os.environ.get(VARIABLE)
    if parent == "":
        return None
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "entropic_jax"
    device = default_device()
    described = (
        VERSION,
        platform.platform(),
        processor() if device.platform == "cpu" else device.device_kind,
        os.cpu_count(),
        jax.__version__,
        decoder,
        sorted({str(x.dtype) for x in jax.tree.leaves(params)}),
        page_size,
        jnp.dtype(dtype).name,
        WINDOW,
    )
    name = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    return (Path(parent) if parent else user_cache) / f"pass-costs-{name}.json"


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
        kept: fraction of the cache that a step of the pruned drafter reads.
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
    # What a step costs beyond its bytes is unknown, so that drafts pay for certain in a long context only.
    return PassCosts(tokens, seconds, widths, slopes, (seconds[0], kept * slopes[0]), UNMEASURED_CONTEXT)
