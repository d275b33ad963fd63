"""Train the embedded model: `python -m entropic_jax.models.train --work DIR`.

The stages of `schedule` follow one another: short windows first, the full context last. Progress goes to
`DIR/log.csv` and `DIR/log.png`, the loss of the averaged weights on held-out windows to `DIR/held_out.csv`.
The same command continues a run from its last checkpoint.
"""

import os
import sys

CORES = os.cpu_count() or 1
TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592"
TUNABLES += ":glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456"
# One device per core. A machine that is busy or asleep may keep one from the other for long: wait.
FLAGS = (
    f"--xla_force_host_platform_device_count={CORES} --xla_cpu_multi_thread_eigen=false "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=1000000"
)
if __name__ == "__main__" and "GLIBC_TUNABLES" not in os.environ:
    # Fresh pages for every temporary buffer are slow: keep freed memory, in huge pages.
    os.environ["GLIBC_TUNABLES"] = TUNABLES
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    os.execv(sys.executable, [sys.executable, "-m", "entropic_jax.models.train", *sys.argv[1:]])

import argparse
import csv
import json
import time
from pathlib import Path
from typing import TextIO

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from . import data, export, forward, history, scoring
from .schedule import CONTINUED, STAGES, Schedule, one_stage
from .shape import Shape, parse_shape, record_shape
from .trainer import Trainer, initialise, optimiser, unstack

HELD_OUT_WINDOWS, HELD_OUT_LENGTH, HELD_OUT_TOKENS = 32, 1024, 2**19  # measured after so many tokens
LOG_COLUMNS = "step,tokens,length,bits_per_byte,gradient_norm,tokens_per_second"
HELD_OUT_COLUMNS = "step,tokens,bits_per_byte"


