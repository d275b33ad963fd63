"""Collectives of a compiled program: which operations move data between devices, and how many bytes of it."""

import re
from typing import NamedTuple

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16}
BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64}
INSTRUCTION = re.compile(
    rf"= (?P<result>\([^=]*?\)|\S+) (?P<operation>{'|'.join(OPERATIONS)})(?P<begins>-start)?\("
)
COMMENT = re.compile(r"/\*.*?\*/")  # in long tuples, the number of the array that follows
ARRAY = re.compile(r"\b(?P<dtype>[a-z]+\d*\w*)\[(?P<shape>[\d,]*)\]")


class Collective(NamedTuple):
    """One collective of a program."""

    operation: str  # one of `OPERATIONS`
    shapes: tuple[tuple[int, ...], ...]  # of its results on a device
    num_bytes: int  # of its results on a device


def collectives(program: str) -> list[Collective]:
    """The collectives in the text of a compiled program, `jax.stages.Compiled.as_text()`.

    One that is split into a start and a completion counts once. One in a loop counts once, however often the
    loop runs.

    >>> collectives("%sum = f32[4,64]{1,0} all-reduce(%x), channel_id=1")
    [Collective(operation='all-reduce', shapes=((4, 64),), num_bytes=1024)]
    """
    return [read(match) for match in INSTRUCTION.finditer(COMMENT.sub("", program))]


def read(match: re.Match[str]) -> Collective:
    """The collective of a match of `INSTRUCTION`."""
    arrays = [array_of(array) for array in ARRAY.finditer(match["result"])]
    if match["begins"] and match["operation"] != "all-reduce":
        # The start of these returns its operands along with its results.
        arrays = arrays[1:2] if len(arrays) < 4 else arrays[len(arrays) // 2 :]
    return Collective(
        match["operation"], tuple(shape for shape, _ in arrays), sum(size for _, size in arrays)
    )


def array_of(match: re.Match[str]) -> tuple[tuple[int, ...], int]:
    """Shape and bytes of a match of `ARRAY`."""
    shape = tuple(int(size) for size in match["shape"].split(",") if size)
    count = 1
    for size in shape:
        count *= size
    return shape, count * BITS.get(match["dtype"], 8) // 8
