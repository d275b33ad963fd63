"""Ahead-of-time compilation of the programs of a server for TPUs or GPUs that this machine does not have.

libtpu compiles for a topology by name, the CUDA plugin of JAX for a description of a GPU, and no weights
exist: arguments are shapes. What the compiler reports is what a chip would hold and exchange.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from entropic_jax import loop
from entropic_jax.mesh import TENSOR, make_mesh, sharding
from entropic_jax.methods.presets import Preset
from entropic_jax.models import Config
from entropic_jax.models import sharding as model_sharding
from entropic_jax.models.decoder import Decoder, structure
from entropic_jax.models.layer_stack import copied_experts, scans_layers
from entropic_jax.models.quantisation import stored_dtype
from entropic_jax.state.cache import allocate
from entropic_jax.state.sampling_parameters import parameters

from . import gpu_target
from .chips import Topology, topology

# libtpu must neither ask the cloud for a description of this machine, nor claim a device, nor report that
# there is none.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_MIN_LOG_LEVEL": "3",
}


class Batch(NamedTuple):
    """Sizes of the batch that a step is compiled for."""

    rows: int
    context: int  # positions of a row, at most
    page_size: int
    pages: int  # of the pool


class Program(NamedTuple):
    """A program of a server."""

    make: Callable[[Any, Preset], Callable[..., Any]]  # for a decoder; of parameters, state and `others`
    others: tuple[Any, ...] = ()  # further arguments, as shapes
    speculator: Any = None  # makes the drafts that it verifies; None for none


def _step(decoder: Any, preset: Preset) -> Callable[..., Any]:
    return lambda params, state: loop.step(decoder, params, preset.controller, state, width=preset.width)


DECODE_STEP = Program(_step)


def devices_of(name: str) -> list[jax.Device]:
    """The devices of a topology by name. Raises RuntimeError where no compiler for it is installed."""
    slice_ = topology(name)
    if slice_.chip.platform == "gpu":
        return _gpus(slice_)
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        # A chip of v4 has two cores, which are one device together.
        options = {"chip_config_name": slice_.chip.configuration} if slice_.chip.configuration else {}
        described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        devices = list(described.devices)
    except Exception as error:  # the plugin raises what it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RuntimeError(f"libtpu must be installed and know {name}: {reason}") from None
    if any(device.core_on_chip for device in devices):
        raise RuntimeError(
            f"libtpu must have a device for each chip of {name}; it has {len(devices)}, one for each core"
        )
    return devices


def _gpus(host: Topology) -> list[jax.Device]:
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=gpu_target.described(host.chip), topology=f"1x1x{host.devices}"
        )
    except Exception as error:  # the plugin raises what it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RuntimeError(f"jax[cuda13] must be installed: {reason}") from None
    return list(described.devices)


def decoder_of(
    config: Config,
    mesh: Mesh | None = None,
    stacked: bool | None = None,
    page_shards: int = 1,
    quantization: str | None = None,
) -> Decoder:
    """The functions of a model, as they are compiled.

    Args:
        config: the model's configuration.
        mesh: the mesh that the model is divided over; None for one device.
        stacked: whether the step scans over layers; None: as a server's does on TPUs and GPUs.
        page_shards: devices that divide the pages of a KV head.
        quantization: the quantization of the weights.
    """
    if stacked is None:
        divisor = 1 if mesh is None else mesh.shape[TENSOR]
        stacked = scans_layers("tpu") and not copied_experts(structure(config)[1]["layers"], divisor)
    return Decoder(config, mesh, quantization, stacked=stacked, page_shards=page_shards)


def state_shapes(
    config: Config,
    batch: Batch,
    dtype: Any,
    preset: Preset,
    stacked: bool | None = None,
    page_shards: int = 1,
    speculator: Any = None,
) -> Any:
    """The `State` of a batch, as shapes.

    Args:
        config: the model's configuration.
        batch: sizes of the batch.
        dtype: the dtype of the KV cache.
        preset: the preset of control.
        stacked: whether the step scans over layers; None: as a server's does on TPUs and GPUs.
        page_shards: devices that divide the pages of a KV head.
        speculator: makes the drafts that steps verify; None for steps of one token.
    """
    decoder = decoder_of(config, stacked=stacked, page_shards=page_shards)

    def start() -> Any:
        pool = allocate(
            decoder.shape,
            batch.rows,
            batch.context,
            pages=batch.pages,
            page_size=batch.page_size,
            dtype=dtype,
        )
        return loop.start(
            decoder,
            None,
            preset.controller,
            pool,
            [[]] * batch.rows,
            key=jax.random.key(0),
            max_tokens=0,
            sample=parameters(batch.rows),
            page_policy=preset.page_policy,
            speculator=speculator,
        )

    return jax.eval_shape(start)


def lower_step(
    config: Config,
    devices: list[jax.Device],
    batch: Batch,
    dtypes: tuple[Any, ...],
    preset: Preset,
    experts: int = 1,
    stacked: bool | None = None,
    page_shards: int | None = None,
    program: Program = DECODE_STEP,
) -> jax.stages.Lowered:
    """Trace and lower a program, divided over all of the devices; `compiled` compiles it.

    Args:
        config: the model's configuration.
        devices: the devices of a topology, see `devices_of`.
        batch: sizes of the batch.
        dtypes: the dtypes of the weights, and of the KV cache; and the quantization, if there is one.
        preset: the preset of control.
        experts: groups of devices over which experts are divided.
        stacked: whether the step scans over layers; None: as a server's does on TPUs and GPUs.
        page_shards: devices that divide a KV head, of those that have the same one; None for all that can.
        program: the program to lower, a decode step if nothing else is stated.
    """
    mesh = make_mesh(len(devices) // experts, devices, expert_parallel_size=experts)
    model_sharding.check_mesh(config, mesh)
    shards = model_sharding.check_page_shards(config, len(devices), page_shards)
    config = model_sharding.with_kv_head_copies(config, len(devices), shards)
    decoder = decoder_of(config, mesh, stacked, shards, *dtypes[2:])

    def placed(x: Any, place: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place)

    shapes = decoder.structure[1]
    places = model_sharding.shardings(shapes, mesh, decoder.pattern)

    def stored(path: tuple[Any, ...], x: Any, place: Any) -> jax.ShapeDtypeStruct:
        return placed(x, place, stored_dtype(path, x, jnp.dtype(dtypes[0])))

    params = jax.tree_util.tree_map_with_path(stored, shapes, places)
    state = state_shapes(config, batch, dtypes[1], preset, decoder.stacked, shards, program.speculator)
    state = jax.tree.map(placed, state, sharding.shardings(state, mesh))
    launch = partial(sharding.launch, decoder, program.make(decoder, preset))
    with without_cache(), jax.default_device(devices[0]):
        return jax.jit(launch, donate_argnums=1).lower(params, state, *program.others)


def compiled(step: jax.stages.Lowered) -> jax.stages.Compiled:
    """The program of a step that `lower_step` has lowered."""
    with without_cache():
        return step.compile()


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Switches off the persistent cache: its entries cannot be loaded for a device that is not here."""
    settings: Any = jax.config
    before = settings.jax_enable_compilation_cache
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        compilation_cache.reset_cache()
        jax.config.update("jax_enable_compilation_cache", before)