def plot(log: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = list(csv.DictReader(log.open()))
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    tokens, bits = ([float(r[c]) for r in rows] for c in ("tokens", "bits_per_byte"))
    axes.plot([t / 1e6 for t in tokens], bits, lw=0.5, color="#4477aa")
    axes.set(xlabel="million tokens", ylabel="bits per byte (training batch)", ylim=(0.8, 3))
    figure.savefig(log.with_suffix(".png"), dpi=120)
    plt.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m entropic_jax.models.train", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for corpus, checkpoints and log")
    parser.add_argument("--init", type=Path, help="exported model to go on from, with its tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use; without it, one is trained")
    parser.add_argument("--text", type=Path, help="folder of text to train on in place of the packages")
    help_shape = "changes, such as hidden_size=128 or num_local_experts=8,num_experts_per_tok=4 for experts"
    parser.add_argument("--shape", default="", help=help_shape)
    parser.add_argument("--tokens", type=float, default=48e6, help="tokens of the run")
    parser.add_argument("--length", type=int, help="windows of one length in place of the stages")
    parser.add_argument(
        "--task-share", type=float, default=0.08, help="of windows of generated documents, with --length"
    )
    parser.add_argument("--micro-tokens", type=int, default=2048, help="per device, at least one window")
    parser.add_argument("--optimiser", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--checkpoint-minutes", type=float, default=4.0, help="time between checkpoints")
    parser.add_argument("--minutes", type=float, default=1e9, help="checkpoint and stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _open_log(path: Path, columns: str, first: int) -> TextIO:
    """A log, without the rows of steps after the checkpoint, which are repeated.

    Args:
        path: the path of the log.
        columns: its first line.
        first: step of the checkpoint.
    """
    rows = path.read_text().splitlines()[1:] if path.exists() else []
    rows = [row for row in rows if int(row.split(",")[0]) <= first]
    path.write_text("\n".join([columns, *rows, ""]))
    return path.open("a", newline="")


def _bytes_per_token(streams: data.Streams) -> float:
    text = streams.text[:300]
    tokens = np.mean([len(streams.tokenizer.encode(t).ids) for t in text])
    return float(np.mean([len(t.encode()) for t in text]) / tokens)


class HeldOut:
    """Bits per byte of fixed held-out windows.

    Args:
        work: folder of the corpus.
        tokenizer: the model's tokenizer.
        shape: the model's shape.
    """

    def __init__(self, work: Path, tokenizer: Tokenizer, shape: Shape) -> None:
        texts = [d["text"] for d in json.loads((work / "held_out.json").read_text())]
        rng = np.random.default_rng(0)
        self.windows, self.bytes = [], 0
        for i in rng.permutation(len(texts))[: 8 * HELD_OUT_WINDOWS]:
            ids = np.array(tokenizer.encode(texts[i]).ids, np.int32)
            if len(ids) > HELD_OUT_LENGTH and len(self.windows) < HELD_OUT_WINDOWS:
                start = int(rng.integers(len(ids) - HELD_OUT_LENGTH))
                window = ids[start : start + HELD_OUT_LENGTH + 1]
                self.windows.append(window)
                self.bytes += len(tokenizer.decode(list(window[1:])).encode())
        self.shape = shape
        self._scorer: scoring.Scorer | None = None

    def bits_per_byte(self, params: forward.Params) -> float:
        """Cost of the windows under `params`; not a number where no held-out text is long enough."""
        if not self.windows:
            return float("nan")
        if self._scorer is None:
            self._scorer = scoring.Scorer(params, self.shape)
        self._scorer.params = params
        nats = sum(float(scores.nats.sum()) for scores in self._scorer(self.windows))
        return nats / np.log(2) / self.bytes


def _train(
    trainer: Trainer, plan: Schedule, streams: data.Streams, arguments: argparse.Namespace, held_out: HeldOut
) -> None:
    """Take the steps that are left, with their checkpoints and rows of the logs.

    Args:
        trainer: state of the run.
        plan: its steps.
        streams: text to train on.
        arguments: the arguments of the command line.
        held_out: windows to measure on.
    """
    work = arguments.work.resolve()
    first, bytes_per_token = trainer.first, _bytes_per_token(streams)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    began = saved = time.monotonic()
    with (
        Progress(*columns) as progress,
        _open_log(work / "log.csv", LOG_COLUMNS, first) as log,
        _open_log(work / "held_out.csv", HELD_OUT_COLUMNS, first) as held_out_log,
    ):
        bar = progress.add_task("training", total=plan.steps, completed=first)
        stage, source = None, iter(())
        for number in range(first, plan.steps):
            windows, passes = plan.windows(number, arguments.micro_tokens, trainer.mesh.size)
            if plan.stage(number) != stage:
                stage = plan.stage(number)
                source = data.batches(
                    streams, arguments.seed, number, windows, stage.length, stage.task_share
                )
            tokens, weights = next(source)
            start = time.monotonic()
            nats, norm = trainer.update(tokens, weights, passes, plan.average_weight(number))
            bits = nats / np.log(2) / bytes_per_token
            speed = weights.size / (time.monotonic() - start)
            done, seen = number + 1, plan.tokens(number + 1)
            row = [done, seen, tokens.shape[1] - 1, f"{bits:.4f}", f"{norm:.3f}", f"{speed:.0f}"]
            csv.writer(log).writerow(row)
            log.flush()
            if seen // HELD_OUT_TOKENS > plan.tokens(number) // HELD_OUT_TOKENS or done == plan.steps:
                cost = held_out.bits_per_byte(unstack(trainer.average))
                csv.writer(held_out_log).writerow([done, seen, f"{cost:.4f}"])
                held_out_log.flush()
                plot(work / "log.csv")
            progress.update(bar, completed=done, description=f"{bits:.3f} bits/byte {speed:,.0f} tokens/s")
            late = time.monotonic() - began > 60 * arguments.minutes
            due = time.monotonic() - saved > 60 * arguments.checkpoint_minutes
            if due or late or done in (plan.decay_from, plan.steps):
                trainer.save(done)
                saved = time.monotonic()
            if late:
                break
    trainer.manager.wait_until_finished()
    plot(work / "log.csv")


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if not 0 <= arguments.task_share <= 1:
        parser.error(f"--task-share must be in [0, 1]; got {arguments.task_share:g}")
    if not arguments.length and arguments.task_share != parser.get_default("task_share"):
        parser.error("--task-share needs --length: the stages have shares of their own")
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if arguments.init:
        params, shape, _ = export.read(arguments.init)
    else:
        shape = parse_shape(arguments.shape)
        params = initialise(shape, arguments.seed)
    record_shape(work, shape)
    history.record_run(work, parser, arguments)
    file = arguments.init / "tokenizer.json" if arguments.init else arguments.tokenizer
    tokenizer = Tokenizer.from_file(str(file)) if file else None
    streams = data.prepare(work, shape.vocab_size, tokenizer, arguments.text)
    stages = CONTINUED if arguments.init else STAGES
    if arguments.length:
        stages = one_stage(arguments.length, arguments.task_share)
    plan = Schedule(arguments.tokens, stages)
    rule = optimiser(arguments.optimiser, plan.learning_rate(arguments.learning_rate))
    # The last checkpoint before the decay is kept, so that a longer run can continue from it.
    trainer = Trainer(work, shape, rule, params, keep=max(1, plan.decay_from))
    _train(trainer, plan, streams, arguments, HeldOut(work, streams.tokenizer, shape))


if __name__ == "__main__":
    main()
