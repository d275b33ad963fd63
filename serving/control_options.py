"""The control loop on the command line: a preset by name, and gains in place of its defaults."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .request import RequestError

if TYPE_CHECKING:
    from entropic_jax.calibration import Calibration
    from entropic_jax.control.presets import Gains, Preset

NAMES = ("off", "micro", "meso", "macro", "full", "paper")
SAMPLERS = ("entropix", "entropix-as-released", "dslider")  # whole samplers: `samplers` makes them
SAMPLER_OPTIONS = ("branches", "clarification")  # of entropix
METHODS = (
    "dense",
    "entropyinfer",
    "entropy-prefill",
    "entropy-matched",
    "entropy-as-released",
    "latent-compression",
    "criti-prefill",
    "uniform-prefill",
    "oracle-prefill",
    "snapkv",
    "adakv",
    "h2o",
    "streaming-llm",
    "quest",
)
BUDGETS = {"base": "prefill_budget", "budget": "cache_budget"}  # of a method, and their options
AUTO = "auto"
GAINS = {
    "target_entropy": ("target_entropy", "hold the entropy of what is sampled at this"),
    "lowest_temperature": ("lowest_temperature", "no law goes below"),
    "highest_temperature": ("highest_temperature", "no law goes above"),
    "dropped_mass_limit": ("dropped_mass_limit", "most attention mass to leave unread, in [0, 1)"),
    "lowest_dropped_mass_limit": ("lowest_dropped_mass_limit", "the same, however uncertain the model is"),
    "low_entropy": ("low_entropy", "nats at and below which --dropped-mass-limit holds"),
    "high_entropy": ("high_entropy", "nats at and above which --lowest-dropped-mass-limit holds"),
}
FROM_CALIBRATION = {name: name for name in ("target_entropy", "low_entropy", "high_entropy")}


class Control(NamedTuple):
    """What the command line asks of the loop: a preset and a method by name, and what they were given."""

    preset: str = "off"
    gains: tuple[tuple[str, Any], ...] = ()
    method: str = "dense"
    budgets: tuple[tuple[str, int], ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("control by entropy")
    group.add_argument(
        "--preset",
        choices=(*NAMES, *SAMPLERS),
        default="off",
        help="the scales that are on: micro (temperature), meso (pages read), macro (whose turn), "
        "all of them (full), or all as the paper prints them; or a sampler of docs/methods.md (default: off)",
    )
    group.add_argument(
        "--branches",
        type=_count,
        metavar="INT",
        help="of entropix: continuations that are compared; 1 decides token by token (default: 4)",
    )
    group.add_argument(
        "--clarification",
        metavar="TEXT",
        help="of entropix: said where entropy is high and varentropy low (default: nothing)",
    )
    _add_gains(group)
    group = parser.add_argument_group("long prompts")
    group.add_argument(
        "--method",
        choices=METHODS,
        default="dense",
        help="a published method of reading less of a prompt, or of keeping less of it (default: dense)",
    )
    for option, text in (
        ("prefill-budget", "tokens that each segment of a prompt reads of those before it, per KV head"),
        ("cache-budget", "entries of the cache that stay, or that a step reads, per KV head"),
    ):
        group.add_argument(f"--{option}", type=int, metavar="INT", help=f"{text} (default: as published)")


def add_gains(parser: argparse.ArgumentParser) -> None:
    """Declare the options, without a preset: the command runs several."""
    _add_gains(parser.add_argument_group("control by entropy"))


def _add_gains(group: "argparse._ArgumentGroup") -> None:
    laws = ("paper", "integral", "normalised", "exact", "mirostat", "edt", "dynatemp")
    group.add_argument("--law", choices=laws, help="of temperature (default: normalised)")
    schedules = ("entropic", "paper", "fcfs", "shortest-job", "shortest-remaining")
    group.add_argument("--schedule", choices=schedules, help="of sequences (default: entropic)")
    for name, (_, text) in GAINS.items():
        automatic = "; auto: from calibration.json" if GAINS[name][0] in FROM_CALIBRATION else ""
        group.add_argument(
            f"--{name.replace('_', '-')}", type=_gain(name), metavar="FLOAT", help=text + automatic
        )


def read(options: argparse.Namespace) -> Control:
    """What the options say."""
    given = {name: getattr(options, name) for name in ("law", "schedule")}
    given |= {field: getattr(options, name) for name, (field, _) in GAINS.items()}
    given |= {name: getattr(options, name, None) for name in SAMPLER_OPTIONS}
    budgets = {name: getattr(options, option, None) for name, option in BUDGETS.items()}
    some = lambda values: tuple((k, v) for k, v in values.items() if v is not None)
    named, method = getattr(options, "preset", "off"), getattr(options, "method", "dense")
    return Control(named, some(given), method, some(budgets))


def calibration_of(model: Path) -> "Calibration | None":
    """The calibration in a model's directory, if there is one. RequestError if it cannot be used."""
    from entropic_jax.calibration import load_calibration

    try:
        return load_calibration(model)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RequestError(f"--model is {model}: {error}") from error


def build(control: Control, calibration: "Calibration | None", width: int | None) -> "Preset":
    """The preset with its gains: those given, else those of the calibration, else the defaults."""
    from entropic_jax.control.presets import preset
    from entropic_jax.methods.registry import method

    made = preset(control.preset, width, gains(control, calibration))
    try:
        return method(control.method, made, **dict(control.budgets))
    except ValueError as error:
        raise RequestError(f"--method is {control.method}: {error}") from None


def gains(control: Control, calibration: "Calibration | None") -> "Gains":
    """The gains alone."""
    from entropic_jax.control.entropy_drop import AR1
    from entropic_jax.control.presets import Gains

    given = dict(control.gains)
    if control.preset in SAMPLERS:
        raise RequestError(f"preset is {control.preset!r}; accepted here are {', '.join(NAMES)}")
    if misplaced := [name for name in SAMPLER_OPTIONS if name in given]:
        raise RequestError(f"{misplaced[0]} is given; accepted with the preset entropix")
    asked = [name for name, value in given.items() if value == AUTO]
    if asked and calibration is None:
        raise RequestError(f"{asked[0]} is auto; accepted with a calibration.json in the model's directory")
    given = {name: value for name, value in given.items() if value != AUTO}
    if calibration is not None:
        found: dict[str, Any] = {k: getattr(calibration, v) for k, v in FROM_CALIBRATION.items()}
        found["prior"] = AR1(calibration.mean, calibration.scale, calibration.correlation)
        given = {**found, **given}
    made = Gains(**given)
    for low, high in (("lowest_temperature", "highest_temperature"), ("low_entropy", "high_entropy")):
        if not getattr(made, low) < getattr(made, high):
            raise RequestError(
                f"{low} is {getattr(made, low)}, {high} {getattr(made, high)}; accepted are {low} < {high}"
            )
    return made


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not accepted; give integers of at least 1")


def _gain(name: str):
    field = GAINS[name][0]

    def convert(text: str) -> float | str:
        if text == AUTO and field in FROM_CALIBRATION:
            return AUTO
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        low = value >= 0 if field not in ("lowest_temperature", "highest_temperature") else value > 0
        if not (low and math.isfinite(value) and ("dropped_mass" not in field or value < 1)):
            bound = (
                "in [0, 1)"
                if "dropped_mass" in field
                else "above 0"
                if field in ("lowest_temperature", "highest_temperature")
                else "of at least 0"
            )
            raise argparse.ArgumentTypeError(f"{text} is not accepted; give a number {bound}")
        return value

    return convert
