"""Longest match on a CPU: only positions that hold the last token are looked at further.

XLA compares all positions `longest` times, and shares that among threads of its own, which are not those of
the other kernels of a step.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import cpu_runtime
from ...cpu_runtime.custom_call import register
from ...cpu_runtime.run_once import run_once

BLOCK = 64  # positions that are compared before any of them is looked at


def longest_match(text: jax.Array, last: jax.Array, longest: int) -> tuple[jax.Array, jax.Array]:
    """The contract is in the package's docstring."""
    if reason := cpu_runtime.unavailable_reason():
        raise NotImplementedError(reason)
    shape = jax.ShapeDtypeStruct(last.shape, jnp.int32)
    call = jax.ffi.ffi_call(_register(longest), (shape, shape), vmap_method="sequential")
    matched, end = call(text.astype(jnp.int32), last.astype(jnp.int32))
    return matched, end


@run_once
def _register(longest: int) -> str:
    """Register the search for matches of up to `longest` tokens with XLA; returns its name there."""
    name = f"entropic_longest_match_{longest}"
    register(name, lambda: _compile(name, longest))
    return name


def _compile(name: str, longest: int) -> Iterator[tuple[str, Any]]:
    from ...cpu_runtime.kernel import compiled, operand, operand_integers, parallel_kernel, result_integers

    @compiled
    def occurs(text, token, begin):
        """Whether a block of positions holds the token."""
        count = np.int32(0)
        for position in range(begin, begin + BLOCK):
            count += np.int32(text[position] == token)
        return count > 0

    @compiled
    def match_row(frame, row):
        grid = operand(frame, 0)[1]
        text = operand_integers(frame, 0, (grid[0], grid[1]))[row]
        # Rows that are not in use may hold anything.
        last = min(max(np.int64(operand_integers(frame, 1, (grid[0],))[row]), 0), np.int64(grid[1]) - 1)
        token, best, end = text[last], np.int64(0), last - 1
        stop = last  # positions from here on have been looked at
        while stop > 0 and best < longest:
            begin = max(stop - BLOCK, 0)
            if stop - begin == BLOCK and not occurs(text, token, begin):
                stop = begin
                continue
            for back in range(stop - begin):
                position = stop - 1 - back
                length = np.int64(0)
                while (
                    length < longest and length <= position and text[position - length] == text[last - length]
                ):
                    length += 1
                if length > best:
                    best, end = length, position
            stop = begin
        result_integers(frame, 0, (grid[0],))[row] = np.int32(best)
        result_integers(frame, 1, (grid[0],))[row] = np.int32(max(end, 0))

    @compiled
    def num_rows(frame):
        return operand(frame, 0)[1][0]

    yield from parallel_kernel(name, match_row, num_rows)
