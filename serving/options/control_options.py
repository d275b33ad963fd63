"""The control loop on the command line: a preset by name, and gains in place of its defaults."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from entropic_jax.parameter_tables.control_gains import (
    CALIBRATED,
    GAINS,
    MACRO,
    MICRO,
    PRESET_TABLE,
    PRESETS,
    PRUNING,
    SCALES,
    check_limit_entropies,
    check_order,
)
from entropic_jax.parameter_tables.table import (
    AUTO,
    LARGEST_INT,
    Choice,
    Number,
    ParameterError,
    check_unicode,
    short,
)

from ..request import RequestError
from . import prefill_options
from .model import check_directory
from .option_types import number

if TYPE_CHECKING:
    from entropic_jax.calibration import Calibration
    from entropic_jax.methods.presets import Gains, Preset

SAMPLERS = ("entropix", "entropix-as-released", "dslider")  # complete samplers, of `samplers.law`
ENGINE_PRESETS = (*(name for name in PRESETS if name != "paper"), *SAMPLERS)  # `paper` has no per-row form
SAMPLER_OPTIONS = ("branches", "clarification")  # of entropix
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = "lowest_temperature", "highest_temperature"
SERVED_GAINS = tuple(name for name in GAINS if name != "schedule")  # an engine has `scheduling_policy`
BRANCHES = Number(int, 1, 64)
METHODS = (
    "dense",
    "entropyinfer",
    "entropy-prefill",
    "entropy-matched",
    "entropy-as-released",
    "latent-compression",
    "criti-prefill",
    "uniform-prefill",
    "budgeted-prefill",
    "oracle-prefill",
    "snapkv",
    "adakv",
    "h2o",
    "streaming-llm",
    "quest",
)
ORACLE = "shortest-job"  # the schedule that needs lengths of texts before they are written
MISSING_LAW = {MICRO: "temperature law", PRUNING: "page selection", MACRO: "scheduling law"}
BUDGETS = {"base": "prefill_budget", "budget": "cache_budget"}  # a method's argument, and its option


class Control(NamedTuple):
    """A preset, a method and a drafter by name, with their gains and budgets."""

    preset: str = "off"
    gains: tuple[tuple[str, Any], ...] = ()
    method: str = "dense"
    budgets: tuple[tuple[str, int], ...] = ()
    prefill_options: tuple[tuple[str, Any], ...] = ()  # of a sparse prefill, by names of `PREFILL_OPTIONS`
    speculate: str | None = None  # drafter of a request; None is that of the engine


def add_arguments(parser: argparse.ArgumentParser, served: bool = False) -> None:
    """Declare the options, without a default of the preset: see `speculation_options.default_preset`.

    Args:
        parser: gets the options.
        served: whether for an engine, which accepts neither `paper` nor `--schedule`.
    """
    presets = ENGINE_PRESETS if served else (*PRESETS, *SAMPLERS)
    group = parser.add_argument_group("control by entropy")
    group.add_argument(
        "--preset",
        choices=presets,
        help="; ".join(f"{name}: {line.help}" for name, line in PRESET_TABLE.items() if name in presets)
        + "; or a sampler of docs/methods.md (default: meso, or off with options that exclude drafts)",
    )
    group.add_argument(
        "--branches",
        type=number(BRANCHES),
        metavar="INT",
        help="of entropix: continuations to compare; 1 decides token by token (default: 4)",
    )
    group.add_argument(
        "--clarification",
        metavar="TEXT",
        help="of entropix: text to insert where entropy is high and varentropy low (default: nothing)",
    )
    _add_gains(group, SERVED_GAINS if served else tuple(GAINS))
    group = parser.add_argument_group("long prompts")
    group.add_argument(
        "--method",
        choices=METHODS,
        default="dense",
        help="published method that reads or keeps less of a prompt's KV cache (default: dense)",
    )
    for option, text in (
        ("prefill-budget", "earlier tokens that each segment of a prompt attends to, per KV head"),
        ("cache-budget", "KV cache entries to keep, or to read in a step, per KV head"),
    ):
        group.add_argument(f"--{option}", type=int, metavar="INT", help=f"{text} (default: as published)")
    prefill_options.add_arguments(group)


def add_gains(parser: argparse.ArgumentParser) -> None:
    """Declare the gains, without a preset: the command runs several."""
    _add_gains(parser.add_argument_group("control by entropy"), tuple(GAINS))


def _add_gains(group: "argparse._ArgumentGroup", names: Sequence[str]) -> None:
    """Declare an option for each of these gains, None by default."""
    for name in names:
        line = GAINS[name]
        flag, unit = f"--{name.replace('_', '-')}", f" ({line.unit})" if line.unit else ""
        auto = ", or auto: from calibration.json" if name in CALIBRATED else ""
        default = "none" if line.default is None else line.default
        text = f"{line.help}{unit}{auto} (default: {default})"
        if isinstance(line.accepts, Choice):
            group.add_argument(flag, choices=line.accepts.names, help=text)
        else:
            group.add_argument(flag, type=number(line.accepts), metavar="FLOAT", help=text)


def read(options: argparse.Namespace, default: str = "off") -> Control:
    """The control that parsed options describe.

    Args:
        options: the options of the command line.
        default: the preset where none is stated.
    """
    gains = {name: getattr(options, name, None) for name in (*GAINS, *SAMPLER_OPTIONS)}
    budgets = {name: getattr(options, option, None) for name, option in BUDGETS.items()}

    def stated(values):
        return tuple((k, v) for k, v in values.items() if v is not None)

    preset, method = getattr(options, "preset", None), getattr(options, "method", "dense")
    extra = prefill_options.read(options)
    return Control(preset or default, stated(gains), method, stated(budgets), extra)


def calibration_of(model: Path) -> "Calibration | None":
    """The calibration in a model's directory, if there is one. Raises RequestError if either is unusable."""
    from entropic_jax.calibration import load_calibration

    check_directory(model)
    try:
        return load_calibration(model)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RequestError(f"model has a calibration.json that cannot be used: {error}", "model") from error


