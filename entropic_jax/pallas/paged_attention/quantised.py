"""Quantised KV cache: pages in int8 or float8_e4m3fn, with a scale for each position and KV head.

    x ≈ scale · tile,   scale = max |x| / largest,   largest = 127 (int8), 448 (float8_e4m3fn)

The scale depends on the stored vector alone, so prefill at once, chunked prefill and decoding store the same
numbers, and nothing is quantised twice. In attention it multiplies a score and a weight, not a tile. It adds
4 bytes to each vector of head_dim bytes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
DTYPES = ("float32", "bfloat16", "float16", "float64", *LARGEST)  # of keys and values


class Quantised(NamedTuple):
    """A quantised page pool; it is accepted wherever a plain array of the shape of its tiles is."""

    tiles: Any  # int8 or float8_e4m3fn [pool, kv_heads, page_size, head_dim]
    scale: Any  # float32 [pool, kv_heads, 1, page_size]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the pool, without the scales."""
        return self.tiles.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the stored values."""
        return self.tiles.dtype


Pool = jax.Array | Quantised


def zeros(shape: tuple[int, int, int, int], dtype: Any) -> Pool:
    """A pool of zeros, quantised if the dtype has 8 bits."""
    return with_scales(jnp.zeros(shape, dtype))


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of keys and values. Raises ValueError for one that a cache cannot hold them in."""
    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        got = dtype if name is None else name
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {got!r:.200}")
    return name


def with_scales(tiles: jax.Array) -> Pool:
    """The pool of these tiles, with scales of 0 if they have 8 bits."""
    if tiles.dtype.name not in LARGEST:
        return tiles
    pool, kv_heads, page_size, _ = tiles.shape
    return Quantised(tiles, jnp.zeros((pool, kv_heads, 1, page_size), jnp.float32))


def reads_as(pool: Pool) -> Any:
    """The dtype for tiles that are read out of a pool: float32 for a quantised pool, else its own."""
    return jnp.dtype("float32") if isinstance(pool, Quantised) else pool.dtype


def bytes_per_number(dtype: Any, head_dim: int) -> float:
    """Bytes per element of a key or value, its share of the scale included.

    >>> bytes_per_number("bfloat16", 128), bytes_per_number("int8", 128)
    (2.0, 1.03125)
    """
    dtype = jnp.dtype(dtype)
    return dtype.itemsize + (4 / head_dim if dtype.name in LARGEST else 0.0)


def gather(pool: Pool, index: Any, dtype: Any) -> jax.Array:
    """Tiles `[…, page_size, head_dim]` of a pool, dequantised.

    Args:
        pool: a page pool.
        index: anything that indexes its first axes, as in `pool[index]`.
        dtype: the dtype of the result.
    """
    if isinstance(pool, Quantised):
        scale = pool.scale[index].swapaxes(-1, -2)
        return (pool.tiles[index].astype(jnp.float32) * scale).astype(dtype)
    return pool[index].astype(dtype)


def flat(pool: Pool) -> Pool:
    """The pool with its first two axes flattened: tile (page, KV head) is at page · KV heads + KV head.

    XLA's CPU backend takes several times as long to gather by two indices as by one.
    """
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pool)


def quantise(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Quantise vectors `[…, head_dim]`; returns the tile in the dtype and the scale, float32 `[…]`.

    The scale of a vector with NaN or infinity is NaN or infinite, too.
    """
    x, dtype = x.astype(jnp.float32), jnp.dtype(dtype)
    largest = LARGEST[dtype.name]
    extent = jnp.abs(x).max(-1)
    # A product with the inverse, which XLA would make of a quotient by a constant: kernels get the same bits.
    scale = jnp.where(extent == 0, 1.0, extent * jnp.float32(1 / largest))
    scaled = jnp.clip(x / scale[..., None], -largest, largest)
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scale


def stored(x: jax.Array, pool: Pool) -> jax.Array:
    """The values, float32, that vectors `[…, head_dim]` have once they are stored in the pool."""
    if not isinstance(pool, Quantised):
        return x.astype(pool.dtype).astype(jnp.float32)
    tile, scale = quantise(x, pool.dtype)
    return tile.astype(jnp.float32) * scale[..., None]


def put_pages(pool: Pool, page: jax.Array, x: jax.Array, new: jax.Array) -> tuple[Pool, jax.Array]:
    """Store new slots of pages; the other slots keep their bits.

    Args:
        pool: a page pool.
        page: int `[…]`, the pages to write.
        x: `[…, kv_heads, page_size, head_dim]`, their content.
        new: bool `[…, page_size]`, the slots to write.

    Returns:
        The pool, and the values of the pages as they will be read, float32, in the shape of x.
    """
    is_new = new[..., None, :, None]
    if not isinstance(pool, Quantised):
        merged = jnp.where(is_new, x.astype(pool.dtype), pool[page])
        return pool.at[page].set(merged), merged.astype(jnp.float32)
    tiles, scale = quantise(x, pool.dtype)
    tiles = jnp.where(is_new, tiles, pool.tiles[page])
    scale = jnp.where(new[..., None, None, :], scale[..., None, :], pool.scale[page])
    pool = Quantised(pool.tiles.at[page].set(tiles), pool.scale.at[page].set(scale))
    return pool, tiles.astype(jnp.float32) * scale.swapaxes(-1, -2)
