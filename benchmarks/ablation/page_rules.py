"""Rules of page selection under fixed ε, changed one at a time: weight of pages, first layer, page size."""

from dataclasses import replace

import numpy as np

from entropic_jax import chain
from entropic_jax.analysis import ablation
from entropic_jax.analysis.studies import Row, Workload, set_up
from entropic_jax.attention.page_selection import Selection
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.methods.presets import FINE_PAGES, WIDE_PAGES, Preset
from entropic_jax.models.train import recall as generator

from .recall import CASES, QUESTION_LENGTH, Windows

LIMITS = (0.02, 0.05)  # ε
WARM_UP = 8  # tokens at the start of what is scored that do not count
SHIPPED = "as shipped"


def arms() -> dict[str, Selection]:
    """The page policy of `meso-lossy`, and policies that differ from it in one thing."""
    return {
        SHIPPED: FINE_PAGES,
        "weight: mass": replace(FINE_PAGES, information="mass"),
        "weight: surprisal": replace(FINE_PAGES, information="surprisal"),
        "weight: mahalanobis": replace(FINE_PAGES, information="mahalanobis"),
        "first layer: ε as in the others": replace(FINE_PAGES, first_layer_scale=1.0),
        "pages of 64 positions": wider(64),
        "pages of 128 positions": WIDE_PAGES,
    }


def wider(size: int) -> Selection:
    """The page policy of `meso-lossy` with larger pages, and the same least numbers of positions.

    Args:
        size: positions of a page, a multiple of the shipped size.
    """
    assert FINE_PAGES.page_size
    part = size // FINE_PAGES.page_size
    rules = FINE_PAGES.rules
    least = {name: -(-getattr(rules, name) // part) for name in ("sink_pages", "recent_pages", "min_pages")}
    return replace(FINE_PAGES, page_size=size, rules=rules._replace(**least))


def page_rules(
    workload: Workload, filler: generator.Filler, distance: int, seed: int, quick: bool
) -> list[Row]:
    """Bits per byte, bytes read and recall of every arm, and of dense attention.

    Args:
        workload: model and text.
        filler: text between the facts and the questions.
        distance: tokens between a fact and its question.
        seed: the seed of the facts and the text.
        quick: a single ε.
    """
    windows = Windows(workload, filler, distance, 80 + seed, page_information=True)
    texts = workload.windows(CASES, windows.length, 800 + seed)
    prompts, tails = [t[:-QUESTION_LENGTH] for t in texts], [t[-QUESTION_LENGTH:] for t in texts]
    state = ablation.prefill(workload.subject, prompts, QUESTION_LENGTH + 1, page_information=True)
    settings = [("dense", 0.0, workload.preset("off"))]
    for name, pages in arms().items():
        for limit in LIMITS[:1] if quick else LIMITS:
            settings.append((name, limit, Preset(chain(FixedPruning(limit)), pages, None)))
    rows = []
    for name, limit, setting in settings:
        outcome = ablation.forced(workload.subject, setting.controller, set_up(state, setting), tails)
        answers, _ = windows.ask(workload, setting)
        rows.append(
            {
                "arm": name,
                "limit": limit,
                "seed": seed,
                "kept": float(outcome.kept[:, WARM_UP:].mean()),
                "bytes_read": float(outcome.bytes_read.mean()),
                "bits_per_byte": workload.bits_per_byte(outcome.surprisal[:, WARM_UP:]),
                "right": float(np.mean([right for _, right in answers])),
                "questions": len(answers),
            }
        )
    return rows
