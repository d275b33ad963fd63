"""Interference benchmark: a small request beside hard input, and decoding while long prompts are prefilled.

    python -m benchmarks.serving.interference [--seconds 20] [--quick] [--document]

Hard input: small requests arrive at a steady rate, first alone, then while 16 hard schemas (all refused) and
8 tokenisations of long texts are in flight all the time. Long prompts: short requests arrive at a fixed rate
and stream their text, while prompts of 8000 tokens arrive beside them; once with chunked prefill, once with
whole prompts. Client and server share the cores. Exits with 1 if a target is missed. Programs are compiled on
the first run, so run it once with `--quick` before.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from entropic_jax.serving.options.model import EMBEDDED

from ...harness.provenance import describe_run
from ...harness.publishing import benchmark_parser, load_or_measure, publish
from ...harness.server_process import ours, running
from . import report
from .measure import Rates, arm
from .report import CHUNKED, UNCHUNKED

SERVER = ("--max-num-seqs", "16", "--max-model-len", "8192", "--warmup", "min")
ARMS = {CHUNKED: (), UNCHUNKED: ("--no-enable-chunked-prefill",)}  # options of the server


def main() -> int:
    """Measure, print and store; 1 if a target is missed."""
    parser = benchmark_parser(__doc__, "serving.interference")
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the four measurements")
    for name, value in Rates._field_defaults.items():
        parser.add_argument(f"--{name}-rate", type=float, default=value, help=f"arrivals a second ({value})")
    options, console = parser.parse_args(), Console(highlight=False)
    results = load_or_measure(options, "interference", lambda: measure(options, console), "cpu")
    publish("serving.interference", report, results, options.document and not options.quick, console)
    held = report.verdicts(results)
    return 0 if options.quick or all(is_held for _, is_held, _ in held) else 1


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The figures of each server.

    Args:
        options: the parsed options.
        console: where to print what runs.
    """
    seconds = 4.0 if options.quick else options.seconds
    rates = Rates(*(getattr(options, f"{name}_rate") for name in Rates._fields))
    results = describe_run(console) | {"seconds": seconds, "rates": rates._asdict()}
    results |= {"server": SERVER, "arms": {}}
    for name, extra in ARMS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = ours(options.model, *SERVER, *extra)
            with running(command, Path(folder) / "server.log") as server:
                measured = arm(server.url, seconds, rates, with_hard_input=not extra)
                results["arms"][name] = asyncio.run(measured)
    return results


if __name__ == "__main__":
    sys.exit(main())
