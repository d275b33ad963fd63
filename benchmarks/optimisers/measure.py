"""Training runs of the benchmark of optimisers, each in a folder and a process of its own."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

from entropic_jax.models.train import data
from entropic_jax.models.train.shape import Shape

from ..harness.paths import ROOT

RATES = {"muon": (0.01, 0.02), "adamw": (0.01, 0.02, 0.04)}


def prepare_corpus(corpus: Path) -> None:
    """Make the training corpus that all runs share, if it is not there."""
    if corpus.exists():
        return
    corpus.mkdir(parents=True)
    data.prepare(corpus, Shape().vocab_size)


def run(corpus: Path, work: Path, name: str, rate: float, tokens: float) -> dict[str, float | str]:
    """Train the embedded model from scratch once.

    Args:
        corpus: folder of the corpus.
        work: folder of this run; an interrupted run continues.
        name: the name of the optimiser.
        rate: learning rate.
        tokens: to train on.

    Returns:
        Loss in bits per byte over the last tenth of the steps, and the time that the steps took.
    """
    shutil.copytree(corpus, work, dirs_exist_ok=True)
    command = [sys.executable, "-m", "entropic_jax.models.train", "--work", str(work), "--optimiser", name]
    command += ["--learning-rate", str(rate), "--tokens", str(tokens), "--length", "1024"]
    subprocess.run(command, check=True, cwd=ROOT)
    rows = list(csv.DictReader((work / "log.csv").open()))
    last = rows[-max(1, len(rows) // 10) :]
    batch = int(rows[0]["tokens"]) // int(rows[0]["step"])
    return {
        "optimiser": name,
        "learning_rate": rate,
        "steps": len(rows),
        "bits_per_byte": mean(float(r["bits_per_byte"]) for r in last),
        "tokens_per_second": median(float(r["tokens_per_second"]) for r in rows),
        "seconds": sum(batch / float(r["tokens_per_second"]) for r in rows),
    }
