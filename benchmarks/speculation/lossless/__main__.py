"""Check of lossless speculation: the texts of `meso` against those of `off`, and of `full` against `micro`.

    python -m benchmarks.speculation.lossless [--quick] [--prompts 200] [--rows 1,4,16] [--document]

Every cell continues the same prompts of held-out text with the same seeds through two engines. In the largest
batch the page pool is too small for all rows, so that sequences are preempted and recomputed.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")


from ...harness.paths import ROOT
from ...harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report

NAME = "speculation.lossless"


def main() -> None:
    """Compare texts or read results, print them, store them."""
    parser = benchmark_parser(__doc__, NAME)
    parser.add_argument("--prompts", type=int, help="texts of each cell (200)")
    parser.add_argument("--tokens", type=int, help="tokens of a text, at most (48)")
    parser.add_argument("--rows", help="rows of the engines (1,4,16)")
    embedded = ROOT / "models" / "embedded"
    parser.add_argument("--model", type=Path, default=embedded, help="directory of the model (embedded)")
    options = parser.parse_args()
    options.prompts = options.prompts or (3 if options.quick else 200)
    options.tokens = options.tokens or (8 if options.quick else 48)
    options.rows = [int(n) for n in (options.rows or ("2" if options.quick else "1,4,16")).split(",")]
    measure_and_publish(NAME, report, measure.run, options)


if __name__ == "__main__":
    main()
