"""Recall at a distance, and page selectors compared at equal kept fractions."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from entropic_jax import chain
from entropic_jax.analysis import ablation
from entropic_jax.analysis.ablation import LN2
from entropic_jax.analysis.studies import DISTINCT_PRESETS, Row, Workload, set_up
from entropic_jax.attention import page_selection as pages
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.methods.presets import FINE_PAGES, Preset, preset
from entropic_jax.models.train import recall as generator
from entropic_jax.pallas.paged_attention import PageSummary, SelectionRules

EVERYTHING_MAY_GO = 0.999  # ε at which the rules alone decide which pages are kept
QUESTION_LENGTH = 320  # tokens at the end of a window that are read under control; the questions lie in them
LONGEST = 8192 - 8  # tokens of a window
CASES = 4  # windows read together


class Windows:
    """Texts of one length with facts and questions about them, prefilled up to the questions.

    Args:
        workload: model and text.
        filler: text between the facts and the questions.
        distance: tokens between a fact and its question.
        seed: the seed of the facts.
        page_information: as in `ablation.prefill`.
    """

    def __init__(
        self,
        workload: Workload,
        filler: generator.Filler,
        distance: int,
        seed: int,
        page_information: bool = False,
    ) -> None:
        windows = [
            generator.make_window(np.random.default_rng((9, distance, seed, i)), distance, filler, header="")
            for i in range(CASES)
        ]
        self.length = length = min(LONGEST, *(len(tokens) for tokens, _ in windows))
        texts = [tokens[len(tokens) - length :].tolist() for tokens, _ in windows]
        self.tails = [t[-QUESTION_LENGTH:] for t in texts]
        self.answers = [
            {kind: a.positions - (len(tokens) - QUESTION_LENGTH) for kind, a in answers.items()}
            for tokens, answers in windows
        ]
        self.state = ablation.prefill(
            workload.subject,
            [t[:-QUESTION_LENGTH] for t in texts],
            QUESTION_LENGTH + 1,
            page_information=page_information,
        )

    def ask(self, workload: Workload, setting: Preset) -> tuple[list[tuple[str, bool]], float]:
        """Each question's kind and whether it was answered, and the kept fraction."""
        state = set_up(self.state, setting)
        outcome = ablation.forced(workload.subject, setting.controller, state, self.tails)
        questions = []
        for row, answers in enumerate(self.answers):
            for kind, place in answers.items():
                if place.min() >= 0:
                    # More than half of the probability: the most likely token, whatever the others are.
                    questions.append((kind, bool((outcome.surprisal[row, place] < LN2).all())))
        return questions, float(outcome.kept[:, 1:].mean())


def filler_of(texts: list[str], model: Path) -> generator.Filler:
    return generator.Filler(texts, Tokenizer.from_file(str(model / "tokenizer.json")))


def recall(
    workload: Workload,
    filler: generator.Filler,
    distance: int,
    seed: int,
    drops: tuple[float, ...] = (),
    refreshes: tuple[int, ...] = (),
) -> list[Row]:
    """Questions answered at a distance.

    Args:
        workload: model and text.
        filler: text between the facts and the questions.
        distance: tokens between a fact and its question.
        seed: the seed of the facts.
        drops: other values of ε.
        refreshes: numbers of steps for which page lists are kept.
    """
    windows = Windows(workload, filler, distance, seed)
    presets = {name: workload.preset(name) for name in DISTINCT_PRESETS}
    for drop in drops:
        gains = workload.gains.replace(dropped_mass_limit=drop)
        presets[f"meso-lossy, ε {drop:g}"] = preset("meso-lossy", gains=gains)
    for steps in refreshes:
        presets[f"meso-lossy, every {steps}"] = presets["meso-lossy"]._replace(
            page_policy=replace(FINE_PAGES, refresh=steps)
        )
    rows = []
    for name, setting in presets.items():
        answers, kept = windows.ask(workload, setting)
        place = {"preset": name, "distance": distance, "seed": seed, "kept": kept}
        rows += [
            {**place, "question": n, "kind": kind, "right": right} for n, (kind, right) in enumerate(answers)
        ]
    return rows


