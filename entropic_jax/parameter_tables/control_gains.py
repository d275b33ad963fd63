"""Control gains: the table that every interface to the control loop is derived from.

The command line, the HTTP schema, `methods.presets.Gains` and the documentation read the fields of
`ControlGains`. A gain has one name from the HTTP field to the control law. Imports neither JAX nor NumPy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .table import Choice, Number, ParameterError, Table, parameter, parameters_of

TEMPERATURE_LAWS = ("paper", "integral", "normalised", "exact", "mirostat", "edt", "dynatemp")
SCHEDULES = ("entropic", "paper", "fcfs", "shortest-job", "shortest-remaining")
MICRO, PRUNING, MACRO = "micro", "pruning", "macro"
"""The law of control that a gain belongs to: of temperature, of page selection, of scheduling."""
DRAFTS = "drafts"
"""The lossless form of the scale meso: tokens are drafted from few pages and verified with all of them."""


class PresetLine(NamedTuple):
    """A preset: what it switches on, and one line of help."""

    scales: tuple[str, ...]  # of MICRO, DRAFTS or PRUNING (two forms of the scale meso), and MACRO
    help: str


PRESET_TABLE = {
    "off": PresetLine((), "plain decoding"),
    "micro": PresetLine((MICRO,), "temperature lowered where the sampled entropy H_T is above its target"),
    "meso": PresetLine((DRAFTS,), "tokens drafted and verified: the text of off in fewer passes"),
    "macro": PresetLine((MACRO,), "sequences scheduled by the drop expected of their belief entropy H"),
    "full": PresetLine((MICRO, DRAFTS, MACRO), "micro, meso and macro: the text of micro"),
    "meso-lossy": PresetLine(
        (PRUNING,), "pages left unread, up to a fixed attention mass ε; the text changes"
    ),
    "full-lossy": PresetLine((MICRO, PRUNING, MACRO), "micro, meso-lossy and macro"),
    "paper": PresetLine(
        (MICRO, PRUNING, MACRO), "full-lossy with the paper's temperature law and priority as printed"
    ),
}
"""Every preset by name. The command line, `LLM`, the HTTP schema, the dashboard and the docs read it."""
SCALES = {name: line.scales for name, line in PRESET_TABLE.items()}
"""The scales of control that each preset switches on."""
PRESETS = tuple(SCALES)

_ENTROPY = Number(float, 0, 100, auto=True)
_TEMPERATURE = Number(float, 0, 1000, above_low=True)
_HIGHEST_TEMPERATURE = Number(float, 0, 1000)
_MASS = Number(float, 0, 1, below_high=True)


@dataclass(frozen=True, kw_only=True)
class ControlGains(Table):
    """Gains of the control laws.

    Those in nats also take the string "auto", for the value in the model's calibration.json.

    Raises ParameterError, a ValueError, which names the gain, the accepted values and the value.

    >>> ControlGains(law="exact").lowest_temperature
    0.3
    >>> ControlGains(law="magic")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    entropic_jax.parameter_tables.table.ParameterError: law must be one of paper, integral, ...
    """

    law: str = parameter("normalised", Choice(TEMPERATURE_LAWS), "temperature law", scope=MICRO)
    target_entropy: float = parameter(
        1.0, _ENTROPY, "H*, the set-point of the temperature law", unit="nats", scope=MICRO
    )
    lowest_temperature: float = parameter(
        0.3, _TEMPERATURE, "T_min, below which no temperature law goes", scope=MICRO
    )
    highest_temperature: float = parameter(
        0.0,
        _HIGHEST_TEMPERATURE,
        "T_max, above which no temperature law goes; 0 is the request's own `temperature`",
        scope=MICRO,
    )
    dropped_mass_limit: float = parameter(
        0.02, _MASS, "ε, the most attention mass that may stay unread", scope=PRUNING
    )
    lowest_dropped_mass_limit: float | None = parameter(
        None,
        _MASS._replace(optional=True),
        "ε_min, to which ε falls as the H₁ of the step before rises; without it ε is fixed",
        scope=PRUNING,
    )
    low_entropy: float = parameter(
        0.3, _ENTROPY, "H₁ at and below which `dropped_mass_limit` applies", unit="nats", scope=PRUNING
    )
    high_entropy: float = parameter(
        2.5, _ENTROPY, "H₁ at and above which `lowest_dropped_mass_limit` applies", unit="nats", scope=PRUNING
    )
    schedule: str = parameter("entropic", Choice(SCHEDULES), "scheduling law", scope=MACRO)


GAINS = {line.name: line for line in parameters_of(ControlGains)}
"""Every gain by name."""

CALIBRATED = tuple(name for name, line in GAINS.items() if getattr(line.accepts, "auto", False))
"""The gains that accept "auto"; a calibration has fields of the same names."""

ORDERED = (("lowest_temperature", "highest_temperature"), ("low_entropy", "high_entropy"))
"""Pairs of gains of which the first must be below the second; a `highest_temperature` of 0 is exempt."""

LOWEST_LIMIT, LIMIT = "lowest_dropped_mass_limit", "dropped_mass_limit"
"""A pair that may be equal, and is where the first is None."""

LIMIT_ENTROPIES = ("low_entropy", "high_entropy")
"""The gains between which ε falls from `LIMIT` to `LOWEST_LIMIT`."""


def check_order(values: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    """Raise ParameterError where the lower of a pair of gains is not below the higher.

    `lowest_dropped_mass_limit` may also be equal to `dropped_mass_limit`.

    Args:
        values: all gains by name, as numbers.
        stated: those that the caller stated; the error names one of them where it can.
    """
    for low, high in ORDERED:
        if values[low] < values[high] or (high == "highest_temperature" and values[high] == 0):
            continue
        if high in stated and low not in stated:
            message = f"{high} must be above {low} = {values[low]:g}; got {values[high]:g}"
            raise ParameterError(message, high)
        raise ParameterError(f"{low} must be below {high} = {values[high]:g}; got {values[low]:g}", low)
    if LOWEST_LIMIT in stated:
        check_limits(values)


def check_limit_entropies(values: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    """Raise ParameterError for a stated entropy that page selection does not read, as its limit is fixed.

    Args:
        values: all gains by name, as numbers.
        stated: those that the caller stated.
    """
    for name in LIMIT_ENTROPIES:
        if name in stated and values[LOWEST_LIMIT] is None:
            got = f"got {stated[name]!r} without it"
            raise ParameterError(f"{name} must be set with {LOWEST_LIMIT}, or ε is fixed; {got}", name)


def check_limits(values: Mapping[str, Any]) -> None:
    """Raise ParameterError where `lowest_dropped_mass_limit` is above `dropped_mass_limit`."""
    lowest, limit = values[LOWEST_LIMIT], values[LIMIT]
    if lowest is not None and lowest > limit:
        raise ParameterError(
            f"{LOWEST_LIMIT} must be at most {LIMIT} = {limit:g}; got {lowest:g}", LOWEST_LIMIT
        )
