"""Talk with a model in the terminal.

The model runs in this process, or on any server with OpenAI's API. In a terminal the text is streamed, each
token in the colour of its entropy; elsewhere it is plain.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from ..options import control_options, sampling_options
from ..options.control_options import Control
from ..options.model import EMBEDDED
from ..options.option_types import positive
from ..request import RequestError
from . import model_options

if TYPE_CHECKING:
    from .chat_backend import ChatBackend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic chat` takes."""
    model_options.add_model(parser)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url",
        metavar="URL",
        help="address of a server with OpenAI's API, which then runs the model; --model is its name there "
        "(default: the first that the server lists)",
    )
    server.add_argument(
        "--api-key",
        metavar="KEY",
        help="API key of the server (default: ENTROPIC_API_KEY, or OPENAI_API_KEY)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message at the beginning")
    parser.add_argument(
        "--max-model-len",
        type=positive,
        metavar="INT",
        help="most tokens of the conversation (default: the model's)",
    )
    model_options.add_parse_special(parser)
    sampling_options.add_arguments(parser.add_argument_group("sampling parameters"))
    control_options.add_arguments(parser, served=True)


def run(options: argparse.Namespace) -> int:
    """Talk until the input ends, and return the exit status: 1 if an answer failed."""
    overrides = sampling_options.read(options)
    control = control_options.read(options, default="")  # a server has a default of its own
    connect = _local if options.url is None else _remote
    backend = connect(options, control, overrides)
    from .chat_session import Session

    status = 1
    try:
        status = Session(backend, system=options.system).run()
    finally:
        if not backend.close():  # threads compile, which nothing can interrupt
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return status


def _local(options: argparse.Namespace, control: Control, overrides: dict[str, Any]) -> "ChatBackend":
    from . import chat_local

    return chat_local.start(options, control, overrides)


def _remote(options: argparse.Namespace, control: Control, overrides: dict[str, Any]) -> "ChatBackend":
    from .chat_backend import RemoteChat

    for name in ("dtype", "quantization", "max_model_len"):
        if (value := getattr(options, name)) is not None:
            raise RequestError(f"--{name.replace('_', '-')} must not be set with --url; got {value}")
    if not options.parse_special:
        raise RequestError("--no-parse-special must not be set with --url: the server decides")
    if control.method != "dense" or control.budgets or control.prefill_options:
        raise RequestError(f"--method must not be set with --url; got {control.method}")
    key = options.api_key or os.environ.get("ENTROPIC_API_KEY") or os.environ.get("OPENAI_API_KEY")
    name = None if options.model == EMBEDDED else str(options.model)
    return RemoteChat(options.url, key, name, control, overrides)
