"""SiLU of a gate times the rows it gates: silu(g) · u, element by element, between two products of a model.

`silu_and_mul(gate, up)` computes

    y = gate / (1 + exp(−gate)) · up

The contract:

Args:
    gate: any shape.
    up: the shape and the dtype of the gate.

Returns:
    An array of the same shape and dtype. With the back end `cpu`, an element depends, bit for bit, on the
    same elements of the arguments alone.

Raises:
    NotImplementedError: a back end does not support the case; the message is the reason.

Source: Shazeer, GLU Variants Improve Transformer (2020; arXiv 2002.05202), equation 5 (SwiGLU).
"""

import jax

from ..derivatives import with_derivatives_of
from ..dispatch import Operation
from . import cpu, reference

__all__ = ["silu_and_mul"]

SILU_AND_MUL = Operation("silu_and_mul", {"cpu": cpu.silu_and_mul, "xla": reference.silu_and_mul})


def silu_and_mul(gate: jax.Array, up: jax.Array, *, backend: str | None = None) -> jax.Array:
    """The gated product of a feed-forward block.

    Args:
        gate: the gate, of any shape.
        up: what it gates, of the same shape.
        backend: the name of the back end to use; None takes the first that supports the case.

    Returns:
        silu(gate) · up. Derivatives are those of the plain formula.
    """
    return _silu_and_mul(backend, gate, up)


_silu_and_mul = with_derivatives_of(
    lambda _, gate, up: reference.silu_and_mul(gate, up),
    lambda backend, gate, up: SILU_AND_MUL(gate, up, backend=backend),
)
