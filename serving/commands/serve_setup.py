"""Setup of `entropic serve` from its options: settings, engine options and text side, and their start."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..http.settings import Limits, Settings
from ..options import (
    control_options,
    generation_config,
    lora,
    parallelism,
    processes,
    speculation_options,
)
from ..request import RequestError
from . import model_options

if TYPE_CHECKING:
    from ..engine.options import EngineOptions
    from ..engine.process_group import ProcessGroup
    from ..http.frontend import Frontend


def log_format(options: argparse.Namespace) -> str:
    return options.log_format or ("text" if sys.stderr.isatty() else "json")


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that parsed options describe."""
    keys = options.api_key or [os.environ.get("ENTROPIC_API_KEY", "")]
    return Settings(
        host=options.host,
        port=options.port,
        uds=options.uds,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        api_keys=tuple(key for key in keys if key),
        share_prefix_cache=options.share_prefix_cache,
        root_path=options.root_path.rstrip("/"),
        allowed_hosts=tuple(options.allowed_hosts),
        allowed_origins=tuple(options.allowed_origins),
        log_requests=not options.disable_log_requests,
        request_timeout=options.request_timeout or None,
        drain=options.shutdown_timeout,
        on_engine_failure=options.on_engine_failure,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        metrics_prefix=options.metrics_prefix,
        profile_dir=options.profile_dir,
        lora_dir=_adapter_folder(options),
        sleep_mode=options.enable_sleep_mode,
        files_dir=options.files_dir,
        control=control_options.read(options, _default_preset(options)),
        limits=Limits(
            body=options.max_body,
            sequences=options.max_sequences,
            stops=options.max_stops,
            grammar=options.max_grammar,
            connections=options.max_connections,
            tokenize=options.max_tokenize,
            stored_responses=options.max_stored_responses,
            stored_response_bytes=options.max_stored_response_bytes,
            stored_response_seconds=options.stored_response_ttl,
            file_bytes=options.max_file_bytes,
            file_seconds=options.file_ttl,
            rate=options.request_rate_limit,
        ),
    )


class TextSide(NamedTuple):
    """The model's text side from the command line; None is as in the model's directory."""

    template: str | None = None  # chat template
    generation_config: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = {}  # of the generation config


def _default_preset(options: argparse.Namespace) -> str:
    if options.preset is not None:
        return options.preset
    drafter = speculation_options.engine_fields(options.speculate, options.speculative_config)["speculate"]
    return speculation_options.default_preset(
        drafter,
        options.method,
        batch_invariant=options.batch_invariant,
        divided=parallelism.divided(options),
    )


def text_side_of(options: argparse.Namespace) -> TextSide:
    """The text side that parsed options describe. Raises RequestError."""
    return TextSide(
        _template(options.chat_template, options.model),
        generation_config.read(options.generation_config),
        generation_config.override(options.override_generation_config),
    )


def engine_options_of(options: argparse.Namespace, settings: Settings) -> "EngineOptions":
    """The options of the engine that parsed options describe. Raises ParameterError.

    Args:
        options: the options of the command line.
        settings: the settings of the front end.
    """
    from ..engine.options import EngineOptions

    control_options.build(settings.control._replace(preset="off", gains=()), None, None)  # says what is wrong
    chosen: dict[str, Any] = {
        "dtype": options.dtype,
        "quantization": options.quantization,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": options.max_model_len,
        "block_size": options.block_size,
        "kv_cache_dtype": options.kv_cache_dtype,
        "kv_cache_bytes": options.kv_cache_bytes,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "scheduling_policy": options.scheduling_policy,
        "law": dict(settings.control.gains).get("law"),
    }
    gains = dict(settings.control.gains)
    try:
        return EngineOptions(
            **{name: value for name, value in chosen.items() if value is not None},
            enable_prefix_caching=options.enable_prefix_caching,
            enable_chunked_prefill=options.enable_chunked_prefill,
            max_queue=options.max_queue,
            batch_invariant=options.batch_invariant,
            parse_special=options.parse_special,
            warmup=options.warmup,
            preset=settings.control.preset,
            method=settings.control.method,
            budgets=settings.control.budgets,
            prefill_options=settings.control.prefill_options,
            clarification=gains.get("clarification", ""),
            branches=gains.get("branches"),
            **lora.fields(options),
            **parallelism.fields(options),
            **speculation_options.engine_fields(options.speculate, options.speculative_config),
        )
    except ValueError as error:
        raise model_options.loading_error(options, error) from error


def load(
    options: argparse.Namespace,
    settings: Settings,
    text_side: TextSide,
    engine_options: "EngineOptions",
    group: "ProcessGroup | None",
) -> "Frontend":
    """Start the engine, which compiles its programs in the background, and the front end around it.

    Args:
        options: the options of the command line.
        settings: the settings of the front end.
        text_side: tokenizer and template of the model.
        engine_options: the options of the engine.
        group: the processes that the engine spans, of which this is process 0; None for this one alone.
    """
    from ..engine.start import start
    from ..http import served_model
    from ..http.frontend import Frontend
    from .warm_progress import WarmProgress

    names = options.served_model_name or (options.model.resolve().name,)
    for adapter in options.lora_modules:
        if adapter.name in names:
            raise RequestError(f"--lora-modules must not name the model itself; got {adapter.name}")
    try:
        llm_engine = start(
            options.model, engine_options, progress=WarmProgress(), control=settings.control, group=group
        )
    except (OSError, ValueError, NotImplementedError) as error:
        raise model_options.loading_error(options, error) from error
    model = served_model.describe(
        llm_engine.model,
        str(options.model),
        names=names,
        context=llm_engine.context,
        template=text_side.template,
        defaults=generation_config.sampling_defaults(
            llm_engine.model.generation
            if text_side.generation_config is None
            else text_side.generation_config,
            text_side.overrides,
        ),
    )
    return Frontend(llm_engine, model, settings)


def _adapter_folder(options: argparse.Namespace) -> str | None:
    """The folder below which adapters may be loaded. RequestError where it is none, or adapters are off."""
    if options.lora_dir is None:
        return None
    if not options.enable_lora:
        raise RequestError(f"--lora-dir needs --enable-lora; got {options.lora_dir} alone")
    if not Path(options.lora_dir).is_dir():
        raise RequestError(f"--lora-dir must be a directory; got {options.lora_dir}")
    return options.lora_dir


def _template(template: str | None, model: Path) -> str | None:
    """The text of a chat template, which may be stated by its name in the model. Raises RequestError."""
    if template is None:
        return None
    from ..request.chat_template import check_template, named_template

    if "{" not in template and (named := named_template(model, template)) is not None:
        template = named
    elif "{" not in template:
        from .text_input import read_text

        template = read_text(template, "--chat-template")
    check_template(template, "--chat-template")
    return template


def start_processes(options: argparse.Namespace) -> "ProcessGroup | None":
    """Connect with the other processes that the options state, if there are any. Raises ParameterError."""
    stated = processes.of_command(options)
    if stated.alone:
        return None
    check_process_options(options)
    from ..engine import process_group

    return process_group.start_processes(stated)


def check_process_options(options: argparse.Namespace) -> None:
    """Raise RequestError for options that an engine of several processes does not have."""
    if options.on_engine_failure != "exit":
        raise RequestError(
            "--on-engine-failure must be exit with several processes, which all end; "
            f"got {options.on_engine_failure}"
        )
    if options.enable_sleep_mode:
        raise RequestError("--enable-sleep-mode must be off with several processes; got on")
