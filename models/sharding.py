"""Sharding of a model's parameters over a mesh: a PartitionSpec for each array.

Heads, feed-forward blocks and the vocabulary are divided over tensor and expert together. Each position along
expert holds some of the experts, which are divided over tensor. A pass needs two sums over all devices per
layer, after the output projection of the attention and after that of the feed-forward block, and one sum for
the embedding. It leaves each device with the logits of its part of the vocabulary.

Where there are more devices than KV heads, several have the same one. They divide the columns of its
projections among them, and its pages (`mesh.page_shards`), or have copies of both, as in vLLM. The queries of
a KV head are divided over the devices that have it.

Source: Shoeybi et al., Megatron-LM (2019; arXiv 1909.08053), section 3.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from entropic_jax.mesh import AXES, DATA, EXPERT, SHARDS, TENSOR
from entropic_jax.state.layer_stacks import LayerPattern

from .block_spec import BlockSpec, ExpertsSpec, LatentAttentionSpec
from .config import Config, ModelError
from .families import FAMILIES

# Modules whose matrices [in, out] are divided by outputs, and those divided by inputs.
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROW_PARALLEL = ("o_proj", "down_proj")
EXPERTS = "experts"  # the module whose matrices are one per expert
PER_HEAD = ("sinks",)  # arrays with a number per head
HEAD_NORMS = ("q_norm", "k_norm")  # with a vector per head, or one that all devices have
VOCABULARY_PARALLEL = ("embed_tokens",)
# Modules whose arrays every device has: norms of one vector, and the router of experts. So has every module
# whose name ends with NORM.
REPLICATED = ("norm", "q_norm", "k_norm", "gate", "attention_output_norm", "mlp_output_norm", "act_fn")
NORM = "layernorm"
BOTH_SIZES = "tensor_parallel_size times expert_parallel_size"


def partition_spec(path: tuple[Any, ...], ndim: int) -> P:
    """The PartitionSpec of a parameter.

    Args:
        path: the path of the array in `Params`.
        ndim: axes of the array; a matrix per expert has three.

    Raises:
        ModelError: the module is not in the lists above.
    """
    module, kind = path[-2], path[-1]
    if module in VOCABULARY_PARALLEL:
        return P(SHARDS)
    if EXPERTS in path and module in COLUMN_PARALLEL:
        return P(EXPERT, *(None,) * (ndim - 2), TENSOR)
    if EXPERTS in path and module in ROW_PARALLEL:
        return P(EXPERT, TENSOR, None) if ndim == 3 else P(EXPERT)
    if module in COLUMN_PARALLEL:
        return P(*(None,) * (ndim - 1), SHARDS)
    if module in ROW_PARALLEL and (kind == "kernel" or (kind == "scale" and ndim > 1)):
        return P(*(None,) * (ndim - 2), SHARDS, None)
    if kind in PER_HEAD or (module in HEAD_NORMS and ndim == 2):
        return P(SHARDS)
    # A vector that is added after the sum over the devices, or that every device needs.
    if (ndim == 1 and module in (*ROW_PARALLEL, *REPLICATED)) or str(module).endswith(NORM):
        return P()
    if module in ("gate", "shared_expert_gate"):
        return P()
    name = ".".join(map(str, path))
    raise ModelError(f"mesh must be None for a model with {name}, which programs on a mesh cannot divide yet")


def model_devices(mesh: Mesh | AbstractMesh | None) -> int:
    """Devices that a copy of a model is divided over; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[TENSOR] * mesh.shape[EXPERT]


def partition_specs(shapes: Any, devices: int, pattern: LayerPattern | None = None) -> Any:
    """The PartitionSpec of every array of a model's `Params`; nothing is divided over one device.

    Args:
        shapes: the shapes of the arrays, in the structure of `Params`.
        devices: number of devices of a copy of the model.
        pattern: the pattern of the layers that are stacked (`layer_stack`); None without any.
    """
    begin, period = (0, 0) if pattern is None else (pattern.prefix, pattern.period)
    stacked = [("layers", number) for number in range(begin, begin + period)]

    def spec(path: tuple[Any, ...], x: Any) -> P:
        if devices == 1:
            return P()
        names = tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)
        if names[:2] not in stacked:
            return partition_spec(names, x.ndim)
        return P(None, *partition_spec(names, x.ndim - 1))

    return jax.tree_util.tree_map_with_path(spec, shapes)


