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
COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
CALLED = re.compile(r"(?:body|condition|calls|to_apply|\w+_computations?)=(?P<names>\{[^}]*\}|%?[\w.\-]+)")
LOOP = re.compile(r" while\(.*condition=%?(?P<condition>[\w.\-]+), body=%?(?P<body>[\w.\-]+)")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(?P<count>\d+)"')
COMPARISON = re.compile(r"ROOT .* compare\(.*%(?P<most>[\w.\-]+)\), direction=LT")
GROUPS = re.compile(r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}|\[\d+,(?P<size>\d+)\])")
CONSTANT = re.compile(r"%(\S+) = s32\[\]\S* constant\((\d+)\)")


class Collective(NamedTuple):
    """One collective of a program."""

    operation: str  # one of `OPERATIONS`
    shapes: tuple[tuple[int, ...], ...]  # of its results on a device
    num_bytes: int  # of its results on a device
    devices: int | None = None  # that exchange something with each other; None: all


def collectives(program: str) -> list[Collective]:
    """The collectives that a compiled program runs, from its text, `jax.stages.Compiled.as_text()`.

    One that is split into a start and a completion counts once. One in a loop, as over the layers of a model,
    counts as often as the loop runs, if the text says how often that is; else once.

    >>> collectives("%sum = f32[4,64]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}")
    [Collective(operation='all-reduce', shapes=((4, 64),), num_bytes=1024, devices=2)]
    """
    program = COMMENT.sub("", program)
    runs = executions(program)
    return [
        read(match)
        for name, text in computations(program).items()
        for match in INSTRUCTION.finditer(text)
        for _ in range(runs.get(name, 1))
    ]


def computations(program: str) -> dict[str, str]:
    """The texts of a program's computations by their names; "" is that of a text without any."""
    result: dict[str, list[str]] = {"": []}
    name = ""
    for line in program.splitlines():
        if begins := COMPUTATION.match(line):
            name = begins["name"]
        result.setdefault(name, []).append(line)
    return {name: "\n".join(lines) for name, lines in result.items()}


def executions(program: str) -> dict[str, int]:
    """How often each computation of a program runs, as far as the trip counts of loops are known."""
    texts = computations(program)
    calls: dict[str, tuple[str, int]] = {}  # who calls a computation, and how often in a run
    for name, text in texts.items():
        for line in text.splitlines():
            for called in (x for names in CALLED.findall(line) for x in re.findall(r"[\w.\-]+", names)):
                calls[called] = name, 1
            if loop := LOOP.search(line):
                calls[loop["body"]] = name, trip_count(line, texts[loop["condition"]])

    def runs(name: str) -> int:
        if name not in calls:
            return 1
        caller, number = calls[name]
        return number * runs(caller)

    return {name: runs(name) for name in texts}


def trip_count(loop: str, condition: str) -> int:
    """How often a loop runs; 1 where it is not known.

    Args:
        loop: the instruction.
        condition: the computation of its condition, which compares a counter from 0 with a constant where
            the trip count is fixed.
    """
    if known := TRIP_COUNT.search(loop):
        return int(known["count"])
    compared = COMPARISON.search(condition)
    constants = dict(CONSTANT.findall(condition))
    return int(constants.get(compared["most"], 1)) if compared else 1


def read(match: re.Match[str]) -> Collective:
    """The collective of a match of `INSTRUCTION`."""
    arrays = [array_of(array) for array in ARRAY.finditer(match["result"])]
    if match["begins"] and match["operation"] != "all-reduce":
        # The start of these returns its operands along with its results.
        arrays = arrays[1:2] if len(arrays) < 4 else arrays[len(arrays) // 2 :]
    return Collective(
        match["operation"],
        tuple(shape for shape, _ in arrays),
        sum(size for _, size in arrays),
        group_size(match.string[match.end() :].partition("\n")[0]),
    )


def group_size(operands: str) -> int | None:
    """The devices of a group, of the rest of an instruction.

    >>> group_size("%x), replica_groups=[8,2]<=[16]"), group_size("%x), channel_id=1")
    (2, None)
    """
    groups = GROUPS.search(operands)
    if groups is None:
        return None
    return int(groups["size"]) if groups["size"] else groups["first"].count(",") + 1


def array_of(match: re.Match[str]) -> tuple[tuple[int, ...], int]:
    """Shape and bytes of a match of `ARRAY`."""
    shape = tuple(int(size) for size in match["shape"].split(",") if size)
    count = 1
    for size in shape:
        count *= size
    return shape, count * BITS.get(match["dtype"], 8) // 8
