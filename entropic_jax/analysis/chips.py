"""Public figures of TPUs and GPUs, and topologies by name: what the plan of a model is computed from."""

import math
import re
from typing import NamedTuple

from entropic_jax.state.ledger import HARDWARE

MIB, GIB = 2**20, 2**30
SECONDS_PER_HOP = 1e-6  # from a chip to its neighbour, however little is sent


class Chip(NamedTuple):
    """A generation of TPUs, or a kind of GPU."""

    hardware: str  # its entry in `ledger.HARDWARE`
    memory: int  # bytes of main memory
    link_bandwidth: float  # bytes/s that a chip sends: to its two neighbours on an axis, or to the switch
    axes: int  # of a topology
    platform: str = "tpu"  # as JAX names it
    configuration: str | None = None  # by which libtpu describes it, if not by the default


# cloud.google.com/tpu/docs; links: jax-ml.github.io/scaling-book/tpus. Of GPUs (SXM), the memory that the
# driver reports, and half of the NVLink bandwidth of nvidia.com/en-us/data-center/h100, which is of both
# directions together.
CHIPS = {
    "v4": Chip("tpu-v4", 32 * GIB, 90e9, 3, configuration="megacore"),
    "v5e": Chip("tpu-v5e", 16 * GIB, 90e9, 2),
    "v5p": Chip("tpu-v5p", 95 * GIB, 180e9, 3),
    "v6e": Chip("tpu-v6e", 32 * GIB, 180e9, 2),
    "h100": Chip("h100", 81559 * MIB, 450e9, 1, "gpu"),
    "h200": Chip("h200", 143771 * MIB, 450e9, 1, "gpu"),
}
NAME = re.compile(r"(?P<chip>\w+):(?P<shape>[1-9]\d*(?:x[1-9]\d*){0,2})", re.ASCII)
LARGEST_HOST = 8  # GPUs that one switch links


class Topology(NamedTuple):
    """A slice of TPUs, each linked to its neighbours in a grid; or GPUs of a host, linked by a switch."""

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
        if self.chip.platform == "gpu":
            return min(1, self.devices - 1)
        return sum(size - 1 for size in self.shape)

    def seconds(self, operation: str, num_bytes: int, devices: int | None = None) -> float:
        """Time of a collective: bytes over one link, and the latency of its hops.

        A sum passes the bytes around twice and crosses the grid or the switch twice, everything else once.

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
    """The topology of a name, as "v5e:2x4", "v5p:2x2x2" or "h100:8". Raises ValueError for an unknown one."""
    match = NAME.fullmatch(name)
    chip = CHIPS.get(match["chip"]) if match else None
    shape = tuple(int(size) for size in match["shape"].split("x")) if match else ()
    if chip is None or len(shape) != chip.axes:
        tpus, gpus = (
            ", ".join(name for name, chip in CHIPS.items() if chip.platform == platform)
            for platform in ("tpu", "gpu")
        )
        raise ValueError(
            f"topology must be one of {tpus} with the shape of the slice, as in v5e:2x4 or v5p:2x2x2, or one "
            f"of {gpus} with a number of GPUs, as in h100:8; got {name!r}"
        )
    if chip.platform == "gpu" and shape[0] > LARGEST_HOST:
        raise ValueError(f"topology must have at most {LARGEST_HOST} GPUs, those of one host; got {name!r}")
    return Topology(name, chip, shape)
