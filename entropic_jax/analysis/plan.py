"""Plan of a model on TPUs or GPUs: bytes per chip, sequences that fit, collectives, and time of a step.

Without a compiled step the numbers follow from shapes. With one, temporaries and collectives are the
compiler's, and its total of what a chip holds is compared with the shapes'.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from entropic_jax.mesh import AXES, EXPERT, TENSOR
from entropic_jax.models import Config, ModelError
from entropic_jax.models.decoder import Decoder, structure
from entropic_jax.models.quantisation import stored_dtype
from entropic_jax.models.sharding import (
    check_groups,
    check_page_shards,
    check_sizes,
    kv_head_copies,
    partition_specs,
    with_kv_head_copies,
)
from entropic_jax.state.cache import bytes_per_number

from .chips import Topology, topology
from .collectives import Collective
from .step_needs import Dtypes, StepNeeds, from_shapes

UTILIZATION = 0.9  # of a chip's memory that may be in use
# Slices with one host or two, the least memory first.
SLICES = ("v5e:1x1", "v6e:1x1", "v5e:2x2", "v5e:2x4", "v6e:2x2", "v4:2x2x1", "v5e:4x4", "v6e:2x4", "v4:2x2x2")
SLICES += ("v5p:2x2x1", "v6e:4x4", "v4:2x2x4", "v5p:2x2x2", "v5p:2x2x4")
# Hosts of GPUs, the least memory first.
HOSTS = tuple(f"{chip}:{number}" for number in (1, 2, 4, 8) for chip in ("h100", "h200"))
BATCHES = (1, 8, 32, 64, 128, 256)


class Roofline(NamedTuple):
    """The least time of a decode step, in milliseconds; the parts are sums, not overlapped."""

    weights: float  # reading them, or multiplying by them if that takes longer
    kv_cache: float
    collectives: float

    @property
    def total(self) -> float:
        """All parts one after the other."""
        return sum(self)


class Plan(NamedTuple):
    """Memory of a chip and costs of a step; bytes are of one chip."""

    source: str  # "compiled program" or "shapes"
    devices: int
    weight_bytes: int
    page_bytes: int  # of a page of all layers, its summaries included
    state_bytes: int  # of everything else that a step needs
    temporary_bytes: int
    argument_bytes: int | None  # weights, pool and state of `rows` rows, as compiled
    memory_bytes: int
    pages: int  # that fit
    page_size: int
    kv_head_copies: int  # of the projections and the pages of each KV head
    page_shards: int  # chips that divide each copy
    windowed_layers: int  # layers that see a window; they keep the pages before it
    context: int
    rows: int
    collectives: tuple[Collective, ...]  # of one step
    roofline: Roofline  # at `rows` rows of `context` positions
    tokens_per_second: dict[int, float]  # by rows, each of `context` positions, as far as they fit

    @property
    def sequences(self) -> int:
        """Sequences of `context` positions that fit."""
        return max(0, self.pages) // math.ceil(self.context / self.page_size)


def check_groups_of(config: Config, quantization: str | None, size: int, experts: int = 1) -> None:
    """Raise ModelError unless devices get whole groups of the inputs of a quantised model's matrices.

    Args:
        config: the model's configuration.
        quantization: the quantization of the weights; None for any that can.
        size: devices along tensor.
        experts: devices along expert.
    """
    if quantization is not None:
        shapes = structure(config, quantization)[1]
        check_groups(shapes, AbstractMesh((1, size, experts), AXES))


class WeightBytes(NamedTuple):
    """Bytes of the weights on a chip."""

    total: int
    read: int  # in a step: without the embedding's table
    experts: int  # of these, the matrices of all experts


@functools.lru_cache(maxsize=128)  # a plan asks for each batch, and for each slice that might fit
def weight_bytes(
    config: Config, devices: int, dtypes: Dtypes, experts: int = 1, page_shards: int | None = None
) -> WeightBytes:
    """Bytes of the weights on a chip.

    Args:
        config: the model's configuration.
        devices: number of devices of a copy of the model.
        dtypes: the dtype of the weights, and their quantization.
        experts: devices of the expert axis, among them.
        page_shards: as for `make_plan`.
    """
    shapes = structure(with_kv_head_copies(config, devices, page_shards), dtypes.quantization)[1]
    sizes = {TENSOR: devices // experts, EXPERT: experts}

    def on_chip(path: tuple[Any, ...], x: Any, spec: Any) -> int:
        axes = [axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis]
        itemsize = stored_dtype(path, x, jnp.dtype(dtypes.weights)).itemsize
        return itemsize * x.size // math.prod(sizes[axis] for axis in axes)

    parts = jax.tree_util.tree_map_with_path(on_chip, shapes, partition_specs(shapes, devices))
    total = sum(jax.tree.leaves(parts))
    of_experts = [layer["mlp"].get("experts") for layer in parts["layers"] if "mlp" in layer]
    read = total - sum(jax.tree.leaves(parts["embed_tokens"]))
    return WeightBytes(total, read, sum(jax.tree.leaves(of_experts)))


def page_bytes(
    config: Config, devices: int, page_size: int, dtype: Any, page_shards: int | None = None
) -> int:
    """Bytes of a page of all layers on a chip: keys, values and summaries; the mean where chips divide pages.

    Args:
        config: the model's configuration.
        devices: number of devices of a copy of the model.
        page_size: positions of a page.
        dtype: the dtype of keys and values.
        page_shards: as for `make_plan`.
    """
    shape = Decoder(with_kv_head_copies(config, devices, page_shards)).shape
    size = shape.head_dim
    tiles = 2 * page_size * size * bytes_per_number(dtype, size)
    return int(config.num_hidden_layers * shape.kv_heads * (tiles + 4 * (3 * size + 1)) / devices)


def state_bytes(state: Any) -> int:
    """Bytes of a `State`, as shapes, without its page pool."""
    arrays = jax.tree.leaves(state._replace(key=(), cache=state.cache._replace(layers=())))
    return sum(x.size * x.dtype.itemsize for x in arrays)


def roofline(
    config: Config,
    topology: Topology,
    rows: int,
    context: int,
    dtypes: Dtypes,
    exchanged: Iterable[Collective],
    experts: int = 1,
    page_shards: int | None = None,
) -> Roofline:
    """The least time of a decode step of `rows` rows that hold `context` positions each.

    Args:
        config: the model's configuration.
        topology: the topology of the slice.
        rows: number of rows of the step.
        context: positions of a row.
        dtypes: the dtypes of weights and KV cache.
        exchanged: the collectives of the step.
        experts: devices of the expert axis.
        page_shards: as for `make_plan`.
    """
    devices = topology.devices
    weights = weight_bytes(config, devices, dtypes, experts, page_shards)
    shape = Decoder(with_kv_head_copies(config, devices, page_shards)).shape
    # As in the ledger: rows choose experts independently, and the chips of the expert axis have equal shares.
    unread = (1 - shape.expert_share) ** rows if weights.experts else 0.0
    read = weights.read - unread * weights.experts
    flops = 2.0 * shape.weights * rows / devices
    positions = positions_read(config, context)
    cached = 2 * positions * shape.kv_heads * shape.head_dim * bytes_per_number(dtypes.cache, shape.head_dim)
    attention = attention_flops(config, rows, context) / devices
    return Roofline(
        1e3 * max(read / topology.bandwidth, flops / topology.flops),
        1e3 * max(rows * cached / devices / topology.bandwidth, attention / topology.flops),
        1e3 * sum(topology.seconds(c.operation, c.num_bytes, c.devices) for c in exchanged),
    )


def positions_read(config: Config, context: int) -> int:
    """Positions that a row of `context` positions attends to, in all layers; in some, those of a window."""
    return sum(min(context, window or context) for window in Decoder(config).windows)


def attention_flops(config: Config, rows: int, context: int) -> int:
    """Operations of the attention of a decode step: scores, and sums of values.

    Args:
        config: the model's configuration.
        rows: number of rows of the step.
        context: positions of a row.
    """
    shape = Decoder(config).shape
    return 4 * rows * shape.heads * shape.head_dim * positions_read(config, context)


def make_plan(
    config: Config,
    slice_: Topology,
    dtypes: Dtypes,
    state: Any,
    needs: StepNeeds | None = None,
    experts: int = 1,
    page_shards: int | None = None,
) -> Plan:
    """The plan of a model on a slice.

    Args:
        config: the configuration of the model, which `check_sizes` accepts for the chips.
        slice_: the kind of the slice, all of whose chips have parts of one copy of the model.
        dtypes: the dtypes of weights and KV cache.
        state: the `State` of the batch that the step is for, as shapes.
        needs: what the step needs, from its compiled program; None computes it from shapes.
        experts: groups of chips over which experts are divided.
        page_shards: chips that divide a KV head, of those that have the same one; None for all that can.
    """
    cache, devices = state.cache, slice_.devices
    rows, context = cache.table.shape[0], cache.table.shape[1] * cache.page_size
    weights = weight_bytes(config, devices, dtypes, experts, page_shards).total
    of_page = page_bytes(config, devices, cache.page_size, dtypes.cache, page_shards)
    rest = state_bytes(state)
    step = needs or from_shapes(config, devices, rows, dtypes, state, page_shards)
    room = int(UTILIZATION * slice_.chip.memory) - weights - rest - step.temporary_bytes
    pages = max(0, room // of_page)
    rates = {}
    for batch in BATCHES:
        if batch * math.ceil(context / cache.page_size) <= pages:
            exchanged = from_shapes(config, devices, batch, dtypes, state, page_shards).collectives
            time = roofline(config, slice_, batch, context, dtypes, exchanged, experts, page_shards)
            rates[batch] = 1e3 * batch / time.total
    return Plan(
        source="shapes" if needs is None else "compiled program",
        devices=devices,
        weight_bytes=weights,
        page_bytes=of_page,
        state_bytes=rest,
        temporary_bytes=step.temporary_bytes,
        argument_bytes=step.argument_bytes,
        memory_bytes=slice_.chip.memory,
        pages=pages,
        page_size=cache.page_size,
        kv_head_copies=kv_head_copies(config, devices, page_shards),
        page_shards=check_page_shards(config, devices, page_shards),
        windowed_layers=sum(window is not None for window in Decoder(config).windows),
        context=context,
        rows=rows,
        collectives=step.collectives,
        roofline=roofline(config, slice_, rows, context, dtypes, step.collectives, experts, page_shards),
        tokens_per_second=rates,
    )


def first_that_fits(
    config: Config,
    dtypes: Dtypes,
    state: Any,
    sequences: int = 1,
    platform: str = "tpu",
    page_shards: int | None = None,
) -> str | None:
    """The first of `SLICES`, or `HOSTS`, on which sequences fit and whose chips divide the model; or None.

    Args:
        config: the model's configuration.
        dtypes: the dtypes of weights and KV cache.
        state: the `State` of the batch, as shapes.
        sequences: how many must fit.
        platform: "tpu" or "gpu".
        page_shards: as for `make_plan`.
    """
    for name in HOSTS if platform == "gpu" else SLICES:
        with contextlib.suppress(ModelError):
            slice_ = topology(name)
            check_sizes(config, slice_.devices)
            check_groups_of(config, dtypes.quantization, slice_.devices)
            if make_plan(config, slice_, dtypes, state, page_shards=page_shards).sequences >= sequences:
                return name
    return None


def counted(exchanged: Iterable[Collective]) -> list[tuple[str, int, int]]:
    """Operation, how many of it, and bytes of all of them, for each kind of collective."""
    exchanged = list(exchanged)
    numbers = Counter(c.operation for c in exchanged)
    return [
        (name, n, sum(c.num_bytes for c in exchanged if c.operation == name)) for name, n in numbers.items()
    ]
