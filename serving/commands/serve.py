"""Serve a model over HTTP with the APIs of OpenAI and vLLM.

Options that mean the same have vLLM's names.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from entropic_jax.parameter_tables.table import Number

from ..http.settings import Limits, OnEngineFailure, Settings
from ..options import control_options, generation_config, kv_cache, parallelism, speculation_options
from ..options.model import EMBEDDED
from ..options.option_types import number, positive
from ..request import RequestError
from . import model_options

if TYPE_CHECKING:
    from ..http.frontend import Frontend

PORT, SECONDS = Number(int, 0, 65535), Number(float, 0, 1e9)
EXTRA = "install the extra: pip install 'entropic_jax[serve]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `entropic serve`."""
    parser.add_argument("path", nargs="?", type=Path, metavar="MODEL", help="the same as --model MODEL")
    _model(parser.add_argument_group("model"))
    _http(parser.add_argument_group("server"))
    _engine(parser.add_argument_group("engine"))
    _limits(parser.add_argument_group("limits"))
    control_options.add_arguments(parser)


def _model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", type=Path, default=EMBEDDED, help="model directory (default: embedded)")
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the API (default: the directory's)"
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="data type of the weights (default: what suits the device)",
    )
    model_options.add_quantization(group)
    group.add_argument("--max-model-len", type=positive, metavar="INT", help="most tokens of a sequence")
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template, a file or the text of one")
    group.add_argument(
        "--generation-config",
        default="auto",
        metavar="FOLDER",
        help="sampling defaults: auto for the model's generation_config.json, vllm for none, or a folder "
        "with another one (default: auto)",
    )
    group.add_argument(
        "--override-generation-config",
        default="{}",
        metavar="JSON",
        help='sampling parameters that take precedence over it, as {"temperature": 0.6}',
    )
    group.add_argument(
        "--tool-call-parser",
        choices=("hermes", "mistral", "llama3_json", "json"),
        help="format of tool calls (default: that of the chat template)",
    )
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="ignored, for compatibility with vLLM: tool_choice auto is always on",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=("think", "none"),
        help="whether <think> … </think> becomes reasoning_content (default: if the chat template has it)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="INT",
        help="ignored, for compatibility with vLLM: each request has its own",
    )


def _http(group: argparse._ArgumentGroup) -> None:
    default = Settings()
    group.add_argument(
        "--host", default=default.host, help="address to listen on (default: this machine only)"
    )
    group.add_argument(
        "--port", type=number(PORT), default=default.port, help="0 takes a free one (default: 8000)"
    )
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead of a port")
    group.add_argument("--ssl-certfile", metavar="FILE", help="PEM file of a certificate, to speak HTTPS")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="PEM file of its key, if that is another file")
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help="accepted keys (default: ENTROPIC_API_KEY, else no key is needed)",
    )
    group.add_argument(
        "--root-path", default="", metavar="PATH", help="path under which a proxy serves this server"
    )
    group.add_argument(
        "--allowed-origins",
        type=_origins,
        default=(),
        metavar="JSON",
        help="other sites whose pages may call the server (default: none)",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=(),
        metavar="NAME",
        help="accepted names in the header Host, next to this machine's, * for any (default: on a loopback "
        "address this machine's only, else any)",
    )
    group.add_argument("--disable-log-requests", action="store_true", help="do not log each request")
    group.add_argument(
        "--log-format", choices=("json", "text"), help="default: text on a terminal, else json"
    )
    group.add_argument(
        "--uvicorn-log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="log level (default: info)",
    )
    group.add_argument(
        "--metrics-prefix", default="vllm", metavar="NAME", help="of vLLM's metrics (default: vllm)"
    )
    group.add_argument("--otlp-traces-endpoint", metavar="URL", help="send OpenTelemetry traces there")
    group.add_argument(
        "--shutdown-timeout",
        type=number(SECONDS),
        default=default.drain,
        metavar="SECONDS",
        help="seconds that running requests get after SIGTERM (default: 30)",
    )
    group.add_argument(
        "--on-engine-failure",
        choices=get_args(OnEngineFailure),
        default=default.on_engine_failure,
        help="exit with status 1, restart the server (once it has run for a minute), or stay and answer 503 "
        "(default: exit)",
    )


