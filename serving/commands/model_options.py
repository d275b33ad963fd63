"""What several commands are asked for: a model, and text to measure it on."""

import argparse
from pathlib import Path

from ..generation import EMBEDDED


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declare `--model` and `--dtype`."""
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="model directory (default: embedded)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: what suits the device)",
    )


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Declare `--text`, of which there may be several."""
    parser.add_argument(
        "--text",
        nargs="+",
        action="extend",
        required=True,
        metavar="FILE",
        help="held-out text, each file a text of its own; - is standard input",
    )
