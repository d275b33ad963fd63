"""Benchmark of stopping signals: what predicts that a draft is accepted, and what that is worth as a rule.

    python -m benchmarks.speculation.signals [--quick] [--contexts 512,2048] [--temperatures 1.0] [--document]

Drafts of 15 tokens are recorded at every position of texts that the engine emits. Rules that stop drafts
early are evaluated on these records, with the measured costs of draft steps and passes.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "1")  # threads of XLA, as in `entropic generate` and `entropic serve`

from ...harness.paths import ROOT
from ...harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report

NAME = "speculation.signals"


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, NAME)
    parser.add_argument("--contexts", help="tokens of the prompts (512,2048,7936)")
    parser.add_argument("--temperatures", help="of the sampling (0.7,1.0)")
    parser.add_argument("--prompts", type=int, help="texts of each context (24)")
    parser.add_argument("--tokens", type=int, help="positions of a text at which drafts are recorded (128)")
    help_costs = "results of speculation or speculation.signals whose pass costs to use (measures them)"
    parser.add_argument("--costs", type=Path, metavar="RESULTS", help=help_costs)
    parser.add_argument("--threads", type=int, default=2, help="cores")
    embedded = ROOT / "models" / "embedded"
    parser.add_argument("--model", type=Path, default=embedded, help="directory of the model (embedded)")
    options = parser.parse_args()
    quick = options.quick
    options.contexts = [int(n) for n in (options.contexts or ("96" if quick else "512,2048,7936")).split(",")]
    options.temperatures = [
        float(t) for t in (options.temperatures or ("1.0" if quick else "0.7,1.0")).split(",")
    ]
    options.prompts = options.prompts or (4 if quick else 24)
    options.tokens = options.tokens or (16 if quick else 128)
    measure_and_publish(NAME, report, measure.run, options)


if __name__ == "__main__":
    main()
