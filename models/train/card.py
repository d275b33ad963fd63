"""Write the card and the notice of a model: `python -m entropic_jax.models.train.card --work W --model DIR`.

Every number on it comes from the evaluation, the training log, the list of packages or the code.
"""

import argparse
import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from . import corpus, export, history, tasks

INTRODUCTION = """# The embedded model

A small language model of Python source code, trained from scratch by `models.train` and shipped with the
repository so that generation works without a download. Llama architecture, Hugging Face layout; it loads
in `models.load` and in `transformers` alike. The folder `draft_head` holds a draft head for it, with a card
of its own."""

LIMITS = """## Limits

- It has seen Python and little else. It is no assistant, answers no questions, and what it writes is
  often wrong, however fluent; do not run or ship it unread.
- Recall is measured on generated text of the four kinds it was trained on. It says that the model *can*
  read what stands far above, not that it does so whenever ordinary code asks for it.
- Positions beyond {context:,} tokens were never trained.
- It may repeat passages of its training text, whose licences are listed above.
- The comparison with xz leaves out the size of the model itself, which no file of this size repays."""


def table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """A Markdown table: text to the left, numbers to the right.

    Args:
        head: titles of the columns.
        rows: cells.
        words: columns of text, the first ones.
    """
    rule = ["---" if i < words else "---:" for i in range(len(head))]
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def paragraph(text: str) -> str:
    """The words of `text` in lines of even length."""
    return textwrap.fill(" ".join(text.split()), 105, break_on_hyphens=False, break_long_words=False)


def architecture(config: dict[str, Any], model: Path) -> str:
    """Sizes of the network and of its files."""
    params, _, _ = export.read(model)
    layer = sum(x.size for x in params["layers"][0].values())
    embedding = params["embed_tokens"].size
    count = embedding + layer * len(params["layers"]) + params["norm"].size
    size = lambda name: f"{(model / name).stat().st_size / 1e6:.1f} MB"
    rows = [
        ["parameters", f"{count:,}, of them {embedding:,} in the embedding (tied to the output)"],
        ["layers", f"{config['num_hidden_layers']}"],
        ["hidden, MLP", f"{config['hidden_size']}, {config['intermediate_size']} (SwiGLU)"],
        ["heads", f"{config['num_attention_heads']}, and {config['num_key_value_heads']} of keys and values"],
        ["head", f"{config['head_dim']}"],
        [
            "positions",
            f"rotary, θ = {config['rope_theta']:,.0f}, context {config['max_position_embeddings']:,}",
        ],
        ["vocabulary", f"{config['vocab_size']:,}, byte-level BPE"],
        ["files", f"weights {size('model.safetensors')} in bfloat16, tokenizer {size('tokenizer.json')}"],
    ]
    return "## Architecture\n\n" + table(["what", "size"], rows, words=2)


def megabytes(count: int) -> str:
    """Bytes as a number of millions with one digit after the point."""
    return f"{count / 1e6:,.1f}"


