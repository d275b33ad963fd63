"""Which optimiser learns faster a second: AdamW or Muon, each at several learning rates, on the same batches.

    python -m benchmarks.optimisers --work DIR --document

Every run is `models.train` from the same first weights over the same tokens, at a constant rate after its
warm-up. The score is the loss on the training batches of the last tenth of the run, which no run has seen
before (one pass over the text), and the seconds are those of the steps alone. All runs are kept in
`benchmarks/results/optimisers.json`.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

from .report import markdown, write_section

ROOT = Path(__file__).resolve().parent.parent
RATES = {"muon": (0.01, 0.02), "adamw": (0.01, 0.02, 0.04)}


def run(corpus: Path, work: Path, name: str, rate: float, tokens: float) -> dict[str, float | str]:
    """Train once in a folder of its own that shares the corpus; returns the loss and the time it took."""
    shutil.copytree(corpus, work, dirs_exist_ok=True)  # a run that was broken off goes on
    command = [sys.executable, "-m", "entropic_jax.models.train", "--work", str(work), "--optimiser", name]
    command += ["--learning-rate", str(rate), "--tokens", str(tokens), "--long-tokens", "0"]
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


def table(runs: list[dict]) -> str:
    """Markdown of the runs, best first."""
    header = ["optimiser", "`--learning-rate`", "bits per byte at the end", "tokens/s", "seconds"]
    rows = [
        [
            r["optimiser"],
            f"{r['learning_rate']:g}",
            f"{r['bits_per_byte']:.3f}",
            f"{r['tokens_per_second']:.0f}",
            f"{r['seconds']:.0f}",
        ]
        for r in sorted(runs, key=lambda r: r["bits_per_byte"])
    ]
    note = "For `adamw` the trainer multiplies the rate by 0.15; `muon` gives its Adam part a fifth of it."
    return markdown([("Training from scratch", header, rows)], [note])


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimisers", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the corpus and the runs")
    parser.add_argument("--tokens", type=float, default=1.6e6)
    parser.add_argument("--document", action="store_true", help="put the table into docs/results.md")
    arguments = parser.parse_args()
    corpus = arguments.work / "corpus"
    if not corpus.exists():
        command = [sys.executable, "-m", "entropic_jax.models.train", "--work", str(corpus)]
        subprocess.run([*command, "--tokens", "0", "--long-tokens", "0"], check=True, cwd=ROOT)
        for left in ("checkpoints", "log.csv"):
            path = corpus / left
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    runs = []
    results = ROOT / "benchmarks" / "results" / "optimisers.json"
    for name, rates in RATES.items():
        for rate in rates:
            runs.append(run(corpus, arguments.work / f"{name}-{rate:g}", name, rate, arguments.tokens))
            results.write_text(json.dumps(runs, indent=1) + "\n")
            print(table(runs), flush=True)
    if arguments.document:
        write_section(ROOT / "docs" / "results.md", "optimisers", table(runs))


if __name__ == "__main__":
    main()