def _engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-num-seqs", type=positive, metavar="INT", help="sequences that run at once")
    group.add_argument(
        "--max-num-batched-tokens", type=positive, metavar="INT", help="token budget of a prefill step"
    )
    parallelism.add_arguments(group)
    group.add_argument("--block-size", type=positive, metavar="INT", help="tokens of a KV cache page")
    kv_cache.add_argument(group)
    group.add_argument("--kv-cache-bytes", type=positive, metavar="INT", help="size of the KV cache")
    group.add_argument(
        "--gpu-memory-utilization",
        type=number(Number(float, 0, 1, above_low=True)),
        metavar="FLOAT",
        help="share of the device's memory that may be in use, from which the size of the KV cache follows "
        "unless it is set (default: 0.9; on a CPU, the KV cache has 1 GiB)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV cache of common prefixes (default: on)",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority", "predicted", "entropic"),
        help="order of all requests with the same stated priority: arrival (fcfs, also called priority), "
        "least work first, predicted from recent requests (predicted), or "
        "expected entropy drop per load (entropic, the scale macro); requests with the preset macro need "
        "entropic (default: entropic with --preset macro, full or full-lossy, else fcfs)",
    )
    group.add_argument(
        "--warmup",
        choices=("none", "min", "full"),
        default="min",
        help="programs compiled before the server is ready (default: min)",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="an answer does not depend on other requests, bit for bit; slower",
    )
    speculation_options.add_speculate(group)
    speculation_options.add_config(group)


def _limits(group: argparse._ArgumentGroup) -> None:
    default, settings = Limits(), Settings()
    group.add_argument(
        "--max-queue",
        type=positive,
        default=1024,
        metavar="INT",
        help="sequences that may wait (default: 1024)",
    )
    group.add_argument(
        "--request-timeout",
        type=number(SECONDS),
        default=settings.request_timeout,
        metavar="SECONDS",
        help="after which a request is ended, 0 for never (default: 600)",
    )
    for name, text in (
        ("body", "bytes of a body"),
        ("sequences", "texts of a request, over all its prompts"),
        ("stops", "stop strings of a request"),
        ("grammar", "characters of a schema or grammar"),
        ("connections", "connections that may be open"),
        ("tokenize", "characters or tokens of a text for the paths /tokenize and /detokenize"),
    ):
        value = getattr(default, name)
        group.add_argument(
            f"--max-{name}", type=positive, default=value, metavar="INT", help=f"{text} (default: {value})"
        )


