"""Page shards: the devices that share a KV head divide its pages among them.

Where a mesh has more devices than the model has KV heads, several devices have the same KV head. They divide
its projections, and the queries that read it. Page p of the pool is then on device p mod n of the n devices
of such a group, as page p // n of its own pool. Which page a row gets follows from the free stack, so a group
holds as many pages in all as its devices have room for, whatever rows there are. Each device attends with the
queries of the whole group to its own pages, and the parts are merged by their log-sum-exps.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from .collectives import SHARDS, num_shards


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PageShards:
    """How the pages of a KV head are divided: over groups of `size` devices that follow each other."""

    size: int

    def local_pages(self, pages: int) -> int:
        """Pages of a device, of as many in the pool.

        >>> PageShards(4).local_pages(9)
        3
        """
        return -(-pages // self.size)

    def holds(self, page: jax.Array) -> jax.Array:
        """Whether pages int32 `[…]` of the pool are on this device."""
        return jax.lax.rem(page, jnp.int32(self.size)) == self.number

    def place(self, page: jax.Array) -> jax.Array:
        """The number of pages int32 `[…]` on the device that has them."""
        return jax.lax.div(page, jnp.int32(self.size))

    @property
    def number(self) -> jax.Array:
        """The number of this device in its group, int32 `[]`."""
        return jax.lax.rem(jax.lax.axis_index(SHARDS), jnp.int32(self.size))

    @property
    def groups(self) -> list[list[int]]:
        """The numbers of the devices of each group."""
        devices = range(num_shards())
        return [list(devices[first : first + self.size]) for first in devices[:: self.size]]

    def gather_columns(self, *arrays: jax.Array) -> list[jax.Array]:
        """Arrays `[…, columns]` with the columns of all devices of the group, by one collective."""
        together = jnp.concatenate(arrays, -1)
        gathered = jax.lax.all_gather(together, SHARDS, axis_index_groups=self.groups)
        ends = list(itertools.accumulate(x.shape[-1] for x in arrays[:-1]))
        parts = jnp.split(jnp.moveaxis(gathered, 0, -2), ends, -1)  # each […, size, columns]
        return [x.reshape(*x.shape[:-2], -1) for x in parts]

    def exchange(self, x: jax.Array, axis: int) -> jax.Array:
        """Exchanges parts between the devices of a group: those for this device, joined along the axis.

        Args:
            x: with an axis of `size` entries, one for each device of the group.
            axis: the number of that axis.
        """
        return jax.lax.all_to_all(x, SHARDS, axis, axis, axis_index_groups=self.groups)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over the group."""
        return jax.lax.psum(x, SHARDS, axis_index_groups=self.groups)
