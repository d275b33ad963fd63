"""Attention that a sparse prefill would miss, by the rule that shares one budget over layers and KV heads.

A text is read densely and profiled (`entropic_jax.methods.need_calibration`). Every rule is then applied to
the same measurements: it decides how many of the ranked pages each head would read.
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from entropic_jax import models
from entropic_jax.methods.entropy_prefill import AS_RELEASED
from entropic_jax.methods.need_calibration import (
    DENSE_LAYERS,
    PAGE,
    SEGMENT,
    RankedProfile,
    needs_of,
    ranked_profile,
)

from ...harness.held_out_text import module_texts

LEAST = 0.05  # of the mean budget
LENGTH, TEXTS, BUDGETS = 8192, 4, (128, 256, 512, 1024)  # tokens; texts; tokens a head
TABLE_PACKAGE, TABLE_BUDGET = "jax", 512  # whose source the table is made from
SHUFFLES = 8


class Profile(NamedTuple):
    """Measurements of one text, without its first segment and the layers that are always dense."""

    entropy: np.ndarray  # [segments, heads], of the expected attention to pages, nats
    mass: np.ndarray  # [segments, heads, pages]: true attention of a query, by the rank of the page


def read_profile(model: Any, tokens: list[int]) -> Profile:
    """The profile of a text, whose length is a multiple of the segment.

    Args:
        model: the model to read it.
        tokens: the text.
    """
    profile = ranked_profile(model.decoder, model.params, tokens, SEGMENT)
    entropy, mass = (values[:, DENSE_LAYERS:] for values in profile)
    return Profile(entropy.reshape(len(entropy), -1), mass.reshape(len(mass), -1, mass.shape[-1]))


def shared(weight: np.ndarray, budget: int, prior: int) -> np.ndarray:
    """Pages of each head: one budget in proportion to weights, at least 5 %, by largest remainders.

    What a head cannot use, since there are no more pages, goes to the others.

    Args:
        weight: `[heads]`, above 0.
        budget: tokens a head on average.
        prior: pages that there are.
    """
    heads, average = len(weight), budget / PAGE
    total = min(round(average * heads), prior * heads)
    least = min(LEAST * average, prior)
    quota = np.full(heads, least)
    free = np.ones(heads, bool)
    while free.any() and (left := total - quota.sum()) > 1e-9:
        quota[free] += left * weight[free] / weight[free].sum()
        quota, free = np.minimum(quota, prior), quota < prior
    pages = np.floor(quota + 1e-9).astype(int)
    order = np.argsort(-(quota - pages), kind="stable")
    pages[order[: total - pages.sum()]] += 1
    return np.minimum(pages, prior)


def need(profiles: list[Profile], budget: int) -> np.ndarray:
    """The static table: pages of each head that miss least of the mean attention at a budget, as weights.

    Args:
        profiles: the profiles of the texts to calibrate with.
        budget: tokens a head on average.
    """
    layered = [RankedProfile(p.entropy[:, None], p.mass[:, None]) for p in profiles]
    return needs_of(layered, budget, dense_layers=0)[0] / PAGE


def missed(profile: Profile, pages: np.ndarray) -> float:
    """Share of the attention that pages `[segments, heads]` leave unread, mean over segments and heads."""
    rank = np.arange(profile.mass.shape[-1])
    return float(np.where(rank >= pages[..., None], profile.mass, 0.0).sum(-1).mean())


def rules(profile: Profile, table: np.ndarray, centre: np.ndarray, budget: int) -> dict[str, float]:
    """Attention mass that every rule misses on a text.

    Args:
        profile: the profile of the text.
        table: the static table of another text.
        centre: mean entropy of each head in that text.
        budget: tokens a head.
    """
    segments, heads = profile.entropy.shape
    before = np.concatenate([np.tile(centre, (1, 1)), profile.entropy[:-1]])
    rng = np.random.default_rng(0)

    def of(weights: np.ndarray) -> float:
        pages = [shared(w, budget, (i + 1) * SEGMENT // PAGE) for i, w in enumerate(weights)]
        return missed(profile, np.stack(pages))

    def of_shuffled(static: np.ndarray, axis: int) -> float:
        orders = [rng.permuted(before, axis=axis) for _ in range(SHUFFLES)]
        return float(np.mean([of(static * np.exp(order)) for order in orders]))

    equal = np.ones((segments, heads))
    surprise = np.exp(before - centre)
    return {
        "uniform": of(equal),
        "release's growth rule": of(growth(profile.entropy, budget)),
        "exp(E)": of(np.exp(before)),
        "exp(E), shuffled over heads": of_shuffled(equal, 1),
        "exp(E), shuffled over segments": of_shuffled(equal, 0),
        "table": of(equal * table),
        "table × exp(E)": of(table * np.exp(before)),
        "table × exp(E), shuffled over heads": of_shuffled(equal * table, 1),
        "table × exp(E), shuffled over segments": of_shuffled(equal * table, 0),
        "table × exp(E − mean of the head)": of(table * surprise),
        "table × the same, shuffled over heads": float(
            np.mean([of(table * rng.permuted(surprise, axis=1)) for _ in range(SHUFFLES)])
        ),
        "oracle": oracle(profile, budget),
    }


def growth(entropy: np.ndarray, budget: int) -> np.ndarray:
    """Budgets of the release's recurrence, which are shared as weights so that the total is equal."""
    policy = dataclasses.replace(AS_RELEASED, base=budget)
    state = policy.init(1, entropy.shape[1], 1)
    budgets = []
    for row in entropy:
        state = policy.update_budgets(state, jnp.asarray(row, jnp.float32)[None])
        budgets.append(np.asarray(state.budget[0], float))
    return np.stack(budgets)


