"""Scheduling benchmark: a simulation of the scheduling laws and their controls, on two traces and more.

    python -m benchmarks.scheduling [--quick] [--seeds 4] [--document]

Every policy is compared with first come, first served on the same requests: round robin, the entropic law
with its own entropies and with those of other requests, shortest remaining by oracle and by prediction.
"""

import argparse

from rich.console import Console

from ..harness.provenance import describe_run
from ..harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report


def main() -> None:
    """Simulate or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "scheduling")
    parser.add_argument("--seeds", type=int, default=4, help="simulations of each policy")
    options = parser.parse_args()
    measure_and_publish("scheduling", report, simulate, options, device_field="device")


def simulate(options: argparse.Namespace, console: Console) -> dict:
    """Every condition and seed."""
    count, seeds = (30, 2) if options.quick else (measure.COUNT, options.seeds)
    description = describe_run(Console(quiet=True))  # nothing is timed: a busy machine does not matter
    rows = []
    for condition in measure.conditions(options.quick):
        for seed in range(seeds):
            rows += measure.measure(condition, seed, count)
        console.print(f"{condition.law}, max_tokens {condition.limits}", highlight=False)
    return {
        **{key: description[key] for key in ("date", "commit")},
        "device": "simulation",
        "count": count,
        "places": measure.PLACES,
        "load": measure.LOAD,
        "seeds": seeds,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
