"""Benchmark of entropy estimators: what each costs, and how far it is from the exact entropy.

    python -m benchmarks.entropy [--quick] [--vocabularies 32000,128256,151936] [--ks 16,50,128] [--document]

Errors are against float64 in NumPy, over Zipf–Mandelbrot laws, over normal logits, and over what a model
computes on text that it was not trained on. Times are of one token after another inside one compiled loop,
as when decoding.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")


from ..harness.held_out_text import module_files
from ..harness.paths import ROOT
from ..harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report

VOCABULARIES, KS = [32_000, 128_256, 151_936], [16, 50, 128]
TEXTS = ("console", "table", "text", "progress", "pretty", "syntax")  # modules of rich, which is held out


def comma_separated_integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, "entropy")
    parser.add_argument("--vocabularies", type=comma_separated_integers, help="sizes (32000,128256,151936)")
    parser.add_argument(
        "--ks", type=comma_separated_integers, help="numbers of the largest logits (16,50,128)"
    )
    parser.add_argument("--rows", type=int, help="distributions of each family (64)")
    parser.add_argument("--tokens", type=int, help="tokens of text that the model reads (1024)")
    parser.add_argument("--repeat", type=int, help="measurements of each time (15)")
    parser.add_argument("--threads", type=int, default=2, help="cores")
    embedded = ROOT / "models" / "embedded"
    parser.add_argument("--model", type=Path, default=embedded, help="directory of the model (embedded)")
    parser.add_argument("--text", type=Path, nargs="+", help="what it reads (modules of rich, held out)")
    options = parser.parse_args()
    options.vocabularies = options.vocabularies or ([2000, 8000] if options.quick else VOCABULARIES)
    options.ks = options.ks or ([16] if options.quick else KS)
    options.rows = options.rows or (8 if options.quick else 64)
    options.tokens = options.tokens or (64 if options.quick else 1024)
    options.repeat = options.repeat or (2 if options.quick else 15)
    if not options.text:
        options.text = [file for name in TEXTS for file in module_files(f"{name}.py")]
    measure_and_publish("entropy", report, measure.run, options)


if __name__ == "__main__":
    main()
