"""Memory and collectives of a decode step on a mesh, by the shapes of a model or by its compiled program."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entropic_jax.mesh import numbers_by_type
from entropic_jax.models import Config
from entropic_jax.models.block_spec import BlockSpec
from entropic_jax.models.decoder import Decoder
from entropic_jax.models.families import FAMILIES
from entropic_jax.models.sharding import check_page_shards
from entropic_jax.state import State

from .collectives import Collective, collectives


class Dtypes(NamedTuple):
    """Data types of the weights, in which the model computes, and of the KV cache."""

    weights: str
    cache: str
    quantization: str | None = None  # of the weights, see `models.quantisation`


class StepNeeds(NamedTuple):
    """Memory that a decode step needs besides weights, pages and state; bytes are of one chip."""

    temporary_bytes: int
    argument_bytes: int | None  # of all arguments, as compiled
    collectives: tuple[Collective, ...]


def from_shapes(
    config: Config, devices: int, rows: int, dtypes: Dtypes, state: State, page_shards: int | None = None
) -> StepNeeds:
    """The needs of a dense decode step, by the layout of the model.

    Args:
        config: the model's configuration.
        devices: number of devices of the tensor axis.
        rows: number of rows of the step.
        dtypes: the dtypes of weights and KV cache.
        state: a `State` of any number of rows, as shapes; control decides what is gathered of a row.
        page_shards: as for `make_plan`.
    """
    sampled, vocabulary = math.ceil(rows / devices), config.vocab_size  # rows that a device samples
    # Logits three times over, on a mesh also as they are sent and received, and the activations of a layer.
    logits = (3 if devices == 1 else 5) * sampled * vocabulary
    inner = max(config.intermediate_size, config.moe_intermediate_size) // devices
    # Of a mixture, what the experts of a row read and return.
    hidden_states = 2 + 3 * config.num_experts_per_tok * (config.num_local_experts > 0)
    temporary = 4 * (logits + rows * (inner + hidden_states * config.hidden_size))
    if devices == 1:
        return StepNeeds(temporary, None, ())
    itemsize, hidden = jnp.dtype(dtypes.weights).itemsize, (rows, 1, config.hidden_size)
    total = Collective("all-reduce", (hidden,), math.prod(hidden) * itemsize)
    exchange = Collective("all-to-all", ((sampled, vocabulary),), sampled * vocabulary * 4)
    # The shapes of `phases.emission.Decision`, whose flag is sent as an integer like the status.
    decision = state.status, state.token, state.measured, state.action, state.control
    gathered = [
        Collective("all-gather", ((sampled * devices, size),), sampled * devices * size * 4)
        for size in numbers_by_type(decision).values()
    ]
    block, layers = FAMILIES[config.architecture].block, range(config.num_hidden_layers)
    sums = [x for layer in layers for x in sums_of(block(config, layer), total, rows)]
    divided = of_divided_pages(config, devices, rows, itemsize, page_shards)
    return StepNeeds(temporary, None, (*sums, total, *divided, exchange, *gathered))


def sums_of(block: BlockSpec, total: Collective, rows: int) -> list[Collective]:
    """The sums of a layer over the devices of a mesh.

    Args:
        block: the layer.
        total: the sum of one array of hidden states.
        rows: number of rows of the step.
    """
    # Routed experts and those that all tokens share are summed together, each by itself.
    several = 2 if getattr(block.mlp, "shared", None) is not None else 1
    sums = [total._replace(shapes=total.shapes * several, num_bytes=total.num_bytes * several)]
    if not block.placement.startswith("parallel"):  # else both blocks are summed together
        sums.append(total)
    if getattr(block.attention, "norm_span", "head") == "all":  # the mean squares of queries and of keys
        sums.append(Collective("all-reduce", ((rows, 1, 1),) * 2, 2 * rows * 4))
    return sums


def of_divided_pages(
    config: Config, devices: int, rows: int, itemsize: int, page_shards: int | None
) -> tuple[Collective, ...]:
    """The collectives of a dense decode step between chips that divide the pages of a KV head.

    Args:
        config: the model's configuration.
        devices: number of devices of a copy of the model.
        rows: number of rows of the step.
        itemsize: bytes of a number of an activation.
        page_shards: as for `make_plan`.
    """
    shards = check_page_shards(config, devices, page_shards)
    if shards == 1:
        return ()
    shape = Decoder(config).shape
    heads, size = shape.heads // devices * shards, shape.head_dim  # query heads of the group
    columns = (rows, 1, (heads + 2) * size)  # of queries, and of a key and a value
    parts = (rows, heads, size + 1)  # outputs, each with its log-sum-exp
    gathered = Collective("all-gather", (columns,), math.prod(columns) * itemsize, shards)
    exchanged = Collective("all-to-all", (parts,), math.prod(parts) * 4, shards)
    return (gathered, exchanged) * config.num_hidden_layers


def from_program(compiled: jax.stages.Compiled) -> StepNeeds:
    """The needs of a compiled step, as the compiler reports them."""
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    return StepNeeds(memory.temp_size_in_bytes, memory.argument_size_in_bytes, tuple(collectives(text)))
