"""Measure the effect of each scale of control on a model and a text.

Presets alternate on text that the model should not have been trained on. `meso` and `full`, which draft
tokens and change no text, are not among them. Measured are bits per byte and the keys and values read for
them, the speed of a step, and the entropy of free generation.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from entropic_jax.parameter_tables.control_gains import DRAFTS, SCALES

from ..options import control_options
from ..request import RequestError
from . import model_options
from .text_input import read_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from entropic_jax.analysis.studies import Workload

PRESETS = tuple(name for name, scales in SCALES.items() if DRAFTS not in scales)  # of one token a step
STUDIES = ("quality", "speed", "writing", "load")
SHORTEST = 16  # tokens of a window
SCORED = 128  # the most of them that are scored
STEPS = 8  # of a launch whose time is taken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `entropic ablate`."""
    model_options.add_model(parser)
    model_options.add_texts(parser)
    parser.add_argument(
        "--studies",
        type=_list(STUDIES),
        default=list(STUDIES),
        metavar="NAMES",
        help=f"some of {','.join(STUDIES)} (default: all)",
    )
    parser.add_argument(
        "--presets",
        type=_list(PRESETS),
        default=list(PRESETS),
        metavar="NAMES",
        help=f"some of {','.join(PRESETS)}; off is always among them (default: all)",
    )
    parser.add_argument(
        "--contexts",
        type=_integers,
        default=[512, 2048],
        metavar="INTS",
        help="tokens of a window (default: 512,2048)",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="INT", help="repetitions with other windows (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print every measurement as one object")
    control_options.add_gains(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    from rich.console import Console

    from entropic_jax.analysis import tables

    if options.seeds < 1:
        raise RequestError(f"--seeds must be an integer of at least 1; got {options.seeds}")
    workload = _workload(options)
    longest = min(len(workload.stream) - 1, workload.subject.decoder.config.longest_context)
    if longest < SHORTEST:
        raise RequestError(f"--text must have more than {SHORTEST} tokens; got {len(workload.stream)}")
    for context in options.contexts:
        if not SHORTEST <= context <= longest:
            raise RequestError(
                f"--contexts must be between {SHORTEST} and {longest} for this model and text; got {context}"
            )
    names = ["off", *(name for name in options.presets if name != "off")]
    results: dict[str, list[dict[str, Any]]] = {study: [] for study in options.studies}
    with Console(stderr=True).status("", spinner="dots") as status:
        for study, what, measure in _cells(workload, longest, names, options):
            if study in results:
                status.update(f"{study}, {what}")
                results[study] += measure()
    if options.json:
        json.dump(results, sys.stdout, indent=1)
        print()
        return 0
    console = Console(highlight=False)
    grids = {
        "quality": tables.quality,
        "speed": tables.timed("Speed of one sequence"),
        "writing": tables.writing,
        "load": tables.load,
    }
    for study, rows in results.items():
        for table in _tables(grids[study](rows), console):
            console.print(table)
    console.print("±, intervals: 95 %, Student's t; *: p < 0.05, paired with off. Entropies in nats.")
    console.print("÷ off: of the medians. Changes: means of the pairs' ratios, as logarithms.")
    return 0


def _cells(
    workload: "Workload", longest: int, names: list[str], options: argparse.Namespace
) -> Iterator[tuple[str, str, Callable[[], list[dict[str, Any]]]]]:
    """Study, what is measured in words, and how."""
    from entropic_jax.analysis import studies

    reading = tuple(dict.fromkeys(studies.EQUIVALENT_PRESETS.get(name, name) for name in names))
    presets = {name: workload.preset(name) for name in names if name != "macro"}  # nobody waits
    half = longest // 2
    for seed in range(options.seeds):
        for context in options.contexts:
            scored = min(SCORED, context // 2)
            make = partial(studies.quality, workload, context, seed, names=reading, scored=scored)
            yield "quality", f"{context} tokens, seed {seed}", make
        size = {"prompt": min(256, half), "tokens": min(128, half)}
        yield "writing", f"seed {seed}", partial(studies.writing, workload, seed, presets=presets, **size)
        size = {"prompt": min(384, half), "most": min(160, half)}
        yield "load", f"seed {seed}", partial(studies.load, workload, seed, names=names, **size)
    launches = min(26, half // STEPS)
    for context in options.contexts:
        length = min(context, longest - launches * STEPS)
        make = partial(studies.speed, workload, length, names=names, steps=STEPS, repeat=launches - 2)
        yield "speed", f"{length} tokens", make


def _tables(grid: tuple[str, list[str], list[list[str]]], console: "Console") -> "list[Table]":
    """A grid as tables that fit the terminal: each has the first two columns, and some of the others."""
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table

    title, head, lines = grid

    def drawn(columns: list[int], title: str | None) -> Table:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold")
        for number in [0, 1, *columns]:
            table.add_column(head[number], overflow="fold", justify="left" if number < 2 else "right")
        for line in lines:
            table.add_row(*(line[number] for number in [0, 1, *columns]))
        return table

    unlimited = console.options.update(width=10**6)
    parts: list[list[int]] = [[]]
    for number in range(2, len(head)):
        table = drawn([*parts[-1], number], None)
        if parts[-1] and Measurement.get(console, unlimited, table).maximum > console.width:
            parts.append([])
        parts[-1].append(number)
    return [drawn(parts[0], title), *(drawn(columns, None) for columns in parts[1:])]


def _workload(options: argparse.Namespace) -> "Workload":
    import numpy as np

    from entropic_jax.analysis.ablation import Subject
    from entropic_jax.analysis.studies import Workload

    texts = [read_text(path, "--text") for path in options.text]
    calibration = control_options.calibration_of(options.model)
    control = control_options.read(options)
    control_options.check_temperature(control._replace(preset="micro"), 1.0)  # of every text it writes
    gains = control_options.gains(control, calibration)
    model, tokenizer = model_options.load_model(options)
    stream = [token for text in texts for token in tokenizer.encode(text)]
    belief = 1.0 if calibration is None else calibration.temperature
    size = sum(len(text.encode()) for text in texts)
    return Workload(
        Subject(model.decoder, model.params, belief),
        np.asarray(stream, np.int32),
        size / max(len(stream), 1),
        gains,
    )


def _list(choices: tuple[str, ...]) -> Any:
    def convert(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"must be one or more of {','.join(choices)}; got {name}")
        return names

    return convert


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers, comma-separated; got {text}") from None
