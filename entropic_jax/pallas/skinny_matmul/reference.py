"""The products as XLA computes them."""

import jax


def project(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """See the package."""
    return tuple(x @ weight.astype(x.dtype) for weight in weights)
