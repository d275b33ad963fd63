"""Benchmark of expert policies: bits per byte of held-out text against the experts read of a mixture.

    python -m benchmarks.ablation.experts --model DIR [--held-out WORK/held_out.json] [--quick] [--document]

The model is one that `python -m entropic_jax.models.train --shape num_local_experts=8,num_experts_per_tok=4`
has trained, or any other mixture with a byte-level tokenizer. The held-out text is that of a training folder,
or the modules of `rich`.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from ...harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report

NAME = "ablation.experts"


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, NAME)
    parser.add_argument("--model", type=Path, help="directory of a mixture of experts")
    parser.add_argument("--held-out", type=Path, help="held_out.json of a training folder; none takes rich")
    parser.add_argument("--files", type=int, help="held-out files to measure on (32)")
    parser.add_argument("--calibration-files", type=int, help="files of other packages to fit with (32)")
    parser.add_argument("--tokens", type=int, help="tokens of a file (512)")
    parser.add_argument("--prices", type=int, help="prices of each law (6)")
    options = parser.parse_args()
    if options.model is None and options.show is None:
        parser.error("--model must be the directory of a mixture of experts")
    defaults = {"files": (32, 3), "calibration_files": (32, 3), "tokens": (512, 24), "prices": (6, 2)}
    for name, (value, quick) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else value)
    measure_and_publish(NAME, report, measure.run, options)


if __name__ == "__main__":
    main()
