"""Options for several devices, by vLLM's names, and the mesh that they stand for."""

import argparse
from typing import TYPE_CHECKING, Any

from entropic_jax.parameter_tables.table import ParameterError, short

from .control_options import SAMPLERS

if TYPE_CHECKING:
    from jax.sharding import Mesh

# No program divides rows or experts yet.
UNDIVIDED = ("data_parallel_size", "expert_parallel_size")
SIZES = ("tensor_parallel_size", *UNDIVIDED)


def add_tensor_parallel_size(parser: argparse._ActionsContainer) -> None:
    """Declare `--tensor-parallel-size`."""
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="INT",
        help="devices over which heads, feed-forward blocks and the vocabulary are divided (default: 1)",
    )


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare `--tensor-parallel-size`, and the sizes that must be 1."""
    add_tensor_parallel_size(parser)
    for name in UNDIVIDED:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=1, metavar="INT", help="1: not supported yet"
        )


def fields(options: argparse.Namespace) -> dict[str, Any]:
    """The sizes of a command line."""
    return {name: getattr(options, name) for name in SIZES}


def check(options: Any) -> None:
    """Raise ParameterError unless programs exist for the sizes, and on a mesh for the other fields.

    Args:
        options: With the fields `SIZES`, `mesh`, `preset` and `method`, as `EngineOptions`.
    """
    for name in SIZES:
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ParameterError(f"{name} must be an integer of at least 1; got {short(value)}", name)
        if name in UNDIVIDED and value > 1:
            raise ParameterError(f"{name} must be 1: more is not supported yet; got {short(value)}", name)
    size = options.tensor_parallel_size
    if options.mesh is None and size == 1:
        return
    if options.mesh is not None and size > 1:
        raise ParameterError(
            f"tensor_parallel_size must be 1 with a mesh, which has it; got {size}", SIZES[0]
        )
    check_control(options.preset, options.method)


def check_control(preset: str, method: str) -> None:
    """Raise ParameterError for control that reads all heads of a layer: a mesh divides them."""
    if preset in SAMPLERS:
        raise ParameterError(f"preset must not be a sampler on a mesh; got {preset}", "preset")
    if method != "dense":
        raise ParameterError(f"method must be dense on a mesh; got {short(method)}", "method")


def mesh_of(tensor_parallel_size: int, mesh: "Mesh | None" = None) -> "Mesh | None":
    """The mesh of that many devices, unless one is given; None for one device.

    Raises ParameterError where there are fewer devices.
    """
    from entropic_jax.mesh import make_mesh

    if mesh is not None or tensor_parallel_size == 1:
        return mesh
    try:
        return make_mesh(tensor_parallel_size)
    except ValueError as error:
        raise ParameterError(str(error), "tensor_parallel_size") from None
