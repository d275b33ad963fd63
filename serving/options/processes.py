"""Options for several processes, by JAX's names: how they find each other, and which of them this one is."""

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from entropic_jax.parameter_tables.table import LARGEST_INT, Number, ParameterError, short

from .option_types import POSITIVE, number, positive

SECONDS = Number(float, 1, 1e6)
NUMBERS = {"num_processes": POSITIVE, "process_id": Number(int, 0, LARGEST_INT)}  # accepted values
CONNECT_SECONDS = 300.0  # default of `initialization_timeout`


class ProcessOptions(NamedTuple):
    """The options of `jax.distributed.initialize`; without any, the process is alone."""

    distributed: bool = False  # what is not stated follows from the environment, as JAX detects it
    coordinator_address: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None
    initialization_timeout: float = CONNECT_SECONDS  # seconds in which all processes must have connected

    @property
    def alone(self) -> bool:
        """Whether there is one process."""
        if self.distributed:
            return False
        return self.num_processes in (None, 1) and self.coordinator_address is None and not self.process_id


NAMES = ProcessOptions._fields


def add_arguments(group: argparse._ActionsContainer) -> None:
    """Declare the options."""
    group.add_argument(
        "--coordinator-address",
        metavar="HOST:PORT",
        help="address of process 0 and a free port there, the same for all processes",
    )
    group.add_argument(
        "--num-processes",
        type=positive,
        metavar="INT",
        help="processes over whose devices the model, or each of its --replicas, is divided (default: 1)",
    )
    group.add_argument(
        "--process-id",
        type=number(NUMBERS["process_id"]),
        metavar="INT",
        help="number of this process, from 0; process 0 serves HTTP, the others run its programs",
    )
    group.add_argument(
        "--distributed",
        action="store_true",
        help="take what these options do not state from the environment, as JAX detects it: Cloud TPU pods, "
        "GKE, Slurm, Open MPI",
    )
    group.add_argument(
        "--initialization-timeout",
        type=number(SECONDS),
        default=CONNECT_SECONDS,
        metavar="SECONDS",
        help="time in which all processes must have connected (default: 300)",
    )


def of_command(options: argparse.Namespace) -> ProcessOptions:
    """The checked options of a command line."""
    return checked({name: getattr(options, name) for name in NAMES})


def checked(fields: Mapping[str, Any]) -> ProcessOptions:
    """The options from fields of any type; None is the default. Raises ParameterError."""
    options = ProcessOptions(**{name: value for name, value in fields.items() if value is not None})
    if not isinstance(options.distributed, bool):
        raise ParameterError(
            f"distributed must be true or false; got {short(options.distributed)}", "distributed"
        )
    for name, accepts in NUMBERS.items():
        if (value := getattr(options, name)) is not None:
            options = options._replace(**{name: accepts.check(name, value)})
    SECONDS.check("initialization_timeout", options.initialization_timeout)
    address_of(options)
    if options.alone:
        return options
    needed = {name: getattr(options, name) for name in ("coordinator_address", "num_processes", "process_id")}
    missing = [name for name, value in needed.items() if value is None]
    if missing and not options.distributed:
        name, value = next(pair for pair in needed.items() if pair[1] is not None)
        raise ParameterError(f"{name} must come with {' and '.join(missing)}; got {value} alone", name)
    if (
        options.num_processes is not None
        and options.process_id is not None
        and options.process_id >= options.num_processes
    ):
        raise ParameterError(
            f"process_id must be below num_processes, {options.num_processes}; got {options.process_id}",
            "process_id",
        )
    return options


def address_of(options: ProcessOptions) -> tuple[str, int] | None:
    """Host and port of the coordinator address; None where none is stated. Raises ParameterError."""
    address = options.coordinator_address
    if address is None:
        return None
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ParameterError(
            f"coordinator_address must be a host and a port, as in 10.0.0.1:8476; got {short(address)}",
            "coordinator_address",
        )
    return host.strip("[]"), int(port)
