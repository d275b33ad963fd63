"""Options for several devices, by vLLM's names, and the mesh that they stand for."""

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from entropic_jax.parameter_tables.table import ParameterError, short

from .control_options import SAMPLERS
from .option_types import POSITIVE, positive

if TYPE_CHECKING:
    from jax import Device
    from jax.sharding import Mesh

SIZES = ("tensor_parallel_size", "data_parallel_size", "expert_parallel_size")
PAGE_SHARDS = "decode_context_parallel_size"
NUMBERS = dict.fromkeys((*SIZES, PAGE_SHARDS), POSITIVE)  # accepted values


def add_tensor_parallel_size(parser: argparse._ActionsContainer) -> None:
    """Declare `--tensor-parallel-size`."""
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        default=1,
        metavar="INT",
        help="devices over which heads, feed-forward blocks and the vocabulary are divided (default: 1)",
    )


def add_expert_parallel_size(parser: argparse._ActionsContainer) -> None:
    """Declare `--expert-parallel-size`."""
    parser.add_argument(
        "--expert-parallel-size",
        type=positive,
        default=1,
        metavar="INT",
        help="groups of devices over which experts are divided; the rest is divided over all of their "
        "devices, this many times --tensor-parallel-size (default: 1)",
    )


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the sizes of the mesh."""
    add_tensor_parallel_size(parser)
    parser.add_argument(
        "--data-parallel-size",
        "-dp",
        type=positive,
        default=1,
        metavar="INT",
        help="engines, each with a copy of the model on devices of its own (default: 1)",
    )
    add_expert_parallel_size(parser)
    add_decode_context_parallel_size(parser)


def add_decode_context_parallel_size(parser: argparse._ActionsContainer) -> None:
    """Declare `--decode-context-parallel-size`."""
    parser.add_argument(
        "--decode-context-parallel-size",
        "-dcp",
        type=positive,
        metavar="INT",
        help="with more devices than KV heads, how many of those that have the same KV head divide it and "
        "its pages; 1 gives each a copy (default: all)",
    )


def fields(options: argparse.Namespace) -> dict[str, Any]:
    """The sizes of a command line."""
    return {name: getattr(options, name) for name in (*SIZES, PAGE_SHARDS)}


def check(options: Any) -> None:
    """Raise ParameterError unless programs exist for the sizes, and on a mesh for the other fields.

    Args:
        options: with the fields `SIZES`, `PAGE_SHARDS`, `mesh`, `preset` and `method`, as `EngineOptions`.
    """
    for name in SIZES:
        value = getattr(options, name)
        if options.mesh is not None and value > 1:
            raise ParameterError(f"{name} must be 1 with a mesh, which has it; got {value}", name)
    if options.mesh is not None or divided(options):
        check_control(options.preset, options.method)


def check_processes(options: Any, num_processes: int) -> None:
    """Raise ParameterError unless programs of one engine use all devices of all processes.

    Args:
        options: with the fields `SIZES` and `mesh`.
        num_processes: how many processes there are.
    """
    import jax

    if options.mesh is not None:
        raise ParameterError(f"mesh must be None with {num_processes} processes; got a mesh", "mesh")
    if options.data_parallel_size != 1:
        name = "data_parallel_size"
        raise ParameterError(
            f"{name} must be 1 with {num_processes} processes; got {options.data_parallel_size}", name
        )
    devices, experts = jax.device_count(), options.expert_parallel_size
    if options.tensor_parallel_size * experts != devices:
        times = f", times {experts} expert groups," if experts > 1 else ""
        raise ParameterError(
            f"tensor_parallel_size{times} must be {devices}, the devices of all {num_processes} processes; "
            f"got {options.tensor_parallel_size}",
            "tensor_parallel_size",
        )


def divided(options: Any) -> bool:
    """Whether the model is divided over several devices.

    Args:
        options: with the fields `SIZES`.
    """
    return options.tensor_parallel_size != 1 or options.expert_parallel_size != 1


def check_control(preset: str, method: str) -> None:
    """Raise ParameterError for control that reads all heads of a layer: a mesh divides them."""
    if preset in SAMPLERS:
        raise ParameterError(f"preset must not be a sampler on a mesh; got {preset}", "preset")
    if method != "dense":
        raise ParameterError(f"method must be dense on a mesh; got {short(method)}", "method")


class Place(NamedTuple):
    """Mesh and devices that an engine runs on."""

    device: "Device | None"  # its default device; None: that of the process
    mesh: "Mesh | None" = None  # over which its model is divided; None: it runs on one device


def places_of(
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    mesh: "Mesh | None" = None,
) -> list[Place]:
    """The places of the data-parallel engines.

    Args:
        tensor_parallel_size: devices over which a model is divided.
        data_parallel_size: engines.
        expert_parallel_size: groups of so many devices over which experts are divided.
        mesh: has the sizes, and says which devices; None takes the first ones of the process.

    Raises:
        ParameterError: There are fewer devices.
    """
    from jax.sharding import AbstractMesh, Mesh

    from entropic_jax.mesh import AXES, DATA, make_mesh

    if mesh is None:
        if tensor_parallel_size == data_parallel_size == expert_parallel_size == 1:
            return [Place(None)]
        try:
            mesh = make_mesh(
                tensor_parallel_size,
                data_parallel_size=data_parallel_size,
                expert_parallel_size=expert_parallel_size,
            )
        except ValueError as error:
            name = next(name for name in SIZES if str(error).startswith(name))
            raise ParameterError(str(error), name) from None
    elif not isinstance(mesh, Mesh | AbstractMesh):
        raise ParameterError(f"mesh must be a jax.sharding.Mesh or None; got {short(mesh)}", "mesh")
    elif mesh.axis_names != AXES or mesh.shape[DATA] == 1:
        return [Place(None, mesh)]  # other axes are refused where the model is divided
    return [place_of(mesh, rank) for rank in range(mesh.shape[DATA])]


def place_of(mesh: "Mesh", rank: int) -> Place:
    """The place of a data-parallel engine: its slice of the mesh."""
    from jax.sharding import Mesh

    devices = mesh.devices[rank : rank + 1]
    first = devices.flat[0]
    if devices.size == 1:
        return Place(first)
    return Place(first, Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types))
