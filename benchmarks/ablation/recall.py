"""Which keys and values are read: recall, and entropy's choice of pages beside others."""

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
from entropic_jax.analysis.studies import READING, Material, Row, set_up
from entropic_jax.attention import page_selection as pages
from entropic_jax.control.presets import FINE_PAGES, Preset, preset
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.models.train import recall
from entropic_jax.pallas.paged_attention import Rules

EVERYTHING_MAY_GO = 0.999  # a drop at which only the rules decide what stays
ASKED = 320  # tokens at the end of a window that are read under control; the questions lie in them
LONGEST = 8192 - 8  # tokens of a window
CASES = 4  # windows read together


class Windows:
    """Windows with facts and questions about them: texts of one length, read but for their ends."""

    def __init__(self, material: Material, filler: recall.Filler, distance: int, seed: int) -> None:
        made = [
            recall.make_window(np.random.default_rng((9, distance, seed, i)), distance, filler)
            for i in range(CASES)
        ]
        self.length = length = min(LONGEST, *(len(tokens) for tokens, _ in made))
        texts = [tokens[len(tokens) - length :].tolist() for tokens, _ in made]
        self.tails = [t[-ASKED:] for t in texts]
        self.answers = [
            {kind: a.positions - (len(tokens) - ASKED) for kind, a in answers.items()}
            for tokens, answers in made
        ]
        self.state = ablation.read(material.subject, [t[:-ASKED] for t in texts], ASKED + 1)

    def ask(self, material: Material, setting: Preset) -> tuple[list[tuple[str, bool]], float]:
        """Each question by kind and whether it was answered, and the share of keys and values read."""
        state = set_up(self.state, setting)
        found = ablation.forced(material.subject, setting.controller, state, self.tails)
        asked = []
        for row, answers in enumerate(self.answers):
            for kind, place in answers.items():
                if place.min() >= 0:
                    # More than half of the probability: the likeliest token, whatever the others are.
                    asked.append((kind, bool((found.surprisal[row, place] < LN2).all())))
        return asked, float(found.kept[:, 1:].mean())


def filler_of(texts: list[str], model: Path) -> recall.Filler:
    return recall.Filler(texts, Tokenizer.from_file(str(model / "tokenizer.json")))


def asked(
    material: Material,
    filler: recall.Filler,
    distance: int,
    seed: int,
    drops: tuple[float, ...] = (),
    refreshes: tuple[int, ...] = (),
) -> list[Row]:
    """Questions answered at a distance: under the presets, at other ε_max, with lists kept for some steps."""
    windows = Windows(material, filler, distance, seed)
    ways = {name: material.preset(name) for name in READING}
    for drop in drops:
        gains = material.gains._replace(dropped_mass_limit=drop, lowest_dropped_mass_limit=0.4 * drop)
        ways[f"meso, ε {drop:g}"] = preset("meso", gains=gains)
    for steps in refreshes:
        ways[f"meso, every {steps}"] = ways["meso"]._replace(page_policy=replace(FINE_PAGES, refresh=steps))
    rows = []
    for name, setting in ways.items():
        answers, kept = windows.ask(material, setting)
        place = {"preset": name, "distance": distance, "seed": seed, "kept": kept}
        rows += [
            {**place, "question": n, "kind": kind, "right": right} for n, (kind, right) in enumerate(answers)
        ]
    return rows


def selectors(material: Material, filler: recall.Filler, distance: int, seed: int, quick: bool) -> list[Row]:
    """Bits per byte and recall against the share read, for several selectors and budgets."""
    windows = Windows(material, filler, distance, 50 + seed)
    texts = material.windows(CASES, windows.length, 700 + seed)
    state = ablation.read(material.subject, [t[:-ASKED] for t in texts], ASKED + 1)
    tails = [t[-ASKED:] for t in texts]
    rows = []
    for name, setting, way in settings(material, windows.length, quick):
        if name == "random":
            jax.clear_caches()  # the same static arguments would find the program without the patch
        with mock.patch.object(pages, "information", shuffled if name == "random" else pages.information):
            found = ablation.forced(material.subject, way.controller, set_up(state, way), tails)
            answers, _ = windows.ask(material, way)
        if name == "random":
            jax.clear_caches()
        rows.append(
            {
                "selector": name,
                "setting": setting,
                "seed": seed,
                "kept": float(found.kept[:, 8:].mean()),
                "bits_per_byte": material.bits_per_byte(found.surprisal[:, 8:]),
                "right": float(np.mean([right for _, right in answers])),
                "questions": len(answers),
            }
        )
    return rows


def settings(material: Material, context: int, quick: bool) -> list[tuple[str, float, Preset]]:
    """Selector, its budget or ε, and how to run it."""
    total, fine = -(-context // (FINE_PAGES.page_size or 16)), FINE_PAGES.rules
    budgets = (0.25,) if quick else (0.08, 0.15, 0.3)
    drops = (0.1,) if quick else (0.02, 0.05, 0.1, 0.2)
    fixed = Preset(chain(FixedPruning(EVERYTHING_MAY_GO)), None, None)
    made: list[tuple[str, float, Preset]] = [("dense", 1.0, material.preset("off"))]
    for drop in drops:
        gains = material.gains._replace(dropped_mass_limit=1.5 * drop, lowest_dropped_mass_limit=drop / 2)
        made.append(("entropy", drop, preset("meso", gains=gains)))
        made.append(("top-p", drop, Preset(chain(FixedPruning(drop)), FINE_PAGES, None)))
    for share in budgets:
        k = max(fine.sink + fine.recent + 1, round(share * total))
        rules = {
            "quest": Rules(sink=0, recent=1, least=k, guard=1.0),
            "fixed budget": fine._replace(least=k),
            "sink + recent": fine._replace(recent=k - fine.sink, least=0),
            "random": fine._replace(least=k),
        }
        made += [
            (name, share, fixed._replace(page_policy=replace(FINE_PAGES, information="mass", rules=r)))
            for name, r in rules.items()
            if not quick or name == "quest"
        ]
    return made


def shuffled(kind: str, layer: Any, cache: Any, length: Any) -> jax.Array:
    """Weights that make the choice random, whatever the mass."""
    return jnp.exp(60 * jax.random.uniform(jax.random.key(0), layer.value_norm.shape) - 30)