def selectors(
    workload: Workload, filler: generator.Filler, distance: int, seed: int, quick: bool
) -> list[Row]:
    """Bits per byte and recall at several kept fractions, for every selector.

    Args:
        workload: model and text.
        filler: text between the facts and the questions.
        distance: tokens between a fact and its question.
        seed: the seed of the facts and the text.
        quick: fewer selectors and budgets.
    """
    windows = Windows(workload, filler, distance, 50 + seed)
    texts = workload.windows(CASES, windows.length, 700 + seed)
    state = ablation.prefill(workload.subject, [t[:-QUESTION_LENGTH] for t in texts], QUESTION_LENGTH + 1)
    tails = [t[-QUESTION_LENGTH:] for t in texts]
    rows = []
    for name, value, setting in settings(workload, windows.length, quick):
        if name == "random":
            jax.clear_caches()  # the same static arguments would find the program without the patch
        with mock.patch.object(
            pages, "weigh_pages", random_weights if name == "random" else pages.weigh_pages
        ):
            outcome = ablation.forced(workload.subject, setting.controller, set_up(state, setting), tails)
            answers, _ = windows.ask(workload, setting)
        if name == "random":
            jax.clear_caches()
        rows.append(
            {
                "selector": name,
                "setting": value,
                "seed": seed,
                "kept": float(outcome.kept[:, 8:].mean()),
                "bits_per_byte": workload.bits_per_byte(outcome.surprisal[:, 8:]),
                "right": float(np.mean([right for _, right in answers])),
                "questions": len(answers),
            }
        )
    return rows


def settings(workload: Workload, context: int, quick: bool) -> list[tuple[str, float, Preset]]:
    """Selector, its budget or ε, and its preset."""
    total, rules_of_meso = -(-context // (FINE_PAGES.page_size or 16)), FINE_PAGES.rules
    budgets = (0.25,) if quick else (0.08, 0.15, 0.3)
    drops = (0.1,) if quick else (0.02, 0.05, 0.1, 0.2)
    fixed = Preset(chain(FixedPruning(EVERYTHING_MAY_GO)), None, None)
    configurations: list[tuple[str, float, Preset]] = [("dense", 1.0, workload.preset("off"))]
    for drop in drops:
        gains = workload.gains.replace(dropped_mass_limit=1.5 * drop, lowest_dropped_mass_limit=drop / 2)
        configurations.append(("entropy", drop, preset("meso-lossy", gains=gains)))
        configurations.append(("top-p", drop, Preset(chain(FixedPruning(drop)), FINE_PAGES, None)))
    for share in budgets:
        k = max(rules_of_meso.sink_pages + rules_of_meso.recent_pages + 1, round(share * total))
        rules = {
            "quest": SelectionRules(sink_pages=0, recent_pages=1, min_pages=k, bound_weight=1.0),
            "fixed budget": rules_of_meso._replace(min_pages=k),
            "sink + recent": rules_of_meso._replace(recent_pages=k - rules_of_meso.sink_pages, min_pages=0),
            "random": rules_of_meso._replace(min_pages=k),
        }
        configurations += [
            (name, share, fixed._replace(page_policy=replace(FINE_PAGES, information="mass", rules=r)))
            for name, r in rules.items()
            if not quick or name == "quest"
        ]
    return configurations


def random_weights(kind: str, layer: Any, cache: Any, length: Any) -> pages.WeighedPages:
    """Pages with weights that make the selection random, whatever the attention mass."""
    uniform = jax.random.uniform(jax.random.key(0), layer.value_norm.shape)
    summary = PageSummary(layer.key_min, layer.key_max, layer.key_sum)
    return pages.WeighedPages(summary, jnp.exp(60 * uniform - 30), cache.table)
