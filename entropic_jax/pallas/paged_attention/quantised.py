"""Pages of keys and values in 8 bits: int8 or float8_e4m3fn, with a scale for each position and KV head.

    x ≈ scale · tile,   scale = max |x| / largest,   largest = 127 (int8), 448 (float8_e4m3fn)

The scale depends on the vector that is stored alone: it does not matter whether a text comes at once, in
chunks or token by token, and nothing is quantised twice. In the attention it multiplies a score and a
weight, not a tile. It adds 4 bytes to head_dim.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class Quantised(NamedTuple):
    """A pool of pages in 8 bits; it stands wherever a plain array of the shape of its tiles can."""

    tiles: Any  # int8 or float8_e4m3fn [pool, kv_heads, page_size, head_dim]
    scale: Any  # float32 [pool, kv_heads, 1, page_size]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tiles.shape

    @property
    def dtype(self) -> Any:
        return self.tiles.dtype


Pool = jax.Array | Quantised


def zeros(shape: tuple[int, int, int, int], dtype: Any) -> Pool:
    """An empty pool; of 8 bits if the dtype is."""
    tiles = jnp.zeros(shape, dtype)
    if tiles.dtype.name not in LARGEST:
        return tiles
    return Quantised(tiles, jnp.zeros((*shape[:2], 1, shape[2]), jnp.float32))


def reads_as(pool: Pool) -> Any:
    """The dtype in which whoever takes tiles out of a pool should hold them."""
    return jnp.dtype("float32") if isinstance(pool, Quantised) else pool.dtype


def bytes_per_number(dtype: Any, head_dim: int) -> float:
    """What a number of a key or value takes in memory, its share of the scale included.

    >>> bytes_per_number("bfloat16", 128), bytes_per_number("int8", 128)
    (2.0, 1.03125)
    """
    dtype = jnp.dtype(dtype)
    return dtype.itemsize + (4 / head_dim if dtype.name in LARGEST else 0.0)


def gather(pool: Pool, place: Any, dtype: Any) -> jax.Array:
    """Tiles `[…, page_size, head_dim]` of a pool, at `place` as in `pool[place]`, in the dtype."""
    if isinstance(pool, Quantised):
        scale = pool.scale[place].swapaxes(-1, -2)
        return (pool.tiles[place].astype(jnp.float32) * scale).astype(dtype)
    return pool[place].astype(dtype)


def flat(pool: Pool) -> Pool:
    """The tiles of a pool in a row, that of a page and KV head at page · KV heads + KV head.

    Tiles are gathered by one number: by two, XLA's CPU backend takes several times as long.
    """
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pool)


def quantise(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The tile and the scale of vectors `[…, head_dim]`: in the dtype, and float32 `[…]`.

    A vector with NaN or infinity has one in its scale, too.
    """
    x, dtype = x.astype(jnp.float32), jnp.dtype(dtype)
    largest = LARGEST[dtype.name]
    extent = jnp.abs(x).max(-1)
    # A product, as XLA would make of the quotient by a constant: kernels come to the same bits.
    scale = jnp.where(extent == 0, 1.0, extent * jnp.float32(1 / largest))
    scaled = jnp.clip(x / scale[..., None], -largest, largest)
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scale


def stored(x: jax.Array, pool: Pool) -> jax.Array:
    """What vectors `[…, head_dim]` are read as once they are stored in the pool, float32."""
    if not isinstance(pool, Quantised):
        return x.astype(pool.dtype).astype(jnp.float32)
    tile, scale = quantise(x, pool.dtype)
    return tile.astype(jnp.float32) * scale[..., None]


def put_pages(pool: Pool, page: jax.Array, x: jax.Array, new: jax.Array) -> tuple[Pool, jax.Array]:
    """Store x `[…, kv_heads, page_size, head_dim]` in pages `[…]` where bool `[…, page_size]` says `new`.

    What is not new stays as it is, bit for bit. Returns the pool, and what the pages are read as, float32.
    """
    fresh = new[..., None, :, None]
    if not isinstance(pool, Quantised):
        merged = jnp.where(fresh, x.astype(pool.dtype), pool[page])
        return pool.at[page].set(merged), merged.astype(jnp.float32)
    tiles, scale = quantise(x, pool.dtype)
    tiles = jnp.where(fresh, tiles, pool.tiles[page])
    scale = jnp.where(new[..., None, None, :], scale[..., None, :], pool.scale[page])
    pool = Quantised(pool.tiles.at[page].set(tiles), pool.scale.at[page].set(scale))
    return pool, tiles.astype(jnp.float32) * scale.swapaxes(-1, -2)