def budget_pairs(budgets: Any) -> tuple[tuple[str, int], ...]:
    """Pairs of a method's argument and its value, of a mapping from option names. Raises ParameterError."""
    arguments, names = {option: name for name, option in BUDGETS.items()}, " and ".join(BUDGETS.values())
    if not isinstance(budgets, Mapping):
        raise ParameterError(
            f"budgets must be a mapping with the keys {names}; got {short(budgets)}", "budgets"
        )
    for key in budgets:
        if key not in arguments:
            raise ParameterError(f"budgets must have no keys but {names}; got {short(key)}", "budgets")
    return tuple((arguments[key], value) for key, value in budgets.items())


def check_budgets(budgets: tuple[tuple[str, Any], ...], method: str) -> None:
    """Raise ParameterError where the method does not have a budget, or it is not an integer large enough."""
    from entropic_jax.methods import registry

    least = registry.MIN_BUDGET
    for argument, value in budgets:
        name = BUDGETS.get(argument, argument)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            message = f"budgets must map {name} to an integer of at least {least}; got {short(value)}"
            raise ParameterError(message, "budgets")
        if value > LARGEST_INT:
            message = f"budgets must map {name} to an integer of at most {LARGEST_INT}; got {short(value)}"
            raise ParameterError(message, "budgets")
        if argument not in registry.budgets_of(method):
            message = f"budgets must not have the key {name} with the method {method}; got {value}"
            raise ParameterError(message, "budgets")


def build(control: Control, calibration: "Calibration | None", width: int | None) -> "Preset":
    """The preset with its gains: those given, else those of the calibration, else the defaults.

    Args:
        control: names the preset, its gains and the method.
        calibration: the model's calibration, or None.
        width: rows that a step advances; None for all.

    Raises RequestError for what `gains`, `check_preset` or the method refuse.
    """
    from entropic_jax.methods.presets import preset
    from entropic_jax.methods.registry import add_method

    base = preset(control.preset, width, gains(control, calibration))
    check_preset(control)
    try:
        extra = dict(control.prefill_options)
        return add_method(control.method, base, **dict(control.budgets), prefill_options=extra)
    except ParameterError as error:
        option = (BUDGETS | prefill_options.OPTIONS)[error.param or ""]
        missing = error.param not in {**dict(control.budgets), **dict(control.prefill_options)}
        shown = (
            f"--{option.replace('_', '-')}" if missing else option
        )  # `message_of` names stated options only
        raise RequestError(str(error).replace(error.param or "", shown, 1), option) from None
    except ValueError as error:
        raise RequestError(f"--method {control.method}: {error}", "method") from None


def gains(control: Control, calibration: "Calibration | None") -> "Gains":
    """The gains of a control: those stated, else those of the calibration, else the defaults.

    Raises RequestError where a gain is not accepted, is "auto" and there is no calibration, or would be
    ignored by the temperature law or the preset paper.
    """
    from entropic_jax.control.scheduling import AR1
    from entropic_jax.methods.presets import Gains

    stated = dict(control.gains)
    if control.preset in SAMPLERS:
        raise RequestError(
            f"preset must be one of {', '.join(PRESETS)} here; got {control.preset!r}", "preset"
        )
    _check_sampler_options(control)
    numbers = {name: value for name, value in stated.items() if value != AUTO}
    if calibration is None:
        for name in stated.keys() - numbers.keys():
            raise RequestError(
                f"{name} must be a number for a model without calibration.json; got 'auto'", name
            )
        measured: dict[str, Any] = {}
    else:
        measured = {name: getattr(calibration, name) for name in CALIBRATED}
        measured["prior"] = AR1(calibration.mean, calibration.scale, calibration.correlation)
    try:
        result = Gains(**{**measured, **numbers})
        values = {**result.asdict(), **numbers}
        check_order(values, stated)
        if PRUNING in SCALES[control.preset]:
            check_limit_entropies(values, stated)
    except ParameterError as error:
        raise RequestError(str(error), error.param) from None
    _check_used(control.preset, result.law, stated)
    return result


