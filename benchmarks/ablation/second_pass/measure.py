"""Second passes, measured: what the entropy of a first pass tells of its harm, and what that is worth."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ...harness.held_out_text import module_tokens
from . import equal_bytes, quartiles
from .record import DENSE, Passes, Sizes, pass_names, record, sizes_of, subject_of

CONTEXTS, TEXTS, STEPS, SEED = (2048, 7936), 32, 64, 41
BATCH = 8  # texts that are read together, and rows of a batch whose second passes share the weights
LIMITS = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4)
LEVELS, LARGE_LEVELS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2), (0.02, 0.1)  # ε at whose bytes rules are compared
BUDGETS = (8, 16, 31, 62)  # pages: 1/16 and 1/8 of those of either context, and beyond
FIRST_SHARES = (1 / 16, 1 / 8)  # of the pages, read by the first passes whose harm is looked at
BAR = 5.0  # highest quartile of KL over the lowest, below which a second pass is not tried
# Weights of a pass over the keys and values of one row, in bytes: Llama 3 8B with 16 bits, 7.5e9 weights in
# products, 32 layers of 8 KV heads of 128.
LARGE_MODEL = {f"8B, {n}k": 7.5e9 / (32 * 8 * 2 * 128 * n * 1024) for n in (8, 32)}


def measure(folder: Path, quick: bool, console: Console) -> dict[str, Any]:
    """The figures of every context.

    Args:
        folder: the model.
        quick: small sizes.
        console: where progress is reported.
    """
    contexts, texts, steps = ((512,), 4, 8) if quick else (CONTEXTS, TEXTS, STEPS)
    limits, budgets, batch = ((0.03, 0.2), (4, 8), 2) if quick else (LIMITS, BUDGETS, BATCH)
    subject = subject_of(folder)
    stream = module_tokens(folder / "tokenizer.json")
    cells = {}
    for context in contexts:
        rng = np.random.default_rng((SEED, context))
        starts = rng.integers(0, len(stream) - context - steps, texts)
        windows = [stream[start : start + context + steps] for start in starts]
        parts = []
        for first in range(0, texts, batch):
            group = windows[first : first + batch]
            parts.append(record(subject, group, steps, limits, budgets, max(contexts) + steps + 1))
            console.print(f"context {context}: {first + len(group)} of {texts} texts", highlight=False)
        cells[str(context)] = figures(joined(parts), sizes_of(subject), context, batch)
    return {
        "texts": texts,
        "steps": steps,
        "batch": batch,
        "belief_temperature": subject.belief_temperature,
        "contexts": cells,
    }


def joined(parts: list[Passes]) -> Passes:
    """The passes of several groups of texts as one."""
    fields = (
        {name: np.concatenate([x[name] for x in field]) for name in field[0]}
        for field in zip(*parts, strict=True)
    )
    return Passes(*fields)


def figures(passes: Passes, sizes: Sizes, context: int, batch: int) -> dict[str, Any]:
    """Everything that is published of one context.

    Args:
        passes: what was recorded.
        sizes: bytes of weights and of a position.
        context: tokens before the first step.
        batch: rows of a batch.
    """
    dense = float(passes.positions[DENSE].mean())
    read = {name: float(x.mean()) / dense for name, x in passes.positions.items()}
    result: dict[str, Any] = {
        "weights": sizes.weights,
        "dense": dense * sizes.position,
        "passes": {name: [read[name], float(passes.divergence[name].mean())] for name in read},
        "quartiles": {name: harm(passes, name) for name in first_passes(passes, context)},
        "equal_bytes": {},
    }
    cells = {f"{rows} rows" if rows > 1 else "1 row": (sizes, rows) for rows in (1, batch)}
    if context == max(CONTEXTS):
        for name, ratio in LARGE_MODEL.items():
            large = sizes._replace(weights=ratio * dense * sizes.position)
            cells |= {f"{name}, {label}": (large, rows) for label, (_, rows) in list(cells.items())[:2]}
    for name, (cell_sizes, rows) in cells.items():
        recorded = equal_bytes.Recorded(passes, cell_sizes, rows)
        levels = LARGE_LEVELS if name.startswith("8B") else LEVELS
        names = [level for level in pass_names(levels, ())[:-1] if level in passes.entropy]
        result["equal_bytes"][name] = equal_bytes.summary(recorded, names)
    return result


def first_passes(passes: Passes, context: int) -> list[str]:
    """The budgets that come closest to `FIRST_SHARES` of the pages of a context."""
    pages = {name: int(name.split()[0]) for name in passes.entropy if name.endswith("pages")}
    total = -(-context // 16)
    nearest = (min(pages, key=lambda name: abs(pages[name] / total - share)) for share in FIRST_SHARES)
    return list(dict.fromkeys(nearest))


def harm(passes: Passes, name: str) -> dict[str, Any]:
    """Mean KL of a first pass by quartile of every signal."""
    lost = passes.divergence[name][:, 1:]
    return {
        signal: {
            **quartiles.by_quartile(lost, values),
            "correlation": quartiles.correlation(lost, values),
        }
        for signal, values in list(quartiles.signals(passes, name).items())[:4]
    }
