"""Derivatives of operations that have kernels: in both modes, those of the reference in plain JAX."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


def with_derivatives_of(reference: Callable, operation: Callable) -> Any:
    """The operation, differentiable in forward and in reverse mode.

    The value is always that of the operation, the tangent that of the reference, which is computed again in
    the backward pass, so that a pass keeps the operands alone.

    Args:
        reference: plain JAX, of hashable settings and then operands.
        operation: computes the same, from the same arguments.

    Returns:
        A function of the same arguments. Integer operands have no derivative.

    >>> double = with_derivatives_of(lambda factor, x: factor * x, lambda factor, x: factor * x)
    >>> value, slope = jax.jvp(lambda x: double(2.0, x), (3.0,), (1.0,))
    >>> float(value), float(slope), float(jax.grad(lambda x: double(2.0, x))(3.0))
    (6.0, 2.0, 2.0)
    """

    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def call(settings: Any, *operands: Any) -> Any:
        return operation(settings, *operands)

    @call.defjvp
    def derivative(settings: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
        again = jax.checkpoint(partial(reference, settings))
        return call(settings, *primals), jax.jvp(again, primals, tangents)[1]

    return call
