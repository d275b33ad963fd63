"""Serve a model over HTTP with the APIs of OpenAI and vLLM.

Options that mean the same have vLLM's names.
"""

import argparse
import signal
from typing import TYPE_CHECKING, Any

from entropic_jax.parameter_tables.table import ParameterError

from ..http.settings import Settings
from ..options import parallelism, processes
from ..options.option_types import message_of
from ..request import RequestError
from . import model_options, serve_setup
from .serve_options import add_arguments as add_arguments

if TYPE_CHECKING:
    from ..engine.options import EngineOptions
    from ..engine.process_group import ProcessGroup

EXTRA = "install the extra: pip install 'entropic_jax[serve]'"


def run(options: argparse.Namespace) -> int:
    """Load the model, serve it until a signal, and return the exit status."""
    try:
        from ..http import log, process, tracing
    except ImportError as error:
        raise RequestError(f"{error.name} is not installed; {EXTRA}") from None
    from ..engine import allocator
    from ..options.compilation_cache import remember_compilations
    from ..options.xla_threads import limit_xla_threads

    options.model = options.path or options.model
    if options.replicas is not None:
        from . import serve_fleet

        return serve_fleet.run(options)
    log.configure(serve_setup.log_format(options), options.uvicorn_log_level)
    allocator.limit_arenas()
    several = parallelism.divided(options) or options.data_parallel_size != 1
    several |= not processes.of_command(options).alone
    limit_xla_threads(options.model, options.dtype, options.method, several)
    traces = tracing.exporter(options.otlp_traces_endpoint)
    settings, text_side = serve_setup.settings_of(options), serve_setup.text_side_of(options)
    # Whatever can be wrong so far is said before anything is loaded.
    engine_options = serve_setup.engine_options_of(options, settings)
    group = serve_setup.start_processes(options)
    if group is None:
        listener = process.bind(settings)
        remember_compilations()
        return process.run(
            serve_setup.load(options, settings, text_side, engine_options, None), listener, traces
        )
    try:
        remember_compilations()
        if not group.leads:
            return follow_process_0(options, engine_options, settings, group)
        listener = process.bind(settings)
        frontend = serve_setup.load(options, settings, text_side, engine_options, group)
    except ParameterError as error:
        group.leave(message_of(error, options), status=2)
    return process.run(frontend, listener, traces)


def follow_process_0(
    options: argparse.Namespace, engine_options: "EngineOptions", settings: Settings, group: "ProcessGroup"
) -> int:
    """Run what process 0 runs until it ends; the exit status.

    Args:
        options: the options of the command line.
        engine_options: the options of the engine.
        settings: the settings of the front end, for its control.
        group: the processes.
    """
    from ..engine import start

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the process ends with process 0, which drains first
    try:
        return start.follow_process_0(options.model, engine_options, settings.control, group)
    except (OSError, ValueError, NotImplementedError) as error:
        raise model_options.loading_error(options, error) from error


def fleet_application(options: argparse.Namespace) -> Any:
    """The application of Ray Serve that the options describe, for Ray's own `serve run`."""
    from . import serve_fleet

    return serve_fleet.application(options)
