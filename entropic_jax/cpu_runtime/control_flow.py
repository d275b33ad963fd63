"""Loops and branches of code that is emitted as in `instructions`."""

from collections.abc import Callable, Sequence
from typing import Any

from .instructions import WORD


def loop(builder: Any, begin: Any, end: Any, step: int, carried: list[Any], body: Callable) -> list[Any]:
    """Emits `for index in range(begin, end, step)`; returns the carried values after the last turn.

    Args:
        builder: of the function; afterwards it is behind the loop.
        begin: integer, the first index.
        end: integer, behind the last index.
        step: of the index, above 0.
        carried: values before the first turn.
        body: `body(index, values)` emits a turn and returns the values after it.
    """
    before = builder.block
    head = builder.append_basic_block("head")
    inside = builder.append_basic_block("inside")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(WORD)
    values = [builder.phi(v.type) for v in carried]
    index.add_incoming(begin, before)
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, end), inside, after)
    builder.position_at_end(inside)
    changed = body(index, values)
    index.add_incoming(builder.add(index, WORD(step)), builder.block)
    for phi, value in zip(values, changed, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def when(
    builder: Any, condition: Any, values: Sequence[Any], body: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Emits `if condition:`, for a branch that is rarely taken; returns the values behind it.

    Args:
        builder: of the function; afterwards it is behind the branch.
        condition: a boolean.
        values: those that hold where the branch is not taken.
        body: `body(values)` emits the branch and returns the values after it.
    """
    before = builder.block
    inside, after = builder.append_basic_block("inside"), builder.append_basic_block("after")
    builder.cbranch(condition, inside, after)
    builder.position_at_end(inside)
    changed = body(list(values))
    inside = builder.block
    builder.branch(after)
    builder.position_at_end(after)
    joined = []
    for value, new in zip(values, changed, strict=True):
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phi.add_incoming(new, inside)
        joined.append(phi)
    return joined
