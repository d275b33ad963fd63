"""Public figures of TPU chips, and topologies by name: what a plan of a model on a slice is computed from."""

import math
import re
from typing import NamedTuple

from entropic_jax.state.ledger import HARDWARE

GIB = 2**30
SECONDS_PER_HOP = 1e-6  # from a chip to its neighbour, however little is sent


class Chip(NamedTuple):
    """A generation of TPUs."""

    hardware: str  # its entry in `ledger.HARDWARE`
    memory: int  # bytes of main memory
    link_bandwidth: float  # bytes/s between neighbours, both directions together


# cloud.google.com/tpu/docs; links: jax-ml.github.io/scaling-book/tpus.
CHIPS = {
    "v4": Chip("tpu-v4", 32 * GIB, 90e9),
    "v5e": Chip("tpu-v5e", 16 * GIB, 90e9),
    "v5p": Chip("tpu-v5p", 95 * GIB, 180e9),
    "v6e": Chip("tpu-v6e", 32 * GIB, 180e9),
}
NAME = re.compile(r"(?P<chip>\w+):(?P<shape>\d+(?:x\d+){1,2})")


class Topology(NamedTuple):
    """A slice of TPUs: chips in a grid, each linked to its neighbours."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of chips."""
        number = 1
        for size in self.shape:
            number *= size
        return number

    def group(self, groups: int) -> "Topology":
        """The part of the slice that is one of as many equal groups of chips.

        The chips are numbered along the last axis first, and those of a group follow each other.

        Args:
            groups: divides the number of chips.

        >>> topology("v5e:2x4").group(2).name, topology("v5p:2x2x4").group(8).name
        ('v5e:1x4', 'v5p:1x1x2')
        """
        shape = []
        for size in self.shape:
            divisor = math.gcd(size, groups)
            shape.append(size // divisor)
            groups //= divisor
        name = f"{self.name.partition(':')[0]}:{'x'.join(map(str, shape))}"
        return Topology(name, self.chip, tuple(shape))

    @property
    def bandwidth(self) -> float:
        """Bytes/s from the main memory of a chip."""
        return float(HARDWARE[self.chip.hardware].bandwidth)

    @property
    def flops(self) -> float:
        """FLOP/s of a chip in bfloat16."""
        return float(HARDWARE[self.chip.hardware].peak)

    @property
    def hops(self) -> int:
        """Links between the two chips that are furthest from each other, without links around the grid."""
        return sum(size - 1 for size in self.shape)

    def seconds(self, operation: str, num_bytes: int, devices: int | None = None) -> float:
        """Time of a collective: bytes over one link, and the latency of its hops.

        A sum passes the bytes around twice and crosses the grid twice, everything else once.

        Args:
            operation: as in `collectives.Collective`.
            num_bytes: number of bytes of its results on a device.
            devices: chips next to each other that take part; None for all.

        >>> round(topology("v5e:2x4").seconds("all-reduce", 2**18) * 1e6, 1)
        13.1
        """
        times = 2 if operation == "all-reduce" else 1
        devices = self.devices if devices is None else devices
        moved, hops = num_bytes * (devices - 1) / devices, min(self.hops, devices - 1)
        return times * (moved / self.chip.link_bandwidth + hops * SECONDS_PER_HOP)


def topology(name: str) -> Topology:
    """The topology of a name such as "v5e:2x4" or "v5p:2x2x2". Raises ValueError for an unknown one."""
    match = NAME.fullmatch(name)
    if match is None or match["chip"] not in CHIPS:
        raise ValueError(
            f"topology must be one of {', '.join(CHIPS)} with the shape of the slice, as in v5e:2x4; "
            f"got {name!r}"
        )
    shape = tuple(int(size) for size in match["shape"].split("x"))
    if 0 in shape:
        raise ValueError(f"topology must have at least one chip along each axis; got {name!r}")
    return Topology(name, CHIPS[match["chip"]], shape)
