"""Options of `entropic serve`."""

import argparse
import json
import re
from pathlib import Path
from typing import Any, get_args

from entropic_jax.parameter_tables.table import Number, short

from ..http.rate_limit import RateLimit
from ..http.settings import MOST_TEXTS, Limits, OnEngineFailure, Settings
from ..options import control_options, kv_cache, lora, parallelism, processes, speculation_options
from ..options.lora import LONGEST_NAME
from ..options.model import EMBEDDED
from ..options.option_types import DEFAULT_ROWS, ROWS, Several, num_bytes, number, path, positive, string
from . import config_file, model_options

PERIODS = {"s": 1.0, "min": 60.0, "h": 3600.0}  # seconds
RATE = re.compile(r"([0-9]{1,9})/(s|min|h)")
RESOURCES = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type")  # of a Ray actor
PORT, SECONDS = Number(int, 0, 65535), Number(float, 0, 1e9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `entropic serve`."""
    parser.add_argument("path", nargs="?", type=Path, metavar="MODEL", help="the same as --model MODEL")
    config_file.add_argument(parser)
    _model(parser.add_argument_group("model"))
    _http(parser.add_argument_group("server"))
    _engine(parser.add_argument_group("engine"))
    _adapters(parser.add_argument_group("adapters"))
    _files(parser.add_argument_group("files"))
    _limits(parser.add_argument_group("limits"))
    _fleet(parser.add_argument_group("fleet"))
    control_options.add_arguments(parser, served=True)


def _model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", type=path, default=EMBEDDED, help="model directory (default: embedded)")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action=Several,
        type=string(LONGEST_NAME),
        metavar="NAME",
        help="names of the API (default: the directory's)",
    )
    model_options.add_dtype(group)
    model_options.add_quantization(group)
    model_options.add_parse_special(group)
    text = "most tokens of a sequence (default: the model's longest context)"
    group.add_argument("--max-model-len", type=positive, metavar="INT", help=text)
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template: the name of one of the model's, a file, or the text of one",
    )
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
    text = "address to listen on (default: this machine only)"
    group.add_argument("--host", default=default.host, help=text)
    group.add_argument(
        "--port", type=number(PORT), default=default.port, help="0 takes a free one (default: 8000)"
    )
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead of a port")
    group.add_argument("--ssl-certfile", metavar="FILE", help="PEM file of a certificate, to speak HTTPS")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="PEM file of its key, if that is another file")
    group.add_argument(
        "--api-key",
        type=_api_key,
        nargs="+",
        action=Several,
        metavar="KEY",
        help="accepted keys (default: ENTROPIC_API_KEY, else no key is needed)",
    )
    text = "path under which a proxy serves this server"
    group.add_argument("--root-path", default="", metavar="PATH", help=text)
    group.add_argument(
        "--allowed-origins",
        action=Several,
        type=_origins,
        default=(),
        metavar="JSON",
        help="other sites whose pages may call the server (default: none)",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        action=Several,
        default=(),
        metavar="NAME",
        help="accepted names in the header Host, next to this machine's, * for any (default: on a loopback "
        "address this machine's only, else any)",
    )
    group.add_argument(
        "--disable-log-requests",
        "--disable-uvicorn-access-log",
        "--no-enable-log-requests",
        action="store_true",
        help="do not log each request",
    )
    group.add_argument(
        "--log-format", choices=("json", "text"), help="default: text on a terminal, else json"
    )
    group.add_argument(
        "--uvicorn-log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="log level (default: info)",
    )
    text = "prefix of vLLM's metrics (default: vllm)"
    group.add_argument("--metrics-prefix", default="vllm", metavar="NAME", help=text)
    group.add_argument(
        "--profile-dir",
        metavar="FOLDER",
        help="enable the paths /start_profile and /stop_profile, which write a JAX trace there",
    )
    group.add_argument(
        "--enable-sleep-mode",
        action="store_true",
        help="enable the paths /sleep, which frees the KV cache, /wake_up and /is_sleeping",
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


def _adapters(group: argparse._ArgumentGroup) -> None:
    lora.add_arguments(group)
    group.add_argument(
        "--lora-dir",
        metavar="FOLDER",
        help="enable the paths /v1/load_lora_adapter and /v1/unload_lora_adapter, for adapters below it",
    )


def _engine(group: argparse._ArgumentGroup) -> None:
    text = f"sequences that run at once (default: {DEFAULT_ROWS})"
    group.add_argument("--max-num-seqs", type=number(ROWS), default=DEFAULT_ROWS, metavar="INT", help=text)
    text = "token budget of a prefill step (default: 512 on a CPU, 2048 elsewhere)"
    group.add_argument("--max-num-batched-tokens", type=positive, metavar="INT", help=text)
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prefill long prompts in chunks, with decode steps between them (default: on)",
    )
    parallelism.add_arguments(group)
    processes.add_arguments(group)
    text = "tokens of a KV cache page (default: by the device and the method)"
    group.add_argument("--block-size", type=positive, metavar="INT", help=text)
    kv_cache.add_argument(group)
    group.add_argument(
        "--kv-cache-bytes",
        "--kv-cache-memory-bytes",
        type=num_bytes,
        metavar="INT",
        help="size of the KV cache",
    )
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
    text = "requests with different API keys share cached prefixes (default: each key has its own)"
    group.add_argument("--share-prefix-cache", action="store_true", help=text)
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


def _fleet(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=positive,
        metavar="INT",
        help="serve with so many copies of the model under Ray Serve (extra ray)",
    )
    group.add_argument(
        "--max-replicas",
        type=positive,
        metavar="INT",
        help="add replicas up to this number under load (default: --replicas)",
    )
    group.add_argument(
        "--work-per-replica",
        type=number(Number(float, 0, 1e9, above_low=True)),
        default=10.0,
        metavar="SECONDS",
        help="predicted seconds of work outstanding for which there is one replica (default: 10)",
    )
    group.add_argument(
        "--replica-resources",
        type=_resources,
        default={"num_cpus": 1},
        metavar="JSON",
        help='what Ray reserves for each process of a replica, as {"num_gpus": 1} (default: {"num_cpus": 1})',
    )
    group.add_argument(
        "--replica-routing",
        choices=("prefix", "load"),
        default="prefix",
        help="prompts that begin alike go to the same replica within a bound on its load, or requests go to "
        "the less loaded of two replicas (default: prefix)",
    )


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
    most_texts = number(Number(int, 1, MOST_TEXTS))
    for name, text in (
        ("body", "bytes of a body"),
        ("sequences", "texts of a request, over all its prompts"),
        ("stops", "stop strings of a request"),
        ("grammar", "characters of a schema or grammar"),
        ("connections", "connections that may be open"),
        ("tokenize", "characters or tokens of a text for the paths /tokenize and /detokenize"),
        ("stored_responses", "responses of /v1/responses kept in memory; the oldest are dropped"),
        ("stored_response_bytes", "bytes of all stored responses and their conversations"),
        ("file_bytes", "bytes of all files below --files-dir"),
    ):
        value = getattr(default, name)
        group.add_argument(
            f"--max-{name.replace('_', '-')}",
            type=num_bytes if "bytes" in text else most_texts if name == "sequences" else positive,
            default=value,
            metavar="INT",
            help=f"{text} (default: {value})",
        )
    group.add_argument(
        "--request-rate-limit",
        type=rate_limit,
        metavar="N/PERIOD",
        help="POST requests that an API key may send, as 10/s, 600/min or 5000/h: N at once, and as many "
        "again in each period; without keys, for each address (default: no limit)",
    )
    group.add_argument(
        "--stored-response-ttl",
        type=number(Number(float, 0, 1e9, above_low=True)),
        default=default.stored_response_seconds,
        metavar="SECONDS",
        help="after which a stored response is forgotten (default: 3600)",
    )


def _files(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--files-dir",
        metavar="FOLDER",
        help="enable the paths /v1/files and /v1/batches, which keep files there (made if missing)",
    )
    group.add_argument(
        "--file-ttl",
        type=number(Number(float, 0, 1e9, above_low=True)),
        default=Limits().file_seconds,
        metavar="SECONDS",
        help="after which a file that states no other time is deleted (default: 30 days)",
    )


def _resources(text: str) -> dict[str, Any]:
    try:
        resources = json.loads(text)
    except (ValueError, RecursionError):
        resources = None
    if isinstance(resources, dict) and resources.keys() <= set(RESOURCES):
        return resources
    raise argparse.ArgumentTypeError(f"must be a JSON object with {', '.join(RESOURCES)}; got {short(text)}")


def _api_key(text: str) -> str:
    if not text or not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError(f"must be printable ASCII, at least one character; got {text!r}")
    return text


def _origins(text: str) -> tuple[str, ...]:
    """Origins in a JSON list, or separated by commas.

    >>> _origins("https://example.org,*"), _origins('["https://example.org"]')
    (('https://example.org', '*'), ('https://example.org',))
    """
    try:
        origins = json.loads(text) if text.lstrip()[:1] in tuple('[{"') else text.split(",")
    except (ValueError, RecursionError):
        origins = None
    if isinstance(origins, list) and all(isinstance(origin, str) and origin for origin in origins):
        return tuple(origins)
    accepted = 'origins separated by commas, or a JSON list, as ["https://example.org"]'
    raise argparse.ArgumentTypeError(f"must be {accepted}; got {short(text)}")


def rate_limit(text: str) -> RateLimit:
    """The limit that a text such as "10/s", "600/min" or "5000/h" states.

    >>> rate_limit("600/min")
    RateLimit(requests=600, seconds=60.0)
    """
    match = RATE.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a number of at least 1 and a period of s, min or h, as 10/s; got {text}"
        )
    return RateLimit(int(match[1]), PERIODS[match[2]])