def shardings(shapes: Any, mesh: Mesh, pattern: LayerPattern | None = None) -> Any:
    """The NamedSharding of every array of a model's `Params`.

    Args:
        shapes: the shapes of the arrays, in the structure of `Params`.
        mesh: the mesh of the devices that hold them.
        pattern: the pattern of the layers that are stacked; None without any.
    """
    specs = partition_specs(shapes, model_devices(mesh), pattern)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def local_region(
    path: tuple[Any, ...],
    shape: tuple[int, ...],
    mesh: Mesh | None,
    devices: Collection[jax.Device] | None = None,
) -> tuple[slice, ...]:
    """The part of a parameter that holds what these devices have of it, as one slice per axis.

    Args:
        path: the path of the array in `Params`.
        shape: the shape of the array.
        mesh: over which it is divided; None for a device that has all of it.
        devices: some of the mesh's; None for those of this process.

    >>> local_region(("norm", "weight"), (8,), None)
    (slice(0, 8, None),)
    """
    if mesh is None or model_devices(mesh) == 1:
        return tuple(slice(0, size) for size in shape)
    sharding = NamedSharding(mesh, partition_spec(path, len(shape)))
    local = mesh.local_devices if devices is None else devices
    indices = [index for device, index in sharding.devices_indices_map(shape).items() if device in local]
    bounds = [
        [part.indices(size) for part in parts]
        for size, parts in zip(shape, zip(*indices, strict=True), strict=True)
    ]
    return tuple(slice(min(b[0] for b in axis), max(b[1] for b in axis)) for axis in bounds)


