"""Benchmark of draft lengths: the draft-length law against fixed lengths of the same drafter.

    python -m benchmarks.speculation.lengths [--quick] [--drafters auto,head] [--lengths 1,2,4] [--document]

The arms of a drafter continue the same prompts with the same seeds, in turn launch by launch.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "1")  # threads of XLA, as in `entropic generate` and `entropic serve`

from ...harness.paths import ROOT
from ...harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report

NAME = "speculation.lengths"


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, NAME)
    parser.add_argument("--drafters", help="names of drafters (suffix,pruned,head,auto)")
    parser.add_argument("--lengths", help="fixed lengths (1,2,3,4,6,8,12,15)")
    parser.add_argument("--contexts", help="tokens of a short and a long prompt (512,7936)")
    parser.add_argument("--prompts", type=int, help="texts of each workload (12)")
    parser.add_argument("--tokens", type=int, help="tokens to generate for each (128)")
    parser.add_argument("--threads", type=int, default=2, help="cores")
    embedded = ROOT / "models" / "embedded"
    parser.add_argument("--model", type=Path, default=embedded, help="directory of the model (embedded)")
    options = parser.parse_args()
    quick = options.quick
    options.drafters = (options.drafters or ("suffix,auto" if quick else "suffix,pruned,head,auto")).split(
        ","
    )
    options.lengths = [
        int(n) for n in (options.lengths or ("2,4" if quick else "1,2,3,4,6,8,12,15")).split(",")
    ]
    options.contexts = [int(n) for n in (options.contexts or ("64,96" if quick else "512,7936")).split(",")]
    options.prompts = options.prompts or (1 if quick else 12)
    options.tokens = options.tokens or (12 if quick else 128)
    measure_and_publish(NAME, report, measure.run, options)


if __name__ == "__main__":
    main()
