"""Measures an exported model.

    python -m entropic_jax.models.train.evaluate --model DIR --work DIR --out FILE

On held-out packages: bits per byte, also of `xz -9e`, bits per byte against the context allowed, recall
against distance, and samples. Writes one JSON file and, next to it, two plots.
"""

import os
import sys

from .__main__ import FLAGS, TUNABLES

if __name__ == "__main__" and "GLIBC_TUNABLES" not in os.environ:
    os.environ["GLIBC_TUNABLES"] = TUNABLES
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    os.execv(sys.executable, [sys.executable, "-m", "entropic_jax.models.train.evaluate", *sys.argv[1:]])

import argparse
import csv
import json
import lzma
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from . import export, history, recall, scoring
from .data import END

SMALLEST, LARGEST = 8_000, 64_000  # bytes of a held-out file
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
PROMPT, CONTINUATION = 128, 120  # tokens of a sample
LN2 = float(np.log(2))


class File(NamedTuple):
    """A held-out file: `begin … end`, and how many bytes of text each token stands for."""

    package: str
    path: str
    text: str
    tokens: np.ndarray
    sizes: np.ndarray


def held_out(work: Path, tokenizer: Tokenizer, seed: int) -> list[File]:
    """The held-out files of 8 to 64 kB, in a random order.

    Args:
        work: folder of the run.
        tokenizer: to encode with.
        seed: the seed of the order.
    """
    return encoded(json.loads((work / "held_out.json").read_text()), tokenizer, seed)


def encoded(documents: list[dict[str, str]], tokenizer: Tokenizer, seed: int) -> list[File]:
    """Documents of 8 to 64 kB, encoded, in a random order.

    Args:
        documents: `package`, `path` and `text` of each.
        tokenizer: to encode with.
        seed: the seed of the order.
    """
    chosen = [d for d in documents if SMALLEST <= len(d["text"].encode()) <= LARGEST]
    chosen = [chosen[i] for i in np.random.default_rng(seed).permutation(len(chosen))]
    special = tokenizer.get_added_tokens_decoder()
    size = np.zeros(tokenizer.get_vocab_size(), int)
    for name, i in tokenizer.get_vocab().items():
        size[i] = 0 if i in special else len(name)  # byte-level: a character of the name is a byte of text
    encodings = tokenizer.encode_batch_fast([d["text"] for d in chosen])
    end = tokenizer.token_to_id(END)
    ids = [np.array([*e.ids, end], np.int32) for e in encodings]
    return [File(**d, tokens=i, sizes=size[i]) for d, i in zip(chosen, ids, strict=True)]


def cost(
    score: scoring.Score, spans: list[tuple[File, int, int, int]], advance: scoring.Advance
) -> list[np.ndarray]:
    """Bits of each target of each span.

    Args:
        score: function that scores windows.
        spans: `(file, first, stop, context)`: targets `first … stop − 1` of a file, each with at most
            `context` tokens before it.
        advance: called with the number of windows done, and of all.
    """
    pieces = [
        (number, window)
        for number, (file, first, stop, context) in enumerate(spans)
        for window in scoring.windows(first, stop, context)
    ]
    scores = score([spans[n][0].tokens[start:end] for n, (start, _, end) in pieces], advance)
    result: list[list[np.ndarray]] = [[] for _ in spans]
    for (number, (start, first, _)), of in zip(pieces, scores, strict=True):
        result[number].append(of.nats[first - start - 1 :].astype(float) / LN2)
    return [np.concatenate(parts) for parts in result]


def compression(score: scoring.Score, files: list[File], advance: scoring.Advance) -> dict[str, Any]:
    """Total bits over total bytes, each file on its own, `end` included; xz as the command writes it.

    Args:
        score: function that scores windows.
        files: held out.
        advance: called with the number of windows done, and of all.
    """
    model = [
        bits.sum() for bits in cost(score, [(f, 1, len(f.tokens), CONTEXTS[-1]) for f in files], advance)
    ]
    raw = [f.text.encode() for f in files]
    xz = [8 * len(lzma.compress(r, lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)) for r in raw]
    size = [len(r) for r in raw]

    def row(name: str, chosen: list[int]) -> dict[str, Any]:
        bits, packed, total = (sum(x[i] for i in chosen) for x in (model, xz, size))
        counts = {"package": name, "files": len(chosen), "bytes": total}
        rates = {"model_bits_per_byte": bits / total, "xz_bits_per_byte": packed / total}
        return {**counts, **rates, "below_xz": 1 - bits / packed}

    by_package = [
        row(name, [i for i, f in enumerate(files) if f.package == name])
        for name in sorted({f.package for f in files})
    ]
    limits = {"smallest": SMALLEST, "largest": LARGEST, "tokens": sum(len(f.tokens) - 1 for f in files)}
    return {**row("all", list(range(len(files)))), **limits, "by_package": by_package}


