"""Benchmark of lossless speculation: what a verification pass costs, what is accepted, and tokens a second.

    python -m benchmarks.speculation [--quick] [--contexts 512,2048] [--temperatures 0.7,1.0] [--document]

Every arm decodes the same prompts of held-out text with the same seeds, in turn with the others, so their
texts must be equal up to ties. Texts that fall into a loop are left out of the rates.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "1")  # threads of XLA, as in `entropic generate` and `entropic serve`

from ..harness.paths import ROOT
from ..harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report
from .measure import DTYPES


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "speculation")
    parser.add_argument("--contexts", help="tokens of the prompts (512,2048,7936)")
    parser.add_argument("--temperatures", help="of the sampling (0.7,1.0)")
    parser.add_argument("--prompts", type=int, help="texts of the longest context; short ones have more (8)")
    parser.add_argument("--tokens", type=int, help="tokens to generate for each (128)")
    parser.add_argument("--repeat", type=int, help="measurements of each time (5)")
    parser.add_argument("--rows", help="rows of the engine that decodes batches (1,8,32)")
    parser.add_argument("--batch-contexts", help="tokens of the prompts of batches (256,4096)")
    parser.add_argument("--rounds", type=int, help="measurements of each batch (9)")
    parser.add_argument("--threads", type=int, default=2, help="cores")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the model and its KV cache")
    embedded = ROOT / "models" / "embedded"
    parser.add_argument("--model", type=Path, default=embedded, help="directory of the model (embedded)")
    options = parser.parse_args()
    quick = options.quick
    options.contexts = [int(n) for n in (options.contexts or ("96" if quick else "512,2048,7936")).split(",")]
    options.temperatures = [
        float(t) for t in (options.temperatures or ("1.0" if quick else "0.7,1.0")).split(",")
    ]
    options.rows = [int(n) for n in (options.rows or ("2" if quick else "1,8,32")).split(",")]
    options.batch_contexts = [
        int(n) for n in (options.batch_contexts or ("96" if quick else "256,4096")).split(",")
    ]
    options.rounds = options.rounds or (1 if quick else 9)
    options.prompts = options.prompts or (1 if quick else 8)
    options.tokens = options.tokens or (12 if quick else 128)
    options.repeat = options.repeat or (1 if quick else 5)
    measure_and_publish("speculation", report, measure.run, options)


if __name__ == "__main__":
    main()
