"""`entropic serve --replicas`: the options of a fleet, and what a process of a replica runs."""

import argparse
from typing import TYPE_CHECKING, Any

from ..http.settings import Settings
from ..options import processes
from ..request import RequestError
from . import model_options, serve_setup

if TYPE_CHECKING:
    from ..http.frontend import Frontend

EXTRA = "install the extra: pip install 'entropic_jax[ray]'"
# Options about the state of one server, which the replicas of a fleet do not share, or that Ray decides.
NOT_FOR_FLEETS = (
    "uds",
    "lora_dir",
    "profile_dir",
    "files_dir",
    "otlp_traces_endpoint",
    "coordinator_address",
    "process_id",
)


def run(options: argparse.Namespace) -> int:
    """Serve with several replicas under Ray Serve."""
    settings = fleet_settings(options)
    try:
        from ..fleet import launch
    except ModuleNotFoundError as error:
        raise RequestError(f"{error.name} is not installed; {EXTRA}") from None
    from ..http import log

    log.configure(serve_setup.log_format(options), options.uvicorn_log_level)
    return launch.run(options, settings, frontend_of, follow_process_0)


def application(options: argparse.Namespace) -> Any:
    """The application of Ray Serve that the options describe, for Ray's own `serve run`."""
    from ..fleet import deployment

    options.replicas = options.replicas or 1
    return deployment.application(options, fleet_settings(options), frontend_of, follow_process_0)


def fleet_settings(options: argparse.Namespace) -> Settings:
    """The settings of each replica. RequestError for options that a fleet does not have."""
    options.model = options.path or options.model
    for name in NOT_FOR_FLEETS:
        if (value := getattr(options, name)) is not None:
            raise RequestError(f"--{name.replace('_', '-')} must be absent with --replicas; got {value}")
    if options.distributed:
        raise RequestError("--distributed must be absent with --replicas: Ray connects the processes")
    if options.port == 0:
        raise RequestError("--port must be at least 1 with --replicas; got 0")
    if options.max_replicas is not None and options.max_replicas < (options.replicas or 1):
        raise RequestError(
            f"--max-replicas must be at least --replicas, {options.replicas or 1}; got {options.max_replicas}"
        )
    serve_setup.text_side_of(options)  # says what is wrong before anything is started, as the next two do
    settings = serve_setup.settings_of(options)
    serve_setup.engine_options_of(options, settings)
    check_division(options)
    return settings


def check_division(options: argparse.Namespace) -> None:
    """Raise RequestError unless the model can be divided over the devices that a replica should have."""
    from entropic_jax.models.model import read_config
    from entropic_jax.models.sharding import check_page_shards, check_sizes

    tensor, experts = options.tensor_parallel_size, options.expert_parallel_size
    if (number := options.num_processes or 1) > 1:
        serve_setup.check_process_options(options)
        if tensor * experts % number:
            raise RequestError(
                "--tensor-parallel-size must be the number of devices of all processes of a replica, "
                f"a multiple of --num-processes, {number}; got {tensor}"
            )
        if options.data_parallel_size != 1:
            raise RequestError(
                f"--data-parallel-size must be 1 with {number} processes; got {options.data_parallel_size}"
            )
    try:
        config = read_config(options.model)
        check_sizes(config, tensor, experts)
        check_page_shards(config, tensor * experts, options.decode_context_parallel_size)
    except (OSError, ValueError) as error:
        raise model_options.loading_error(options, error) from error


def frontend_of(options: argparse.Namespace) -> "Frontend":
    """The front end of a replica, in a process of its own: process 0 where a replica has several."""
    from ..http import log
    from ..options.compilation_cache import remember_compilations

    log.configure(serve_setup.log_format(options), options.uvicorn_log_level)
    settings, text_side = serve_setup.settings_of(options), serve_setup.text_side_of(options)
    engine_options = serve_setup.engine_options_of(options, settings)
    group = serve_setup.start_processes(options)
    remember_compilations()
    return serve_setup.load(options, settings, text_side, engine_options, group)


def follow_process_0(options: argparse.Namespace) -> int:
    """Run what process 0 of a replica runs until it ends; the exit status."""
    from ..engine import start
    from ..http import log
    from ..options.compilation_cache import remember_compilations

    log.configure(serve_setup.log_format(options), options.uvicorn_log_level)
    settings = serve_setup.settings_of(options)
    engine_options = serve_setup.engine_options_of(options, settings)
    group = serve_setup.start_processes(options)
    if group is None:
        raise ValueError(f"num_processes must be at least 2; got {processes.of_command(options)}")
    remember_compilations()
    return start.follow_process_0(options.model, engine_options, settings.control, group)
