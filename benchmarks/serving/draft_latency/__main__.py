"""Latency of streams with drafts: the pauses between tokens of two servers, one of which drafts.

    python -m benchmarks.serving.draft_latency [--contexts 512,2048] [--load 0.7] [--quick] [--document]

The presets `off` and `meso`, whose texts are the same. First the rate of requests that `off` sustains is
measured; then both servers in turn get a part of that rate (`--load`), with the same prompts, lengths, seeds
and times of arrival. Client and servers share the cores; only one server at a time has requests.
"""

from pathlib import Path

from entropic_jax.serving.options.model import EMBEDDED

from ...harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report

NAME = "serving.draft_latency"


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, NAME)
    parser.add_argument("--contexts", help="longest prompts of each cell, tokens (512,2048)")
    parser.add_argument("--rows", type=int, default=8, help="rows of the servers (8)")
    parser.add_argument("--requests", type=int, help="requests of a run (100)")
    parser.add_argument("--repeat", type=int, help="runs of each server and cell (3)")
    parser.add_argument(
        "--load", type=float, default=0.7, help="arrivals, as a part of what `off` sustains (0.7)"
    )
    parser.add_argument("--temperature", type=float, default=0.7, help="temperature of the sampling (0.7)")
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="directory of the model (embedded)")
    options = parser.parse_args()
    quick = options.quick
    contexts = options.contexts or ("64" if quick else "512,2048")
    options.contexts = [int(n) for n in contexts.split(",")]
    options.requests = options.requests or (20 if quick else 100)
    options.repeat = options.repeat or (1 if quick else 3)
    if options.requests <= measure.QUEUE * options.rows:
        least = measure.QUEUE * options.rows + 1
        parser.error(f"--requests must be at least {least} for {options.rows} rows; got {options.requests}")
    measure_and_publish(NAME, report, measure.run, options)


if __name__ == "__main__":
    main()
