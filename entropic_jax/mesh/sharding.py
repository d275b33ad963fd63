"""Sharding of the loop's state over a mesh, and the programs of the loop on one.

The page pool is divided over the shards by KV heads: keys, values and page summaries, and with them the
page lists that are chosen per KV head. Where devices share a KV head, the pool has an entry along that axis
for each of them (`page_shards`). Everything else of the state is the same on every device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .collectives import SHARDS

T = TypeVar("T")

# Fields of `State` and `Cache` whose arrays have the KV heads as their second axis, if they have two.
PER_KV_HEAD = ("layers", "page_policy_state")


def partition_specs(tree: T) -> T:
    """The PartitionSpec of every array of a `State`, a `Cache`, or a pytree that contains one."""

    def spec(path: tuple[Any, ...], x: Any) -> P:
        per_head = any(getattr(key, "name", None) in PER_KV_HEAD for key in path) and x.ndim > 1
        return P(None, SHARDS) if per_head else P()

    return jax.tree_util.tree_map_with_path(spec, tree)


def place(tree: T, mesh: Mesh | None) -> T:
    """Puts each array of a pytree that contains a `State` or a `Cache` on the devices that hold it."""
    if mesh is None:
        return tree
    return jax.device_put(tree, shardings(tree, mesh))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The NamedSharding of every array of a pytree that contains a `State` or a `Cache`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(tree))


def constrain(tree: T, mesh: Mesh) -> T:
    """The pytree, within a program, divided as `place` divides it."""
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh))


def create(function: Callable[[], T], mesh: Mesh | None) -> T:
    """`function()`, a new `State` or `Cache`, allocated shard by shard: no device ever holds all of it."""
    return creator(function, mesh)()


def creator(function: Callable[[], T], mesh: Mesh | None) -> Callable[[], T]:
    """`create` as a function of nothing, which is traced once."""
    if mesh is None:
        return function
    one_of_several = partial(jax.sharding.use_abstract_mesh, mesh.abstract_mesh)  # kernels of one decline
    with one_of_several():
        program = jax.jit(function, out_shardings=shardings(jax.eval_shape(function), mesh))

    def call() -> T:
        with one_of_several():
            return program()

    return call


def launch(decoder: Any, program: Callable[..., Any], params: Any, state: Any, *rest: Any) -> Any:
    """`program(params, state, *rest)`, on every device of the decoder's mesh if it has one.

    Args:
        decoder: the model's pure functions.
        program: function of parameters, a state and anything else, which returns a state of the same
            structure and anything else. The rest, on either side, is the same on all devices.
        params: the model's parameters.
        state: a pytree that contains a `State`.
        *rest: further arguments.
    """
    mesh = getattr(decoder, "mesh", None)
    if mesh is None:
        return program(params, state, *rest)
    specs = partition_specs(state)
    sharded = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(decoder.partition_specs, specs, *(P() for _ in rest)),
        out_specs=(specs, P()),
        check_vma=False,
    )
    return sharded(params, state, *rest)
