"""Continue a prompt with a language model.

In a terminal the text is streamed, each token in the colour of its entropy; elsewhere it is plain.
"""

import argparse
import json
import secrets
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from entropic_jax.parameter_tables.table import check_unicode

from ..options import control_options, kv_cache, parallelism, sampling_options, speculation_options
from ..options.model import EMBEDDED
from ..request import Request, RequestError
from ..request.token_ids import check_parameters
from . import model_options
from .text_input import has_standard_input, read_text

if TYPE_CHECKING:
    from ..offline.generation import Generator
    from ..request.transcript import FinishReason

# For the embedded model, which continues Python.
DEFAULT_PROMPT = '''import json
from pathlib import Path


def read_config(path):
    """Read the configuration file and check its fields."""
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic generate` takes."""
    model_options.add_model(parser)
    model_options.add_parse_special(parser)
    kv_cache.add_argument(parser)
    parallelism.add_arguments(parser)
    title = "prompt (default: standard input, or a few lines of Python for the embedded model on a terminal)"
    prompt = parser.add_argument_group(title).add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="read it from a file, without its last line break; - is standard input",
    )
    prompt.add_argument(
        "--batch-file",
        metavar="FILE",
        help="one JSON object a line, with `prompt` (or `messages`) and any of the options below; "
        "writes one a line; - is standard input",
    )
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")

    sampling_options.add_arguments(parser.add_argument_group("sampling parameters"))
    control_options.add_arguments(parser)
    speculation_options.add_speculate(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one object: text, token_ids, finish_reason, usage, passes, trace (nats)",
    )


def run(options: argparse.Namespace) -> int:
    """Generate, and return the exit status."""
    overrides = sampling_options.read(options)  # what is wrong should be said before a model is loaded
    overrides.setdefault("seed", secrets.randbelow(2**31))
    if options.batch_file is not None:
        return _batch(options, overrides)
    return _single(options, overrides, _prompt(options))


def _single(options: argparse.Namespace, overrides: Mapping[str, Any], prompt: str) -> int:
    generator = _load(options)
    check_parameters(overrides, generator.vocabulary)
    if options.data_parallel_size > 1:
        number = options.data_parallel_size
        note = f"one of the {number} engines generates for one prompt; all of them for --batch-file"
        print(f"entropic generate: {note}", file=sys.stderr)
    check_unicode("prompt", prompt)
    text = generator.chat([{"role": "user", "content": prompt}]) if options.chat else prompt
    fields: dict[str, Any] = {**generator.defaults, **overrides, "prompt": text}
    request = Request(**fields)
    control_options.check_temperature(control_options.read(options), request.temperature)
    if options.json:
        (completion,) = generator.batch([request])
        print(json.dumps({**completion.as_json(), "seed": request.seed}, allow_nan=False))
        return _status(completion.finish_reason, completion.error)
    if sys.stdout.isatty():
        from .terminal import console_for_text, show

        if (console := console_for_text()) is not None:
            return _status(show(prompt, generator.stream(request), console, f"seed {request.seed}"))
    reason = None
    for token in generator.stream(request):
        print(token.text, end="", flush=True)
        reason = token.finish_reason
    print()
    return _status(reason)


def _status(reason: "FinishReason | None", error: str | None = None) -> int:
    if reason == "error":
        print(f"entropic generate: error: {error or 'the model computed no usable logits'}", file=sys.stderr)
    return int(reason == "error")


def _batch(options: argparse.Namespace, overrides: Mapping[str, Any]) -> int:
    from .batch_file import read_records, requests_of, run_batch

    text = read_text(options.batch_file, "--batch-file")
    try:
        records = read_records(text)
    except RequestError as error:
        raise RequestError(f"--batch-file {options.batch_file}: {error}") from None
    generator = _load(options)
    check_parameters(overrides, generator.vocabulary)
    try:
        requests = list(requests_of(records, generator, overrides, options.chat))
        for request in requests:
            control_options.check_temperature(control_options.read(options), request.temperature)
    except RequestError as error:
        raise RequestError(f"--batch-file {options.batch_file}: {error}") from None
    return int(run_batch(records, requests, generator) > 0)


def _load(options: argparse.Namespace) -> "Generator":
    from ..offline import generation
    from ..options.compilation_cache import remember_compilations
    from ..options.xla_threads import limit_xla_threads

    several = parallelism.divided(options) or options.data_parallel_size != 1
    limit_xla_threads(options.model, options.dtype, options.method, several)
    remember_compilations()
    try:
        preset = options.preset or speculation_options.default_preset(
            options.speculate, options.method, divided=parallelism.divided(options)
        )
        control = control_options.read(options, preset)
        return generation.load(
            options.model,
            options.dtype,
            control,
            options.kv_cache_dtype,
            options.speculate,
            options.tensor_parallel_size,
            options.quantization,
            options.parse_special,
            options.expert_parallel_size,
            options.data_parallel_size,
            options.decode_context_parallel_size,
        )
    except (OSError, ValueError, NotImplementedError) as error:
        raise model_options.loading_error(options, error) from error


def _prompt(options: argparse.Namespace) -> str:
    """The prompt from wherever the command line says it is; for the embedded model there is a default."""
    if options.prompt is not None:
        return options.prompt
    if options.prompt_file is not None:
        return read_text(options.prompt_file, "--prompt-file").removesuffix("\n")
    prompt = read_text("-", "standard input").removesuffix("\n") if has_standard_input() else ""
    if prompt:
        return prompt
    if options.model == EMBEDDED and not options.chat:
        return DEFAULT_PROMPT
    raise RequestError("a prompt is required: give --prompt, --prompt-file or standard input")