def training_data(work: Path, compression: dict[str, Any]) -> str:
    """The packages with licences and sizes, and how they were processed."""
    packages = json.loads((work / "packages.json").read_text())
    held = json.loads((work / "held_out.json").read_text())
    files, tokens = (len(np.load(work / f"{n}.npy", mmap_mode="r")) for n in ("starts", "training"))
    rows = [[p["name"], p["version"], p["licence"], megabytes(p["bytes"])] for p in packages]

    def row(is_held_out):
        return [r for r, p in zip(rows, packages, strict=True) if p["held_out"] is is_held_out]

    training = sum(p["bytes"] for p in packages if not p["held_out"])
    kept = sum(len(d["text"].encode()) for d in held)
    head = ["package", "version", "licence", "MB"]
    kinds = ", ".join(tasks.KINDS).replace("_", "–")
    smallest, largest = compression["smallest"] // 1000, compression["largest"] // 1000
    parts = [
        "## Data",
        paragraph(
            f"""Python files of the packages below as their wheels on PyPI hold them, each of
            {corpus.SMALLEST_FILE} bytes to {corpus.LARGEST_FILE // 1000} kB, without tests,
            vendored and generated files; tabs become four spaces. A file is dropped when more than
            40 % of its passages of {corpus.SHINGLE_LINES} lines occur in an earlier file, and the
            held-out packages come first, so training text that repeats them is dropped too.
            {megabytes(training)} MB of candidates left {files:,} files and
            {tokens / 1e6:,.1f} million tokens to train on."""
        ),
        paragraph(
            f"""A part of what the model read is generated: real source with facts scattered through it and
            questions further down ({kinds}), whose answers weigh {tasks.ANSWER_WEIGHT:g} times as much. Its
            first line is `{tasks.HEADER.strip()}`, which no other text has."""
        ),
        table(head, row(False), words=3),
        paragraph(
            f"""Held out as whole packages ({len(held):,} files, {megabytes(kept)} MB without duplicates;
            those of {smallest} to {largest} kB are measured on):"""
        ),
        table(head, row(True), words=3),
    ]
    return "\n\n".join(parts)


def notice(packages: list[dict[str, Any]]) -> str:
    """The text of `NOTICE`: the packages that were trained on, with their licences."""
    lines = [
        f"{p['name']} {p['version']}: {p['licence'] or 'no licence stated'}"
        for p in packages
        if not p["held_out"]
    ]
    head = paragraph(
        """The weights in this folder, and those of the draft head in its folder draft_head, were trained on
        the Python source of the packages below. Each is used under its own licence, as its metadata on PyPI
        states it. A text that repeats a passage of one of them is under that licence."""
    )
    return f"{head}\n\n" + "\n".join(lines) + "\n"


def recipe(model: Path) -> str:
    """The command lines, and what the logs say of the runs."""
    rounds = history.rounds(model)
    if not rounds:
        raise ValueError(f"model: {model / history.FILE} is missing; export the model again")
    tokens = [s["tokens"] for r in rounds for s in r["stages"]]
    commands = "\n".join(f"    {r['command']}" for r in rounds)
    notes = "".join(f" Round {i}: {r['note']}." for i, r in enumerate(rounds, 1) if "note" in r)
    stages = "; ".join(
        f"round {i}: "
        + ", ".join(
            f"{s['steps']:,} steps on windows of {s['length']:,} tokens, median {s['speed']:,} tokens/s"
            for s in r["stages"]
        )
        for i, r in enumerate(rounds, 1)
    )
    text = paragraph(
        f"""{sum(tokens) / 1e6:.1f} million tokens in all, {sum(r["hours"] for r in rounds):.1f} hours of
        steps. {stages[0].upper() + stages[1:]}. The two cores were shared with other work. All other settings
        are the defaults of `models.train`; WORK is a folder of your own, BEFORE the model that the round
        before exported, whose tokenizer stays. What is exported is an average of the late weights.{notes}"""
    )
    return f"""## Recipe

{commands}
    python -m entropic_jax.models.train.export --work WORK --out models/embedded
    python -m entropic_jax.models.train.evaluate --model models/embedded --work WORK \\
        --out models/embedded/evaluation.json
    python -m entropic_jax.models.train.card --work WORK --model models/embedded

{text}

![bits per byte of the training batches, last round](training.png)"""


