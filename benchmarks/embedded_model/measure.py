"""Measurements of a trained model: cost of held-out text, recall, and what it writes from plain prompts."""

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from entropic_jax import LLM
from entropic_jax.models.train import evaluate, export, recall, scoring, tasks

from ..harness.held_out_text import module_files
from ..harness.loops import loops
from . import bars

PARTS = ("bits", "recall", "texts", "greedy")
PROMPT, TEXT = 96, 128  # tokens
HEAD_OF_BLOCK = re.compile(r"(?m)^(?:def|class) [^\n]*:\n")


def documents(held_out: Path | None) -> list[dict[str, str]]:
    """Package, path and text of held-out files; None takes the modules of rich."""
    if held_out:
        return json.loads(held_out.read_text())
    return [{"package": "rich", "path": f.name, "text": f.read_text("utf-8")} for f in module_files()]


def plain_prompts(texts: list[str], tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """Prompts with nothing of the tasks in them: passages of source, and heads of functions and classes.

    Args:
        texts: held-out sources.
        tokenizer: the model's tokenizer.
        count: number of prompts; every second one is a head.
        seed: the seed of their choice.
    """
    rng = np.random.default_rng(seed)
    heads = sorted({head for text in texts for head in HEAD_OF_BLOCK.findall(text)})
    long = [ids for text in texts if len(ids := tokenizer.encode(text).ids) > 2 * PROMPT]
    prompts = []
    for number in range(count):
        if number % 2:
            prompts.append(tokenizer.encode(heads[rng.integers(len(heads))]).ids)
        else:
            ids = long[rng.integers(len(long))]
            start = int(rng.integers(1, len(ids) - PROMPT))
            prompts.append([ids[0], *ids[start : start + PROMPT]])
    return prompts


def continuations(model: Path, prompts: list[list[int]], seed: int, **changes: Any) -> list[list[int]]:
    """Texts of up to `TEXT` tokens under the model's generation config.

    Args:
        model: directory.
        prompts: token ids.
        seed: the seed of the draws.
        **changes: to the sampling parameters.
    """
    with LLM(model, seed=seed, max_num_seqs=16, max_model_len=2 * (PROMPT + TEXT)) as llm:
        params = dataclasses.replace(llm.get_default_sampling_params(), max_tokens=TEXT, **changes)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def leaks(texts: list[str], prompts: list[str], references: list[str]) -> dict[str, Any]:
    """Templates and words of tasks in texts; words of a text's own prompt do not count.

    Args:
        texts: what the model wrote.
        prompts: what it continued.
        references: stretches of held-out text, each as long as a text.
    """
    words = [bars.task_words(t) - bars.task_words(p) for t, p in zip(texts, prompts, strict=True)]
    reference_words = [bars.task_words(reference) for reference in references]
    held = [name for text in texts for name in bars.templates(text)]
    return {
        "texts": len(texts),
        "templates": {name: held.count(name) for name in bars.TEMPLATES},
        "share_with_a_word": sum(map(bool, words)) / len(words),
        "reference_share": sum(map(bool, reference_words)) / len(reference_words),
        "words_in_excess": bars.words_in_excess(words, reference_words),
    }


def looped(text: list[int]) -> bool:
    """Whether a text loops at any of its tokens."""
    return any(loops(text[:stop]) for stop in range(12, len(text) + 1))


def _stretches(texts: list[str], tokenizer: Tokenizer) -> list[str]:
    """Held-out text in stretches of `TEXT` tokens."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [
        tokenizer.decode(e.ids[start : start + TEXT])
        for e in encodings
        for start in range(0, len(e.ids) - TEXT + 1, TEXT)
    ]


def _recall(scorer: scoring.Scorer, filler: recall.Filler, cases: int) -> dict[str, Any]:
    """Right answers of all kinds at each distance, in windows marked as generated ones and in plain ones."""
    result: dict[str, Any] = {}
    for name, header in (("marked", tasks.HEADER), ("plain", "")):
        report = recall.measure_recall(
            scorer, filler, cases, 0, lambda done, total: None, tuple(bars.LEAST_RECALL), header
        )
        result[name] = {}
        for kind, measured in report.items():
            for row in measured:
                total = result[name].setdefault(str(row["distance"]), {"right": 0, "cases": 0, "by_kind": {}})
                total["right"] += row["right"]
                total["cases"] += row["cases"]
                total["by_kind"][kind] = row["accuracy"]
    return result


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the parts that were asked for."""
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"--parts must be of {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    files = evaluate.encoded(documents(options.held_out), tokenizer, 0)
    texts = [file.text for file in files]
    params, shape, step = export.read(options.model)
    scorer = scoring.Scorer(params, shape)
    figures: dict[str, Any] = {"step": step}
    if "bits" in parts:
        compression = evaluate.compression(scorer, files[: options.files], lambda done, total: None)
        figures |= {"bits_per_byte": compression["model_bits_per_byte"], "files": compression["files"]}
    if "recall" in parts:
        figures["recall"] = _recall(scorer, recall.Filler(texts, tokenizer), options.cases)
    if "texts" in parts:
        prompts = plain_prompts(texts, tokenizer, options.texts, 1)
        written = [tokenizer.decode(ids) for ids in continuations(options.model, prompts, 0)]
        prompt_texts = [tokenizer.decode(ids) for ids in prompts]
        figures["leaks"] = leaks(written, prompt_texts, _stretches(texts, tokenizer))
    if "greedy" in parts:
        prompts = plain_prompts(texts, tokenizer, options.greedy, 2)
        written = continuations(options.model, prompts, 0, temperature=0.0)
        figures |= {"loops": sum(map(looped, written)), "greedy_texts": len(written)}
    return figures