def run(options: argparse.Namespace) -> int:
    """Load the model, serve it until a signal, and return the exit status."""
    try:
        from ..http import log, process, tracing
    except ImportError as error:
        raise RequestError(f"{error.name} is not installed; {EXTRA}") from None
    from ..compilation import remember_compilations

    options.model = options.path or options.model
    form = options.log_format or ("text" if sys.stderr.isatty() else "json")
    log.configure(form, options.uvicorn_log_level)
    traces = tracing.exporter(options.otlp_traces_endpoint)
    settings, text_side = settings_of(options), text_side_of(options)
    listener = process.bind(settings)  # whatever can be wrong so far is said before anything is loaded
    remember_compilations()
    return process.run(load(options, settings, text_side), listener, traces)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that parsed options describe."""
    if options.schedule is not None:
        raise RequestError(
            f"--schedule must not be set for a server, which has --scheduling-policy; got {options.schedule}"
        )
    keys = options.api_key or [os.environ.get("ENTROPIC_API_KEY", "")]
    return Settings(
        host=options.host,
        port=options.port,
        uds=options.uds,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        api_keys=tuple(key for key in keys if key),
        root_path=options.root_path.rstrip("/"),
        allowed_hosts=tuple(options.allowed_hosts),
        allowed_origins=options.allowed_origins,
        log_requests=not options.disable_log_requests,
        request_timeout=options.request_timeout or None,
        drain=options.shutdown_timeout,
        on_engine_failure=options.on_engine_failure,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        metrics_prefix=options.metrics_prefix,
        control=control_options.read(options),
        limits=Limits(
            body=options.max_body,
            sequences=options.max_sequences,
            stops=options.max_stops,
            grammar=options.max_grammar,
            connections=options.max_connections,
            tokenize=options.max_tokenize,
        ),
    )


class TextSide(NamedTuple):
    """What the command line says of the model's text side; None is as in the model's directory."""

    template: str | None = None  # chat template
    generation_config: Mapping[str, Any] | None = None
    overrides: Mapping[str, Any] = {}  # of the generation config


def text_side_of(options: argparse.Namespace) -> TextSide:
    """The text side that parsed options describe. Raises RequestError."""
    return TextSide(
        _template(options.chat_template),
        generation_config.read(options.generation_config),
        generation_config.override(options.override_generation_config),
    )


def load(options: argparse.Namespace, settings: Settings, text_side: TextSide) -> "Frontend":
    """Start the engine, which compiles its programs in the background, and the front end around it.

    Args:
        options: Of the command line.
        settings: Of the front end.
        text_side: Tokenizer and template of the model.
    """
    from ..engine import engine
    from ..engine.options import EngineOptions
    from ..http import served_model
    from ..http.frontend import Frontend
    from .warm_progress import WarmProgress

    control_options.build(settings.control._replace(preset="off", gains=()), None, None)  # says what is wrong
    chosen: dict[str, Any] = {
        "dtype": None if options.dtype == "auto" else options.dtype,
        "quantization": options.quantization,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": options.max_model_len,
        "block_size": options.block_size,
        "kv_cache_dtype": options.kv_cache_dtype,
        "kv_cache_bytes": options.kv_cache_bytes,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "scheduling_policy": "fcfs" if options.scheduling_policy == "priority" else options.scheduling_policy,
        "law": dict(settings.control.gains).get("law"),
    }
    try:
        llm_engine = engine.start(
            options.model,
            EngineOptions(
                **{name: value for name, value in chosen.items() if value is not None},
                enable_prefix_caching=options.enable_prefix_caching,
                max_queue=options.max_queue,
                batch_invariant=options.batch_invariant,
                warmup=options.warmup,
                preset=settings.control.preset,
                method=settings.control.method,
                budgets=settings.control.budgets,
                clarification=dict(settings.control.gains).get("clarification", ""),
                branches=dict(settings.control.gains).get("branches"),
                **parallelism.fields(options),
                **speculation_options.engine_fields(options.speculate, options.speculative_config),
            ),
            progress=WarmProgress(),
            control=settings.control,
        )
    except (OSError, ValueError, NotImplementedError) as error:
        raise model_options.loading_error(options, error) from error
    model = served_model.describe(
        llm_engine.model,
        str(options.model),
        names=options.served_model_name or (options.model.resolve().name,),
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


def _template(template: str | None) -> str | None:
    """The text of a chat template, from a file unless it contains braces. Raises RequestError."""
    if template is not None and "{" not in template:
        from .text_input import read_text

        template = read_text(template, "--chat-template")
    if template is not None:
        from ..chat_template import check_template

        check_template(template, "--chat-template")
    return template


def _origins(text: str) -> tuple[str, ...]:
    try:
        origins = json.loads(text)
    except ValueError:
        origins = text.split(",")
    if isinstance(origins, list) and all(isinstance(origin, str) and origin for origin in origins):
        return tuple(origins)
    raise argparse.ArgumentTypeError(f'must be a JSON list, as ["https://example.org"]; got {text}')
