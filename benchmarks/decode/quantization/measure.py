"""Measurements of the embedded model in every precision of its weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from entropic_jax import models
from entropic_jax.analysis import ablation, studies
from entropic_jax.analysis.ablation import Subject
from entropic_jax.analysis.studies import Workload
from entropic_jax.methods.presets import Gains, preset

from ...harness.held_out_text import module_texts

BATCHES = (1, 8)
CONTEXT = 512


class Precision(NamedTuple):
    """Arguments of `models.load`."""

    dtype: str = "float32"
    quantization: str | None = None
    as_stored: bool = False


PRECISIONS = {
    "float32": Precision(),
    "float32, matrices in bfloat16": Precision(as_stored=True),
    "bfloat16": Precision("bfloat16"),
    "int8": Precision(quantization="int8"),
    "fp8": Precision(quantization="fp8"),
    "int4": Precision(quantization="int4"),
    "int4-128": Precision(quantization="int4-128"),
}


def load_workload() -> Workload:
    """The embedded model in float32, and held-out text."""
    model, texts = models.load(progress=False), module_texts(longer_than=2000)
    assert model.tokenizer is not None
    stream = np.array([token for text in texts for token in model.tokenizer.encode(text)])
    size = sum(len(text.encode()) for text in texts)
    return Workload(Subject(model.decoder, model.params), stream, size / len(stream), Gains())


def load_subject(precision: Precision) -> Subject:
    """The embedded model in a precision."""
    model = models.load(None, progress=False, blocked=True, **precision._asdict())
    return Subject(model.decoder, model.params)


def weight_bytes(subject: Subject) -> int:
    """Bytes of the weights in memory, embedding and output projection both included."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(subject.params))


def quality(workload: Workload, quick: bool, console: Console) -> list[dict[str, Any]]:
    """Bits per byte of the last tokens of held-out windows, step by step, for every precision.

    Args:
        workload: held-out text.
        quick: whether to use small sizes.
        console: where to say what is done.
    """
    sequences, length, scored = (2, 64, 16) if quick else (24, 768, 512)
    texts = workload.windows(sequences, length, 17)
    rows = []
    for name, precision in PRECISIONS.items():
        subject, setting = load_subject(precision), preset("off")
        state = ablation.prefill(subject, [text[:-scored] for text in texts], scored + 1)
        state = ablation.resume(state, setting.controller)
        outcome = ablation.forced(subject, setting.controller, state, [text[-scored:] for text in texts])
        bits = [workload.bits_per_byte(row) for row in outcome.surprisal]
        mean = workload.bits_per_byte(outcome.surprisal)
        row = {"precision": name, "bits_per_byte": mean, "windows": bits, "bytes": weight_bytes(subject)}
        console.print(f"{name}: {mean:.5f} bits per byte", highlight=False)
        rows.append(row)
    return rows


def speed(workload: Workload, quick: bool, console: Console) -> list[dict[str, Any]]:
    """Milliseconds of a decoding step, precisions in turn.

    Args:
        workload: held-out text, which the prompts are taken from.
        quick: whether to use small sizes.
        console: where to say what is done.
    """
    steps, repeat = (4, 2) if quick else (32, 14)
    setting, rows = preset("off"), []
    subjects = {name: load_subject(precision) for name, precision in PRECISIONS.items()}
    for batch in BATCHES[: 1 if quick else None]:
        texts, states = workload.windows(batch, CONTEXT, 3), {}
        for name, subject in subjects.items():
            state = ablation.prefill(subject, texts, (repeat + 2) * steps)
            states[name] = ablation.resume(state, setting.controller)
        presets = dict.fromkeys(subjects, setting)
        console.print(f"speed of {batch} sequences", highlight=False)
        launches = studies.interleave(subjects, presets, states, CONTEXT, steps, repeat)
        rows += [{"batch": batch, **row} for row in launches]
    return rows


STUDIES: dict[str, Callable[[Workload, bool, Console], list[dict[str, Any]]]] = {
    "quality": quality,
    "speed": speed,
}