def results(report: dict[str, Any]) -> str:
    """Tables and plots of the evaluation."""
    rate = lambda x: f"{x:.3f}"
    sizes = report["compression"]
    compression = [
        [
            row["package"],
            str(row["files"]),
            megabytes(row["bytes"]),
            rate(row["model_bits_per_byte"]),
            rate(row["xz_bits_per_byte"]),
            f"{100 * row['below_xz']:.1f} %",
        ]
        for row in (*sizes["by_package"], sizes)
    ]
    context = [
        [
            f"{row['context']:,}",
            f"{row['bits_per_byte']:.4f}",
            f"{row['change']:+.4f} ± {1.96 * row['standard_error']:.4f}" if "change" in row else "",
        ]
        for row in report["context"]
    ]
    kinds = list(report["recall"])

    def cell(r):
        return f"{100 * r['accuracy']:.0f} % ({100 * r['low']:.0f} – {100 * r['high']:.0f})"

    recall = [
        [f"{rows[0]['distance']:,}", *map(cell, rows)]
        for rows in zip(*(report["recall"][kind] for kind in kinds), strict=True)
    ]
    cases = report["recall"][kinds[0]][0]["cases"]
    long = report["context"][-1]
    most = long["context"]
    parts = [
        "## Results",
        history.shown_stamp(report),
        "### Held-out bits per byte",
        paragraph(
            f"""{sizes["files"]} held-out files of {sizes["smallest"] // 1000} to
            {sizes["largest"] // 1000} kB, chosen by seed, each on its own from its first byte to its end:
            total bits over total bytes of UTF-8. The model sees at most {most:,} tokens (windows overlap by
            half); xz is what `xz -9e` writes, container included."""
        ),
        table(["package", "files", "MB", "model", "xz -9e", "below xz"], compression),
        "### What context is worth",
        paragraph(
            f"""The same tokens, {most // 2 + 1:,} to {most:,} of {long["files"]} long held-out files
            ({megabytes(long["bytes"])} MB), scored with more and more context: under a limit of c, each
            token sees between c / 2 and c tokens. The change is against the row above, with its 95 % interval
            over files."""
        ),
        table(["context", "bits per byte", "change"], context),
        "![bits per byte against context](context.png)",
        "### Recall against distance",
        paragraph(
            f"""Share of questions whose whole answer is the model's most likely continuation, token by token,
            with 95 % intervals (Wilson), {cases} questions for each kind and distance. The text between is
            held-out source with other facts of the same kinds in it."""
        ),
        table(["tokens between", *(kind.replace("_", "–") for kind in kinds)], recall),
        "![recall against distance](recall.png)",
    ]
    return "\n\n".join(parts)


def shown(samples: list[dict[str, str]]) -> str:
    """The samples: source and text of each prompt, and the model's continuation."""
    parts = [
        f"### {s['package']}, `{s['path']}`\n\n~~~~python\n{s['prompt']}\n~~~~\n\ncontinued as\n\n"
        f"~~~~python\n{s['continuation']}\n~~~~"
        for s in samples
    ]
    rule = ", ".join(f"{k} = {v}" for k, v in export.GENERATION.items() if k != "do_sample")
    return f"## Samples\n\nChosen by seed, not by taste ({rule}).\n\n" + "\n\n".join(parts)


def card(work: Path, model: Path) -> str:
    """The text of the card of the exported directory `model`."""
    report = json.loads((model / "evaluation.json").read_text())
    config = json.loads((model / "config.json").read_text())
    parts = [
        INTRODUCTION,
        architecture(config, model),
        results(report),
        shown(report["samples"]),
        recipe(model),
        training_data(work, report["compression"]),
        LIMITS.format(context=config["max_position_embeddings"]),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Read the command line and write `README.md`, `NOTICE` and `training.png` into the model's folder."""
    parser = argparse.ArgumentParser(prog="python -m entropic_jax.models.train.card", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder that models.train worked in")
    parser.add_argument("--model", type=Path, required=True, help="exported and evaluated directory")
    arguments = parser.parse_args()
    (arguments.model / "README.md").write_text(card(arguments.work, arguments.model))
    packages = json.loads((arguments.work / "packages.json").read_text())
    (arguments.model / "NOTICE").write_text(notice(packages))
    if (arguments.work / "log.png").exists():
        shutil.copyfile(arguments.work / "log.png", arguments.model / "training.png")


if __name__ == "__main__":
    main()
