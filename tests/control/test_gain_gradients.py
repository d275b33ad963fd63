"""`replay` differentiated with respect to every gain of every law, against difference quotients."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.control import pruning, scheduling, temperature
from entropic_jax.control.entropy_drop import AR1
from entropic_jax.control.laws import LAWS
from tests.control.test_replay_gradients import STEPS, outside_of_traces, quotients_agree, run, with_slopes

assert outside_of_traces  # used as a fixture

WEIGHTS = jnp.linspace(0.5, 1.5, STEPS)[:, None]
PRIOR = {"mean": 2.0, "scale": 1.5, "correlation": 0.2}


class Case(NamedTuple):
    """A law, gains at which it is smooth and sensitive to each of them, and fixed settings."""

    law: type
    gains: dict[str, float]
    fixed: Mapping[str, Any] = MappingProxyType({})


# Where a clip or a limit acts, what it limits does not: such gains are seen in a case of their own.
CASES = {
    "paper": Case(temperature.Paper, {"target_entropy": 2.0, "rate": 0.02}),
    "paper, run down": Case(
        temperature.Paper, {"lowest_temperature": 0.9}, {"target_entropy": 9.0, "rate": 2.0}
    ),
    "paper, run up": Case(
        temperature.Paper, {"highest_temperature": 1.1}, {"target_entropy": 0.01, "rate": 2.0}
    ),
    "integral": Case(temperature.Integral, {"target_entropy": 2.0, "rate": 0.1}),
    "integral, clipped": Case(
        temperature.Integral,
        {"lowest_temperature": 0.95, "highest_temperature": 1.05},
        {"target_entropy": 2.0, "rate": 2.0},
    ),
    "normalised": Case(
        temperature.Normalised,
        {"target_entropy": 3.0, "rate": 0.1},
        {"lowest_varentropy": 0.1, "largest_step": 1.0},
    ),
    "normalised, limited": Case(
        temperature.Normalised,
        {"target_entropy": 3.0, "rate": 1.0, "lowest_varentropy": 50.0},
        {"largest_step": 9.0, "highest_temperature": 9.0},
    ),
    "normalised, slow": Case(
        temperature.Normalised, {"largest_step": 0.02}, {"target_entropy": 8.0, "rate": 50.0}
    ),
    "normalised, clipped": Case(
        temperature.Normalised,
        {"lowest_temperature": 0.95, "highest_temperature": 1.05},
        {"target_entropy": 2.0, "rate": 50.0, "largest_step": 3.0},
    ),
    "exact": Case(
        temperature.Exact, {"target_entropy": 2.0}, {"lowest_temperature": 0.01, "highest_temperature": 9.0}
    ),
    "exact, clipped": Case(
        temperature.Exact, {"lowest_temperature": 0.9, "highest_temperature": 1.1}, {"target_entropy": 2.0}
    ),
    "mirostat": Case(temperature.Mirostat, {"target_entropy": 2.0, "rate": 0.1}),
    "edt": Case(temperature.EDT, {"base": 1.0, "theta": 1.0}, {"lowest_temperature": 0.01}),
    "edt, clipped": Case(temperature.EDT, {"lowest_temperature": 0.9}),
    "dynatemp": Case(
        temperature.DynaTemp, {"lowest_temperature": 0.4, "highest_temperature": 1.6, "exponent": 1.2}
    ),
    "pruning": Case(
        pruning.Pruning,
        {
            "dropped_mass_limit": 0.4,
            "lowest_dropped_mass_limit": 0.1,
            "low_entropy": -1.0,
            "high_entropy": 6.0,
            "entropy_error": 0.3,
            "smoothing": 0.4,
        },
        {"rate": 1.0},
    ),
    "pruning, slow": Case(
        pruning.Pruning, {"rate": 0.01}, {"dropped_mass_limit": 0.9, "low_entropy": 4.0, "high_entropy": 6.0}
    ),
    "pruning, floor": Case(
        pruning.Pruning, {"entropy_floor": 5.0}, {"low_entropy": 1.0, "high_entropy": 9.0, "rate": 1.0}
    ),
    "fixed": Case(pruning.FixedPruning, {"dropped_mass_limit": 0.3}),
    "linear": Case(pruning.LinearPruning, {"dropped_mass_limit": 0.3, "entropy_threshold": 8.0}),
    "scheduling": Case(
        scheduling.Scheduling,
        {"cost": 0.5, "memory": 0.25, "slack": 0.25, "ageing": 0.05, **PRIOR},
        {"bound": 40.0},
    ),
    "scheduling, bound": Case(scheduling.Scheduling, {"bound": 0.5}, {"ageing": 5.0}),
    "scheduling as printed": Case(
        scheduling.PaperScheduling, {"cost": 0.5, "memory": 0.25, "urgency": 0.25, **PRIOR}
    ),
}
# Counts of steps have no derivative; a hysteresis decides and is never part of what it lets through.
WITHOUT = {"patience", "hysteresis"}


def defaults(kind: type) -> dict[str, float]:
    """The gains of a law that have a derivative and a default."""
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    if fields.get("highest_temperature") == 0:  # the requested temperature
        fields["highest_temperature"] = 2.0
    prior = PRIOR if "prior" in fields else {}
    without = {"width", "prior"} | WITHOUT
    return {n: x for n, x in fields.items() if n not in without and x is not dataclasses.MISSING} | prior


def acts(kind: type, gains: dict[str, Any]) -> jax.Array:
    """The effect of a law with these gains on two sequences of known tokens, as one number."""
    gains = dict(gains)
    if set(PRIOR) <= set(gains):
        gains["prior"] = AR1(*(gains.pop(name) for name in PRIOR))
    if issubclass(kind, scheduling.Scheduling | scheduling.PaperScheduling):
        law = kind(2, **gains)
        state, _ = run(law)
        # Of a shorter memory the prior speaks as well; and a demand in which every weight has its share.
        shorter = state.control.predictor._replace(num_tokens=jnp.full(2, 5, jnp.int32))
        shares = dict(cost=[0.4, 0.8], memory=[0.3, 0.2], slack=[0.5, 0.7])
        load = state.control.load._replace(**{name: jnp.array(x) for name, x in shares.items()})
        early = state.control._replace(predictor=shorter, wait=jnp.array([3, 7], jnp.int32), load=load)
        return law.score(None, early).mean()
    state, trace = run(kind(**gains, **({"patience": 1} if kind is pruning.Pruning else {})))
    if kind is temperature.Mirostat:
        return state.action.surprisal_limit.mean()
    return (WEIGHTS * (trace.temperature + trace.tempered_entropy + 10 * trace.dropped_mass_limit)).mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_slope_of_every_gain(name):
    case = CASES[name]
    gains = {**defaults(case.law), **case.fixed, **case.gains}
    places = {place: gain for place, gain in enumerate(gains) if gain in case.gains}
    program = of_law(case.law, tuple(gains))
    quotients = quotients_agree(program, np.array([*gains.values()]), places, 0.004, 0.05, 1 + 2 * len(gains))
    assert min(map(abs, quotients.values())) > 1e-4, quotients


@cache
def of_law(kind: type, names: tuple[str, ...]) -> Any:
    """One program for all cases of a law."""
    return with_slopes(lambda gains: acts(kind, gains), names)


def test_no_gain_is_left_out():
    laws = {*LAWS.values(), pruning.Pruning, pruning.FixedPruning, pruning.LinearPruning}
    for law in laws | {scheduling.Scheduling, scheduling.PaperScheduling}:
        seen = {gain for case in CASES.values() if case.law is law for gain in case.gains}
        fields = {field.name for field in dataclasses.fields(law)} - {"width", "prior"} - WITHOUT
        assert fields <= seen, (law.__name__, fields - seen)


def test_a_hysteresis_has_slope_zero():
    loss = lambda width: run(pruning.Pruning(hysteresis=width))[1].dropped_mass_limit.mean()
    assert jax.grad(loss)(jnp.float32(0.01)) == 0
