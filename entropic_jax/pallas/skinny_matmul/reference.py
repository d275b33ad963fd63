"""Skinny matrix products in plain JAX."""

import jax


def skinny_matmul(
    x: jax.Array, weights: tuple[jax.Array, ...], scales: tuple[jax.Array, ...] = ()
) -> tuple[jax.Array, ...]:
    """The contract is in the package's docstring."""
    products = tuple(x @ weight.astype(x.dtype) for weight in weights)
    if not scales:
        return products
    return tuple(y * scale.astype(x.dtype) for y, scale in zip(products, scales, strict=True))
