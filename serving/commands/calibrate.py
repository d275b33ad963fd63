"""Calibrate a model on text, and store the set-points of its controllers.

The text should be of the kind that the model will write, and none that it was trained on. What is found goes
to `calibration.json` in the model's directory, from where it is used by default.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..options.option_types import positive
from ..request import RequestError
from . import model_options
from .text_input import check_writable, read_text, unwritable

if TYPE_CHECKING:
    from rich.table import Table

    from entropic_jax import models
    from entropic_jax.calibration import Calibration

TOKENS = 50_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic calibrate` takes."""
    model_options.add_model(parser)
    model_options.add_texts(parser)
    parser.add_argument(
        "--tokens",
        type=positive,
        default=TOKENS,
        metavar="INT",
        help=f"predict at most this many, from the beginnings of all files on (default: {TOKENS})",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to store it (default: calibration.json in the model)"
    )


def run(options: argparse.Namespace) -> int:
    """Calibrate, store, print the table, and return the exit status."""
    from rich.console import Console

    from entropic_jax.calibration import FILE, save_calibration

    file: Path = options.model / FILE if options.out is None else options.out
    texts = [read_text(path, "--text") for path in options.text]
    if not options.model.is_dir():
        raise RequestError(f"--model must be a directory with a model; got {options.model}")
    check_writable(file, "--out")
    calibration = _calibrate(*model_options.load_model(options), texts, options.tokens)
    try:
        save_calibration(calibration, file)
    except OSError as error:
        raise unwritable(file, "--out", error) from None
    console = Console(highlight=False)
    console.print(table(calibration))
    console.print(f"stored in {file}", soft_wrap=True, markup=False)
    return 0


def _calibrate(
    model: "models.Model", tokenizer: "models.Tokenizer", texts: list[str], tokens: int
) -> "Calibration":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from entropic_jax.calibration import calibrate, split_sequences

    sequences = [tokenizer.encode(text) for text in texts]
    context = model.config.longest_context
    total = 2 * sum(len(piece) - 1 for piece in split_sequences(sequences, context, tokens))  # read twice
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    errors, hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=errors, transient=True, disable=hidden) as bar:
        task = bar.add_task("calibrating", total=total)
        advance = lambda count: bar.advance(task, count)
        try:
            return calibrate(
                model.decoder, model.params, sequences, context=context, tokens=tokens, on_progress=advance
            )
        except ValueError as error:
            raise RequestError(f"--text: {error}") from error


def table(calibration: "Calibration") -> "Table":
    """The calibration as a table for a terminal."""
    from rich import box
    from rich.table import Table

    from entropic_jax.calibration import LEVELS

    moments = (calibration.mean, calibration.correlation, calibration.scale)
    quantile = dict(zip(LEVELS, calibration.quantiles, strict=True))
    spread = " · ".join(f"{quantile[level]:.2f}" for level in (0.05, 0.25, 0.5, 0.75, 0.95))
    rows = (
        ("tokens", f"{calibration.tokens:,}"),
        ("temperature of the belief", f"{calibration.temperature:.3f}"),
        ("loss, nats per token", f"{calibration.loss:.4f} → {calibration.calibrated_loss:.4f}"),
        ("calibration error", f"{calibration.error:.2%} → {calibration.calibrated_error:.2%}"),
        ("entropy, 5 · 25 · 50 · 75 · 95 %", f"{spread} nats"),
        ("target of the temperature", f"{calibration.target_entropy:.2f} nats"),
        (
            "prune fully below, nothing above",
            f"{calibration.low_entropy:.2f}, {calibration.high_entropy:.2f} nats",
        ),
        (
            "along a text",
            "mean {:.2f}, correlation {:.2f}, ± {:.2f}".format(*moments),
        ),
    )
    grid = Table(box=box.SIMPLE, show_header=False, padding=(0, 1), pad_edge=False)
    grid.add_column(style="dim")
    grid.add_column()
    for row in rows:
        grid.add_row(*row)
    return grid
