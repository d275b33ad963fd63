"""Convert a model for fast starts: its arrays as programs take them, in an orbax checkpoint.

`--model` of every command takes the new directory: nothing is transposed, dequantised or rounded again, and
each process reads the shards of its devices alone. The mesh may be another one than that of the conversion.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from entropic_jax.parameter_tables.table import ParameterError

from ..options import parallelism, processes
from ..options.model import check_directory, computing_dtype
from ..options.option_types import message_of, path
from . import model_options

if TYPE_CHECKING:
    from ..engine.process_group import ProcessGroup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic convert` takes."""
    parser.add_argument("--model", type=path, required=True, help="model directory to convert")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory to write, missing or empty; several processes must all see it",
    )
    model_options.add_dtype(parser)
    model_options.add_quantization(parser)
    parallelism.add_tensor_parallel_size(parser)
    parallelism.add_expert_parallel_size(parser)
    processes.add_arguments(parser.add_argument_group("several processes"))


def run(options: argparse.Namespace) -> int:
    """Convert the model and return the exit status."""
    check_directory(options.model)
    stated = processes.of_command(options)
    if stated.alone:
        convert(options, None)
        return 0
    from ..engine import process_group

    group = process_group.start_processes(stated)
    try:
        convert(options, group)
    except ParameterError as error:
        if group is None:
            raise
        group.leave(message_of(error, options), status=2)
    return 0


def convert(options: argparse.Namespace, group: "ProcessGroup | None") -> None:
    """Convert the model; ParameterError says what is at fault.

    Args:
        options: the options of the command line.
        group: the processes of which this is one; None for this one alone.
    """
    from entropic_jax import models

    sizes = {name: getattr(options, name) for name in ("tensor_parallel_size", "expert_parallel_size")}
    if group is not None:
        shape = argparse.Namespace(**sizes, data_parallel_size=1, mesh=None)
        parallelism.check_processes(shape, group.num_processes)
    mesh = parallelism.places_of(**sizes)[0].mesh
    dtype = computing_dtype(options.dtype)
    try:
        models.convert(options.model, options.output, dtype, mesh=mesh, quantization=options.quantization)
    except (OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, OSError) and str(options.output) in (error.filename, error.filename2):
            message = f"output must be a directory that can be written to; got {options.output}"
            raise ParameterError(f"{message} ({error.strerror})", "output") from error
        if str(error).startswith("output "):
            raise ParameterError(str(error), "output") from error
        raise model_options.loading_error(options, error) from error
    if group is not None:
        group.finish()