def oracle(profile: Profile, budget: int) -> float:
    """Mass missed if each segment's pages are the best of all heads, by the true attention."""
    heads, left = profile.mass.shape[1], []
    for i, mass in enumerate(profile.mass):
        count = min(round(budget / PAGE * heads), (i + 1) * SEGMENT // PAGE * heads)
        left.append((mass.sum() - np.sort(mass.reshape(-1))[::-1][:count].sum()) / heads)
    return float(np.mean(left))


def package_tokens(tokenizer: Any, package: str, length: int, count: int) -> list[list[int]]:
    """`count` texts of `length` tokens from the source of an installed package, its modules in order.

    Args:
        tokenizer: encodes the text.
        package: name of the package.
        length: tokens of a text.
        count: number of texts.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    tokens: list[int] = []
    for file in sorted(Path(spec.submodule_search_locations[0]).glob("_src/*.py")):
        tokens += tokenizer.encode(file.read_text("utf-8"))
        if len(tokens) >= count * length:
            break
    return [tokens[i * length : (i + 1) * length] for i in range(count)]


def measure(quick: bool) -> dict[str, Any]:
    """Mass that every rule misses on held-out texts, with a table from another package."""
    model = models.load(progress=False)
    assert model.tokenizer is not None
    length, texts = (1024, 1) if quick else (LENGTH, TEXTS)
    stream = [token for text in module_texts(longer_than=2000) for token in model.tokenizer.encode(text)]
    starts = np.random.default_rng(31).integers(0, len(stream) - length, texts)
    held_out = [read_profile(model, stream[start : start + length]) for start in starts]
    other = package_tokens(model.tokenizer, TABLE_PACKAGE, length, texts)
    calibration = [read_profile(model, tokens) for tokens in other]
    centre = np.concatenate([profile.entropy for profile in calibration]).mean(0)
    budgets = (128,) if quick else BUDGETS
    cells = {}
    for budget in budgets:
        table = need(calibration, budget)
        measured = [rules(profile, table, centre, budget) for profile in held_out]
        cells[str(budget)] = {name: [m[name] for m in measured] for name in measured[0]}
    tables = {str(budget): need(calibration, budget).tolist() for budget in budgets}
    return {"length": length, "texts": texts, "cells": cells, "tables": tables}