def kv_head_sharers(config: Config, devices: int) -> int:
    """How many devices have the same KV head; 1 where there are not more devices than KV heads.

    Args:
        config: the model's configuration, which `check_sizes` accepts.
        devices: number of devices of a copy of the model.
    """
    return max(1, devices // config.num_key_value_heads)


def check_page_shards(config: Config, devices: int, page_shards: int | None = None) -> int:
    """How many of the devices that have the same KV head divide it and its pages; the others have copies.

    Args:
        config: the model's configuration, which `check_sizes` accepts.
        devices: number of devices of a copy of the model.
        page_shards: as it was asked for; None for all of these devices, or 1 where `why_copied` says why.

    Raises:
        ModelError: it does not divide the number of these devices, or the head cannot be divided.
    """
    sharers = kv_head_sharers(config, devices)
    reason = why_copied(config, sharers if page_shards is None else page_shards)
    if page_shards is None:
        return sharers if reason is None else 1
    name = "decode_context_parallel_size"
    if page_shards < 1 or sharers % page_shards:
        raise ModelError(
            f"{name} must divide {sharers}, the devices that have the same KV head, of {devices} devices and "
            f"{config.num_key_value_heads} KV heads; got {page_shards}"
        )
    if reason is not None:
        raise ModelError(f"{name} must be 1 for {config.architecture}: {reason}; got {page_shards}")
    return page_shards


def why_copied(config: Config, page_shards: int) -> str | None:
    """Why so many devices cannot divide a KV head, so that they have copies of it; None if they can.

    Args:
        config: the model's configuration.
        page_shards: devices that would divide a KV head.
    """
    if page_shards <= 1:
        return None
    block = FAMILIES[config.architecture].block
    for attention in (block(config, layer).attention for layer in range(config.num_hidden_layers)):
        if isinstance(attention, LatentAttentionSpec):
            return "all heads share one latent vector"
        if attention.head_norm is not None and attention.norm_span == "each":
            return "its norms of queries and keys have a vector per head"
        if attention.head_dim % page_shards:
            return f"head_dim, {attention.head_dim}, is not divided by {page_shards}"
    return None


def kv_head_copies(config: Config, devices: int, page_shards: int | None = None) -> int:
    """How many copies there are of each KV head, of its projections and its pages.

    Args:
        config: the model's configuration, which `check_sizes` accepts.
        devices: number of devices of a copy of the model.
        page_shards: as for `check_page_shards`.
    """
    return kv_head_sharers(config, devices) // check_page_shards(config, devices, page_shards)


def with_kv_head_copies(config: Config, devices: int, page_shards: int | None = None) -> Config:
    """The configuration of the model that the devices run: copies of a KV head count as KV heads.

    Args:
        config: the model's configuration.
        devices: number of devices of a copy of the model.
        page_shards: as for `check_page_shards`.
    """
    copies = kv_head_copies(config, devices, page_shards)
    return (
        config
        if copies == 1
        else dataclasses.replace(config, num_key_value_heads=copies * config.num_key_value_heads)
    )


def copy_kv_heads(x: Any, shape: tuple[int, ...], kv_heads: int) -> Any:
    """An array of the model with its KV heads copied, each next to the others of its group.

    Args:
        x: an array of NumPy or JAX; KV heads follow each other along one of its axes, or it has none.
        shape: its shape with copies, which differs along the axis of the KV heads.
        kv_heads: number of KV heads of the model.
    """
    for axis, (size, copied_size) in enumerate(zip(x.shape, shape, strict=True)):
        if size != copied_size:
            heads = x.reshape(*x.shape[:axis], kv_heads, size // kv_heads, *x.shape[axis + 1 :])
            repeat = np.repeat if isinstance(x, np.ndarray) else jnp.repeat
            return repeat(heads, copied_size // size, axis).reshape(shape)
    return x


def copied(x: jax.Array, place: jax.Device | Mesh) -> jax.Array:
    """An array on other devices, each of which gets one of its shards.

    Args:
        x: an array on one device, or on a mesh of as many devices as `place`.
        place: the device, or the mesh.
    """
    source: Any = x.sharding
    if isinstance(place, Mesh):
        target = NamedSharding(place, source.spec)
        order, devices = list(source.mesh.devices.flat), list(place.devices.flat)
    else:
        target, order, devices = SingleDeviceSharding(place), list(x.devices()), [place]
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    # What NumPy sees is the memory of a CPU device, and another one takes it over as it is.
    data = [np.asarray(shards[d]) if d.platform == "cpu" else shards[d] for d in order]
    parts = [jax.device_put(part, device) for part, device in zip(data, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, target, parts)


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Raise ModelError, naming what does not fit, unless the model can be divided over the mesh."""
    if mesh.axis_names != AXES:
        raise ModelError(f"mesh must have the axes {', '.join(AXES)}; got {', '.join(mesh.axis_names)}")
    if mesh.shape[DATA] > 1:
        raise ModelError(f"mesh must have one device along {DATA}; got {mesh.shape[DATA]}")
    check_sizes(config, mesh.shape[TENSOR], mesh.shape[EXPERT])


def check_groups(shapes: Any, mesh: Mesh | AbstractMesh) -> None:
    """Raise ModelError unless every device gets whole groups of the inputs of quantised matrices.

    Args:
        shapes: the shapes of the quantised model's parameters.
        mesh: over which they are divided.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(shapes)
    for path, leaf in leaves:
        module, kind = path[-2].key, path[-1].key
        of_experts = any(getattr(key, "key", None) == EXPERTS for key in path)
        devices = mesh.shape[TENSOR] if of_experts else model_devices(mesh)
        axes = leaf.ndim - of_experts  # of one matrix's scales
        if module in ROW_PARALLEL and kind == "scale" and axes > 1 and leaf.shape[-2] % devices:
            name = "tensor_parallel_size" if devices == mesh.shape[TENSOR] else BOTH_SIZES
            raise ModelError(
                f"{name} must divide the {leaf.shape[-2]} groups of inputs of {module}, each "
                f"of which has a scale; got {devices}"
            )


def check_sizes(config: Config, size: int, experts: int = 1) -> None:
    """Raise ModelError unless the heads, the feed-forward blocks and the vocabulary can be divided.

    Args:
        config: the model's configuration.
        size: devices along tensor.
        experts: devices along expert.
    """
    family, shards = FAMILIES[config.architecture], size * experts
    blocks = [family.block(config, layer) for layer in range(config.num_hidden_layers)]
    reason = next(filter(None, map(undivided, blocks)), None)
    names = "tensor_parallel_size" if experts == 1 else "expert_parallel_size"
    if shards > 1 and reason is not None:
        raise ModelError(f"{names} must be 1 for {config.architecture}: {reason}; got {max(size, experts)}")
    routed = [block.mlp for block in blocks if isinstance(block.mlp, ExpertsSpec)]
    if experts > 1 and not routed:
        raise ModelError(
            f"expert_parallel_size must be 1 for {config.architecture}, which has no experts; got {experts}"
        )
    for mlp in routed:
        if mlp.experts % experts:
            raise ModelError(
                f"expert_parallel_size must divide num_local_experts, {mlp.experts}; got {experts}"
            )
    if size > 1 and experts > 1:
        names = BOTH_SIZES
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads % shards and (shards % kv_heads or heads % shards):
        raise ModelError(
            f"{names} must divide num_key_value_heads, {kv_heads}, or be a multiple of it that divides "
            f"num_attention_heads, {heads}; got {shards}"
        )
    divided = {"vocab_size": (names, config.vocab_size, shards)}
    if len(routed) < len(blocks):
        width = "intermediate_size_mlp" if config.intermediate_size_mlp else "intermediate_size"
        divided[width] = (names, getattr(config, width), shards)
    for mlp in routed:
        inner = "moe_intermediate_size" if mlp.inner == config.moe_intermediate_size else "intermediate_size"
        divided.setdefault(inner, ("tensor_parallel_size", mlp.inner, size))
        if mlp.shared is not None:
            divided["shared_expert_intermediate_size"] = (names, mlp.shared.inner, shards)
    for name, (option, value, number) in divided.items():
        if value % number:
            raise ModelError(f"{option} must divide {name}, {value}; got {number}")


def undivided(block: BlockSpec) -> str | None:
    """Why a layer cannot be divided over a mesh; None if it can."""
    attention = block.attention
    if isinstance(attention, LatentAttentionSpec):
        return "all heads share one latent vector"
    norm = attention.head_norm
    if norm is not None and attention.norm_span == "all" and norm.kind != "rms":
        return "the layer norms of queries and keys span several heads"
    return None
