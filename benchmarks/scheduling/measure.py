"""Simulations of scheduling policies on every workload, paired by seed."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from entropic_jax.analysis import queueing
from entropic_jax.analysis.queueing import Entropic, Learned, Policy, Predicted, Requests
from entropic_jax.control.length_prediction import FEATURES, LengthModel, fit_length_model

from .workload import LAWS, draw_requests

Row = dict[str, Any]
PLACES, LOAD, COUNT, CALIBRATION = 8, 1.1, 240, 1000
TELLING = 0.7  # nats of mean entropy per unit of ln length, where entropy is to say something
OTHER_LAW = "lognormal, σ 1.2"  # of the calibration that does not fit
WITHOUT_ENTROPY = tuple(name for name in FEATURES if name != "mean_entropy")
CALIBRATION_SEED = 1_000_000


class Condition(NamedTuple):
    """A workload, and the policies that are compared on it."""

    law: str
    limits: str  # kind of `max_tokens`, see `workload.stated_limits`
    telling: float
    preemptive: bool
    policies: tuple[str, ...]


def conditions(quick: bool) -> Iterator[Condition]:
    """Every condition, in the order of the tables."""
    laws = (LAWS[0], LAWS[-1]) if quick else LAWS
    predictions = ("predicted", "predicted, no entropy", "predicted, other calibration")
    entropic = ("entropic", "entropic, shuffled")
    for law in laws:
        blind = ("fcfs", "round robin", *entropic, *predictions, "oracle")
        yield Condition(law, "constant", 0.0, True, blind)
    for law in laws:
        yield Condition(law, "loose", 0.0, True, ("fcfs", "shortest stated", *predictions, "oracle"))
    for law in laws[:1] if quick else LAWS[:3]:
        telling = ("fcfs", *entropic, *predictions[:2], "predicted, shuffled", "oracle")
        yield Condition(law, "constant", TELLING, True, telling)
    for limits, law in itertools.product(("loose", "constant"), laws):
        yield Condition(law, limits, 0.0, False, ("fcfs", "shortest stated", "learned", "oracle"))
    for law in laws[:1] if quick else LAWS[:2]:
        admission = (
            "fcfs",
            "entropic, stated cost",
            "constant drop, stated cost",
            "shortest stated",
            "learned",
            "oracle",
        )
        yield Condition(law, "exact", 0.0, False, admission)


def policy(name: str, models: dict[str, LengthModel]) -> Policy:
    """A fresh policy by its name; ", shuffled" changes what it sees, not what it is."""
    base = name.removesuffix(", shuffled")
    simple: dict[str, Policy] = {
        "fcfs": queueing.first_come_first_served,
        "round robin": queueing.round_robin,
        "oracle": queueing.oracle,
        "shortest stated": queueing.shortest_stated,
    }
    if base in simple:
        return simple[base]
    if base == "learned":
        return Learned()
    if base.startswith("predicted"):
        return Predicted(models[base])
    cost = "stated" if base.endswith("stated cost") else "equal"
    return Entropic(cost, constant=base.startswith("constant"))


def length_models(condition: Condition) -> dict[str, LengthModel]:
    """The length models of the policies, fitted to requests of a seed of their own."""

    def fitted(law: str, names: tuple[str, ...]) -> LengthModel:
        requests = draw_requests(
            law,
            CALIBRATION,
            PLACES,
            LOAD,
            CALIBRATION_SEED,
            limits=condition.limits,
            telling=condition.telling,
        )
        return fit_length_model(features(requests), requests.length, names)

    return {
        "predicted": fitted(condition.law, FEATURES),
        "predicted, no entropy": fitted(condition.law, WITHOUT_ENTROPY),
        "predicted, other calibration": fitted(OTHER_LAW, FEATURES),
    }


def features(requests: Requests) -> dict[str, np.ndarray]:
    """The features of requests that have ended."""
    mean = [row[:n].mean() for row, n in zip(requests.entropy, requests.length, strict=True)]
    return {
        "prompt_tokens": requests.prompt_tokens,
        "max_tokens": requests.max_tokens,
        "recent_length": np.full(len(mean), requests.length.mean()),
        "mean_entropy": np.array(mean),
    }


def measure(condition: Condition, seed: int, count: int) -> list[Row]:
    """One simulation of each policy, all with the same requests."""
    models = length_models(condition)
    requests = draw_requests(
        condition.law, count, PLACES, LOAD, seed, limits=condition.limits, telling=condition.telling
    )
    others = np.random.default_rng(seed).permutation(count)
    rows = []
    for name in condition.policies:
        seen = requests.entropy[others] if name.endswith(", shuffled") else None
        served = queueing.simulate(
            requests, PLACES, policy(name, models), preemptive=condition.preemptive, entropies=seen
        )
        rows.append(
            {
                "law": condition.law,
                "limits": condition.limits,
                "telling": condition.telling,
                "preemptive": condition.preemptive,
                "policy": name,
                "seed": seed,
                "mean": float(served.latency.mean()),
                "p95": float(np.percentile(served.latency, 95)),
                "longest_wait": served.longest_wait,
            }
        )
    return rows
