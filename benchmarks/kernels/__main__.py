"""Benchmark of kernels on the default device: attention, page selection, entropies, experts, a decoding step.

    python -m benchmarks.kernels [--quick] [--show RESULTS] [--document]

One call measures whatever the default device has. Seconds are those that the device was busy, by JAX's
profiler; on a CPU, those on the clock. On an accelerator every kernel is first compared with float64 on the
small cases of its tests; `python -m tests.pallas.table --show` then enters that into docs/kernels.md.
"""

from ..harness.cores import pin_to_cores
from ..harness.publishing import benchmark_parser, measure_and_publish
from . import report
from .measure import PARTS, run
from .timing import on_cpu


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "kernels")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    parser.add_argument("--repeat", type=int, help="measurements of each time (10)")
    parser.add_argument("--threads", type=int, default=2, help="cores, on a CPU")
    options = parser.parse_args()
    options.repeat = options.repeat or (2 if options.quick else 10)
    if on_cpu() and not options.show:
        pin_to_cores(options.threads)
    measure_and_publish("kernels", report, run, options, device_field="device")


if __name__ == "__main__":
    main()
