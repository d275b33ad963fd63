"""Training history of an exported model: rounds, each of which continues from the weights of the last.

`models.train` records its command line in `WORK/run.json`. The export adds statistics from the log and stores
all rounds in `training.json` next to the weights.
"""

import argparse
import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

RUN, FILE = "run.json", "training.json"
PLACES = ("work", "init", "minutes")  # arguments that say where and how long, not how


def rounds(model: Path) -> list[dict[str, Any]]:
    """The rounds behind an exported model."""
    file = model / FILE
    return json.loads(file.read_text()) if file.exists() else []


def record_run(work: Path, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Keep what was asked for, and the rounds before, in the work folder.

    Args:
        work: folder of the run.
        parser: of the command line, with the defaults.
        arguments: of this run.
    """
    changed_options = [
        f"--{name.replace('_', '-')} {value:g}"
        if isinstance(value, float)
        else f"--{name.replace('_', '-')} {value}"
        for name, value in vars(arguments).items()
        if name not in PLACES and value != parser.get_default(name)
    ]
    command = " ".join(
        [
            "python -m entropic_jax.models.train --work WORK",
            *(["--init BEFORE"] if arguments.init else []),
            *changed_options,
        ]
    )
    before = rounds(arguments.init) if arguments.init else []
    (work / RUN).write_text(json.dumps({"command": command, "before": before}, indent=1) + "\n")


def round_history(work: Path, step: int) -> list[dict[str, Any]]:
    """All rounds up to `step` of the run in `work`."""
    run = json.loads((work / RUN).read_text())
    rows = [r for r in csv.DictReader((work / "log.csv").open()) if int(r["step"]) <= step]
    if not rows:
        raise ValueError(f"step: {step} is not in {work / 'log.csv'}")
    batch = int(rows[0]["tokens"]) // int(rows[0]["step"])
    stages, seconds = [], 0.0
    for length in sorted({int(r["length"]) for r in rows}):
        stage_rows = [r for r in rows if int(r["length"]) == length]
        speeds = [float(r["tokens_per_second"]) for r in stage_rows]
        seconds += sum(batch / speed for speed in speeds)
        stages.append(
            {"length": length, "steps": len({r["step"] for r in stage_rows}), "speed": round(median(speeds))}
        )
    this_round = {
        "command": run["command"],
        "batch_tokens": batch,
        "stages": stages,
        "hours": round(seconds / 3600, 2),
    }
    return [*run["before"], this_round]
