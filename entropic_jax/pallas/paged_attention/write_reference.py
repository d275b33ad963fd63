"""Writing to the KV cache in plain JAX: one key and one value per row, and the page summaries."""

from typing import Any

import jax
import jax.numpy as jnp

from ...mesh.devices import default_device
from .quantised import Quantised, quantise, stored
from .reference import LANES

UNROLLED_ROWS = 16  # up to this number of rows, unrolled writes are cheaper than a loop over rows


def write(
    tiles: Any, summaries: Any, k: jax.Array, v: jax.Array, page: jax.Array, slot: jax.Array
) -> tuple[Any, Any]:
    """Every pool is updated in place. See the package for the contract."""
    key, value = (stored(x, pool) for pool, x in zip(tiles, (k, v), strict=True))
    tiles = tuple(_put(pool, x, page, slot) for pool, x in zip(tiles, (k, v), strict=True))
    joins = (jnp.minimum, jnp.maximum, jnp.add, jnp.maximum)
    new = (key, key, key, jnp.linalg.norm(value, axis=-1))
    parts = zip(summaries, new, joins, strict=True)
    return tiles, tuple(update_summary(pool, x, page, slot, join) for pool, x, join in parts)


def update_summary(pool: Any, x: jax.Array, page: jax.Array, slot: jax.Array, join: Any) -> jax.Array:
    """Update one summary of each row's page with x.

    Args:
        pool: the summary of all pages `[pool, …]`.
        x: `[rows, …]`.
        page, slot: int32 `[rows]`, where x belongs; slot 0 resets the summary.
        join: combines the old summary with x, e.g. `jnp.minimum`.
    """
    if default_device().platform != "cpu":
        fresh = (slot == 0).reshape(-1, *(1,) * (x.ndim - 1))
        return pool.at[page].set(jnp.where(fresh, x, join(pool[page], x)))

    def row(i, pool):
        old = jax.lax.dynamic_index_in_dim(pool, page[i], keepdims=False)
        new = jnp.where(slot[i] == 0, x[i], join(old, x[i]))
        return jax.lax.dynamic_update_slice(pool, new[None], (page[i], *(0,) * new.ndim))

    return _over_rows(x.shape[0], row, pool)


def _put(pool: Any, x, page, slot) -> Any:
    if isinstance(pool, Quantised):
        tile, scale = quantise(x, pool.dtype)
        column = pool.scale.swapaxes(2, 3)  # as a tile with one number per position
        scales = _put(column, scale[..., None], page, slot).swapaxes(2, 3)
        return Quantised(_put(pool.tiles, tile, page, slot), scales)
    x = x.astype(pool.dtype)
    platform = default_device().platform
    if platform == "tpu" and pool.shape[3] % LANES:
        # The pool may have positions along the lanes, where a scatter would copy it: write whole pages.
        in_slot = jnp.arange(pool.shape[2])[:, None] == slot[:, None, None, None]
        return pool.at[page].set(jnp.where(in_slot, x[:, :, None], pool[page]))
    if platform != "cpu":
        return pool.at[page, :, slot].set(x)

    def put(i, pool):
        return jax.lax.dynamic_update_slice(pool, x[i][None, :, None], (page[i], 0, slot[i], 0))

    return _over_rows(x.shape[0], put, pool)


def _over_rows(rows: int, body, pool):
    # XLA's CPU backend copies the array that it scatters into. On other platforms each slice is a launch.
    return jax.lax.fori_loop(0, rows, body, pool, unroll=rows if rows <= UNROLLED_ROWS else 1)
