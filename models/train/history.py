"""Training history of an exported model: rounds, each of which continues from the weights of the last.

`models.train` records its command line in `WORK/run.json`. The export adds statistics from the log and stores
all rounds in `training.json` next to the weights.
"""

import argparse
import csv
import datetime
import itertools
import json
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

RUN, FILE = "run.json", "training.json"
PLACES = (
    "work",
    "init",
    "tokenizer",
    "text",
    "minutes",
    "checkpoint_minutes",
)  # arguments that say where and how long, not how


def stamp() -> dict[str, str]:
    """Today's date, and the short hash of the commit that is checked out, where there is one."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        done = None
    commit = {"commit": done.stdout.strip()} if done and done.returncode == 0 else {}
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **commit}


def shown_stamp(record: dict[str, Any]) -> str:
    """The line that stands under the title of a table.

    Args:
        record: what holds the items of `stamp`, or `recorded_in` for the commit that brought the figures.

    >>> shown_stamp({"date": "2026-11-26", "recorded_in": "9981867"})
    '*Measured 2026-11-26, recorded in commit `9981867`.*'
    """
    places = {"commit": "at commit", "recorded_in": "recorded in commit"}
    parts = [f"Measured {record['date']}"]
    parts += [f"{words} `{record[key]}`" for key, words in places.items() if key in record]
    return f"*{', '.join(parts)}.*"


def rounds(model: Path) -> list[dict[str, Any]]:
    """The rounds behind an exported model."""
    file = model / FILE
    return json.loads(file.read_text()) if file.exists() else []


def record_run(work: Path, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Keep what was asked for, and the rounds before, in the work folder.

    Args:
        work: folder of the run.
        parser: the parser of the command line, with the defaults.
        arguments: the arguments of this run.
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
            *(["--tokenizer TOKENIZER"] if arguments.tokenizer else []),
            *(["--text TEXT"] if arguments.text else []),
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
    seen = [0, *(int(r["tokens"]) for r in rows)]
    batches = [after - before for before, after in itertools.pairwise(seen)]
    seconds = sum(batch / float(r["tokens_per_second"]) for r, batch in zip(rows, batches, strict=True))
    stages = []
    for length in sorted({int(r["length"]) for r in rows}):
        chosen = [(r, b) for r, b in zip(rows, batches, strict=True) if int(r["length"]) == length]
        speeds = [float(r["tokens_per_second"]) for r, _ in chosen]
        stages.append(
            {
                "length": length,
                "steps": len(chosen),
                "tokens": sum(batch for _, batch in chosen),
                "speed": round(median(speeds)),
            }
        )
    return [*run["before"], {"command": run["command"], "stages": stages, "hours": round(seconds / 3600, 2)}]
