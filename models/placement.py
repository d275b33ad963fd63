"""A model that is in memory on other devices: divided over a mesh, or copied."""

import dataclasses

import jax
from jax.sharding import Mesh

from . import sharding
from .decoder import structure
from .embedding import EMBEDDING_MODULE, HEAD_MODULE, has_one_table, with_two_tables
from .model import Model, check_layout


def shard(model: Model, mesh: Mesh, page_shards: int | None = None) -> Model:
    """The model with its weights divided over a mesh.

    Args:
        model: the model to divide.
        mesh: over which it is divided.
        page_shards: as for `load`.

    Raises:
        ModelError: it cannot be divided over the mesh.
    """
    check_layout(model, "divided")
    sharding.check_mesh(model.config, mesh)
    config = sharding.with_kv_head_copies(model.config, sharding.model_devices(mesh), page_shards)
    shapes = structure(config, model.quantization)[1]
    kv_heads = model.config.num_key_value_heads
    params = jax.tree.map(
        lambda x, shape: sharding.copy_kv_heads(x, shape.shape, kv_heads),
        with_two_tables(model.params, model.config),
        shapes,
    )
    params = jax.device_put(params, sharding.shardings(params, mesh))
    return dataclasses.replace(model, params=params, mesh=mesh, page_shards=page_shards)


def copied(model: Model, place: jax.Device | Mesh) -> Model:
    """The model on other devices, of which there are as many.

    On a CPU, whose devices share their memory, the copy shares that of the model.

    Args:
        model: the model to copy.
        place: the device, or the mesh for a model that is divided over one.
    """
    mesh = place if isinstance(place, Mesh) else None
    params = jax.tree.map(lambda x: sharding.copied(x, place), model.params)
    if has_one_table(model.params, model.config):
        params[EMBEDDING_MODULE]["weight"] = params[HEAD_MODULE]["kernel"]
    return dataclasses.replace(model, params=params, mesh=mesh)