def _check_used(preset: str, law: str, stated: Mapping[str, Any]) -> None:
    """Raise RequestError for a stated gain that the preset paper or the temperature law would ignore."""
    from entropic_jax.methods.presets import PAPER_GAINS, TEMPERATURE_GAINS, gains_of_law

    if preset == "paper":
        setting, unused = "preset paper", stated.keys() - set(PAPER_GAINS)
    else:
        setting, unused = f"law {law}", stated.keys() & (set(TEMPERATURE_GAINS) - set(gains_of_law(law)))
    if unused:
        name = min(unused)
        raise RequestError(
            f"{name} must not be set with the {setting}, which ignores it; got {stated[name]!r}", name
        )


def check_engine_control(control: Control, calibration: "Calibration | None", policy: str) -> None:
    """Raise RequestError for the control of an engine to be, before its model is loaded.

    Args:
        control: default of the engine's requests.
        calibration: the model's calibration, or None.
        policy: the engine's scheduling policy.
    """
    if control.preset == MACRO and policy != "entropic":
        accepted = ", ".join(name for name in ENGINE_PRESETS if name != MACRO)
        raise RequestError(
            f"preset must be one of {accepted}; got {control.preset!r} (the engine does not order requests "
            "by entropy: scheduling_policy is not entropic)",
            "preset",
        )
    if control.preset in SAMPLERS:
        check_sampler(control)
    else:
        stated = tuple(pair for pair in control.gains if pair[0] not in SAMPLER_OPTIONS)
        gains(control._replace(gains=stated), calibration)


def check_preset(control: Control) -> None:
    """Raise RequestError for an option of a sampler or a gain of a scale that the preset leaves off."""
    scales = SCALES.get(control.preset)
    if scales is None:  # a sampler: see `check_sampler`
        return
    _check_sampler_options(control)
    if dict(control.gains).get("schedule") == ORACLE:
        raise RequestError(
            f"schedule must not be {ORACLE} here, which needs the lengths of texts before they are written; "
            f"got {ORACLE!r}",
            "schedule",
        )
    for name, value in sorted(control.gains):
        scale = GAINS[name].scope if name in GAINS else ""
        if scale in MISSING_LAW and scale not in scales:
            raise RequestError(
                f"{name} must not be set with the preset {control.preset}, which has no "
                f"{MISSING_LAW[scale]}; got {value!r}",
                name,
            )


def check_temperature(control: Control, temperature: float) -> None:
    """Raise RequestError for a stated `lowest_temperature` that no law can obey at a request's temperature.

    The request's temperature is T_max where `highest_temperature` is 0. A greedy request has no law.

    Args:
        control: the preset of the request, with its gains.
        temperature: the temperature that the request asks for.
    """
    if MICRO not in SCALES.get(control.preset, ()) or temperature == 0:
        return
    stated = dict(control.gains)
    lowest = stated.get(LOWEST_TEMPERATURE, 0)
    if lowest > temperature and not stated.get(HIGHEST_TEMPERATURE, GAINS[HIGHEST_TEMPERATURE].default):
        raise RequestError(
            f"{LOWEST_TEMPERATURE} must be at most temperature = {temperature:g} while "
            f"{HIGHEST_TEMPERATURE} is 0; got {lowest:g}",
            LOWEST_TEMPERATURE,
        )


def _check_sampler_options(control: Control) -> None:
    """Raise RequestError for an option of entropix: the preset is another."""
    for name in SAMPLER_OPTIONS:
        if name in dict(control.gains):
            raise RequestError(f"{name} needs the preset entropix; got the preset {control.preset}", name)


def check_sampler(control: Control) -> None:
    """Raise RequestError for a stated gain that the sampler named by `control.preset` would ignore."""
    accepted = SAMPLER_OPTIONS if control.preset == "entropix" else ()
    for name, value in sorted(control.gains):
        if name not in accepted:
            message = f"{name} must not be set with the preset {control.preset}; got {value!r}"
            raise RequestError(message, name)


def check_clarification(clarification: Any, preset: str) -> None:
    """Raise ParameterError unless the text is a string, and empty but for the preset entropix."""
    name = "clarification"
    if not isinstance(clarification, str):
        raise ParameterError(f"{name} must be a string; got {short(clarification)}", name)
    check_unicode(name, clarification)
    if clarification and preset != "entropix":
        raise ParameterError(
            f"{name} needs the preset entropix; got the preset {preset} and {short(clarification)}", name
        )