def _context_gain(
    score: scoring.Score, files: list[File], advance: scoring.Advance
) -> list[dict[str, float]]:
    """Bits per byte of the same tokens, each file's second half of the context, with less and more allowed.

    With context c a token sees between c / 2 and c earlier ones. `change` is against the row before,
    with its standard error over files.
    """
    first, stop = CONTEXTS[-1] // 2 + 1, CONTEXTS[-1] + 1
    spans = [(f, first, stop, context) for context in CONTEXTS for f in files]
    bits = np.reshape([b.sum() for b in cost(score, spans, advance)], (len(CONTEXTS), len(files)))
    size = np.array([f.sizes[first:stop].sum() for f in files])
    rows = []
    for number, context in enumerate(CONTEXTS):
        rows.append({"context": context, "bits_per_byte": bits[number].sum() / size.sum()})
        if number:
            change = bits[number] - bits[number - 1]
            rest = change - size * change.sum() / size.sum()
            error = np.sqrt((rest**2).sum() * len(files) / max(1, len(files) - 1)) / size.sum()
            rows[-1] |= {"change": change.sum() / size.sum(), "standard_error": error}
        rows[-1] |= {"files": len(files), "bytes": int(size.sum())}
    return rows


def samples(model: Path, params: Any, shape: Any, tokenizer: Tokenizer, files: list[File], seed: int) -> list:
    """Continuations of three held-out passages.

    Args:
        model: folder with the generation defaults.
        params: weights.
        shape: the model's shape.
        tokenizer: the model's tokenizer.
        files: held out.
        seed: the seed of the choice of file, place and tokens.
    """
    rng = np.random.default_rng(seed)
    chosen = [files[i] for i in rng.choice(len(files), 3, replace=False)]
    places = [int(rng.integers(1, len(f.tokens) - PROMPT - CONTINUATION)) for f in chosen]
    prompts = np.stack([f.tokens[p : p + PROMPT] for f, p in zip(chosen, places, strict=True)])
    settings = json.loads((model / "generation_config.json").read_text())
    temperature, top_p, penalty = (settings[k] for k in ("temperature", "top_p", "repetition_penalty"))
    continuations = scoring.sample(params, shape, prompts, CONTINUATION, temperature, top_p, penalty, rng)

    def decode(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return [
        {"package": f.package, "path": f.path, "prompt": decode(prompt), "continuation": decode(row)}
        for f, prompt, row in zip(chosen, prompts, continuations, strict=True)
    ]


def plot(report: dict[str, Any], folder: Path) -> None:
    """`recall.png` and `context.png` in `folder`."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for kind, rows in report["recall"].items():
        x, y, low, high = ([r[k] for r in rows] for k in ("distance", "accuracy", "low", "high"))
        (line,) = axes.plot(x, y, marker="o", ms=4, label=kind)
        axes.fill_between(x, low, high, alpha=0.12, color=line.get_color(), lw=0)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens between fact and question", ylabel="recall (95 % interval)", ylim=(-0.02, 1.02))
    axes.set_xticks(recall.DISTANCES, recall.DISTANCES)
    axes.legend(frameon=False)
    figure.savefig(folder / "recall.png", dpi=120)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    rows = report["context"]
    axes.plot([r["context"] for r in rows], [r["bits_per_byte"] for r in rows], marker="o", ms=4)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="context allowed (tokens)", ylabel="held-out bits per byte")
    axes.set_xticks(CONTEXTS, CONTEXTS)
    figure.savefig(folder / "context.png", dpi=120)
    plt.close("all")


def tokens_at(log: Path, step: int) -> int | None:
    """Tokens trained on up to `step`, by the training log."""
    rows = csv.DictReader(log.open()) if log.exists() else ()
    return next((int(r["tokens"]) for r in rows if int(r["step"]) == step), None)


def main() -> None:
    """Read the command line, measure, and write the report and its plots."""
    parser = argparse.ArgumentParser(prog="python -m entropic_jax.models.train.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="exported directory")
    parser.add_argument("--work", type=Path, required=True, help="folder that models.train worked in")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; the plots go next to it")
    parser.add_argument("--files", type=int, default=60, help="held-out files, for bits per byte")
    parser.add_argument("--long-files", type=int, default=16, help="files for the effect of context")
    parser.add_argument("--cases", type=int, default=50, help="recall cases of each kind and distance")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    params, shape, step = export.read(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    files = held_out(arguments.work, tokenizer, arguments.seed)
    long = [f for f in files if len(f.tokens) > CONTEXTS[-1]][: arguments.long_files]
    scorer = scoring.Scorer(params, shape)
    tokens = tokens_at(arguments.work / "log.csv", step)
    report: dict[str, Any] = {**history.stamp(), "step": step, "tokens": tokens}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:

        def stage(name: str) -> scoring.Advance:
            task = progress.add_task(name, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        report["compression"] = compression(scorer, files[: arguments.files], stage("bits per byte"))
        report["context"] = _context_gain(scorer, long, stage("context"))
        filler = recall.Filler([f.text for f in files], tokenizer)
        report["recall"] = recall.measure_recall(
            scorer, filler, arguments.cases, arguments.seed, stage("recall")
        )
        report["samples"] = samples(arguments.model, params, shape, tokenizer, files, arguments.seed)
    report["seconds"] = round(time.monotonic() - began, 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1, default=float) + "\n")
    plot(report, arguments.out.parent)
    rates = report["compression"]
    print(f"{rates['model_bits_per_byte']:.3f} bits per byte, {rates['below_xz']:.1%} below xz -9e")
    print("by context:", *(f"{row['context']}: {row['bits_per_byte']:.4f}" for row in report["context"]))
    for kind, rows in report["recall"].items():
        print(f"recall, {kind}:", *(f"{row['distance']}: {row['accuracy']:.0%}" for row in rows))


if __name__ == "__main__":
    main()
