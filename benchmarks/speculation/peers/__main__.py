"""Speculation beside other engines: ours, OpenVINO GenAI's and llama.cpp's, on texts that copy their prompt.

    python -m benchmarks.speculation.peers [--quick] [--prompts 8] [--tokens 256] [--document]

Every engine continues the same prompts greedily, with the same float32 weights, in a process of its own on
the same cores; they take turns. One that cannot run is reported as such. `benchmarks/README.md` says how to
install the other engines; OPENVINO_PYTHON and LLAMACPP_PYTHON name their interpreters.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "1")  # threads of XLA, as in `entropic generate` and `entropic serve`

from ...harness.paths import ROOT
from ...harness.publishing import benchmark_parser, measure_and_publish
from . import measure, report

NAME = "speculation.peers"


def main() -> None:
    """Measure or read results, print them, store them."""
    parser = benchmark_parser(__doc__, NAME)
    names = ",".join(measure.ENGINES)
    parser.add_argument("--engines", type=lambda text: text.split(","), help=f"engines ({names})")
    parser.add_argument("--context", type=int, help="tokens of a prompt (4096)")
    parser.add_argument("--prompts", type=int, help="texts (8)")
    parser.add_argument("--tokens", type=int, help="tokens of a text (256)")
    parser.add_argument("--repeat", type=int, help="measurements of each text (3)")
    parser.add_argument(
        "--draft-layers", default="0,3,5", help="layers of the model that the draft model keeps (0,3,5)"
    )
    parser.add_argument("--threads", type=int, default=2, help="cores and threads of every engine")
    parser.add_argument("--limit", type=float, default=600.0, help="most seconds of one call of an engine")
    for name in ("openvino", "llamacpp"):
        variable = f"{name.upper()}_PYTHON"
        default = os.environ.get(variable, sys.executable)
        parser.add_argument(f"--{name}-python", default=default, help=f"its interpreter (${variable})")
    folder = Path(tempfile.gettempdir()) / "entropic-peers"
    parser.add_argument(
        "--work", type=Path, default=folder, help="keeps the weights in the form of each engine"
    )
    embedded = ROOT / "models" / "embedded"
    parser.add_argument("--model", type=Path, default=embedded, help="directory of the model (embedded)")
    options = parser.parse_args()
    quick = options.quick
    options.engines = options.engines or list(measure.ENGINES)
    unknown = [name for name in options.engines if name not in measure.ENGINES]
    if unknown or measure.PLAIN["ours"] not in options.engines:
        plain = measure.PLAIN["ours"]
        parser.error(f"--engines must be among {names}, with {plain}; got {','.join(options.engines)}")
    options.draft_layers = [int(n) for n in options.draft_layers.split(",")]
    options.context = options.context or (256 if quick else 4096)
    options.prompts = options.prompts or (1 if quick else 8)
    options.tokens = options.tokens or (24 if quick else 256)
    options.repeat = options.repeat or (1 if quick else 3)
    measure_and_publish(NAME, report, measure.run, options)


if __name__ == "__main__":
    main()
