"""Keyword arguments of `LLM`: engine options and controller gains, checked by name."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import jax

from entropic_jax.parameter_tables.control_gains import GAINS, MACRO, PRUNING, SCALES
from entropic_jax.parameter_tables.table import ParameterError, short

from ..engine.options import EngineOptions
from ..options import control_options, processes, speculation_options
from ..options.control_options import ENGINE_PRESETS, SAMPLER_OPTIONS, SERVED_GAINS, Control, check_preset

SIMILARITY = 0.7  # of names, between 0 and 1, from which one is taken for a misspelling of the other
IN_FLIGHT = 1024  # sequences that the engine holds at once, most of them waiting
CPU_ROWS = 16  # default of max_num_seqs on a CPU, where more rows per step hardly raise the throughput
GAIN_NAMES = (*SERVED_GAINS, *SAMPLER_OPTIONS)
# `LLM` sets the other fields itself: clarification, branches and law are gains, the rest follows from them.
ENGINE_NAMES = tuple(
    field.name
    for field in dataclasses.fields(EngineOptions)
    if field.name not in (*GAIN_NAMES, "preset", "max_queue")
)

DIVIDING = ("mesh", "tensor_parallel_size", "expert_parallel_size")  # the model over several devices
PROCESS_NAMES = processes.NAMES  # which processes the model is divided over
ALIASES = {"kv_cache_memory_bytes": "kv_cache_bytes"}  # vLLM's names of engine options
DRAFTED = "num_speculative_tokens"
SPECULATIVE_CONFIG = "speculative_config"  # vLLM's form of `speculate` and `num_speculative_tokens`


def read_options(preset: str | None, options: Mapping[str, Any]) -> tuple[Control, EngineOptions]:
    """The control of every sequence and the options of the engine.

    Args:
        preset: a name of `ENGINE_PRESETS`; None chooses as `speculation_options.default_preset` says.
        options: further keyword arguments of `LLM`: any of `ENGINE_NAMES`, `GAIN_NAMES` or `ALIASES`, or
            `SPECULATIVE_CONFIG`; without `PROCESS_NAMES`.

    Raises:
        TypeError: for a name that is neither.
        ValueError: for an invalid value.
    """
    stated, options = options, _without_aliases(options)
    for name in options:
        if name not in (*ENGINE_NAMES, *GAIN_NAMES, SPECULATIVE_CONFIG):
            raise TypeError(f"LLM has no argument {name}; {_suggestion(name)}")
    drafting: dict[str, Any] = {}
    if (config := options.get(SPECULATIVE_CONFIG)) is not None:
        if (number := options.get(DRAFTED)) is not None:
            raise ParameterError(
                f"{DRAFTED} must not be set together with {SPECULATIVE_CONFIG}; got {short(number)}", DRAFTED
            )
        drafting = speculation_options.engine_fields(options.get("speculate"), config)
    if preset is None:
        preset = speculation_options.default_preset(
            drafting.get("speculate", options.get("speculate")),
            options.get("method") or "dense",
            batch_invariant=options.get("batch_invariant") is True,
            divided=any(options.get(name) not in (None, 1) for name in DIVIDING),
        )
    if preset not in ENGINE_PRESETS:
        raise ParameterError(
            f"preset must be one of {', '.join(ENGINE_PRESETS)}; got {short(preset)}", "preset"
        )
    gains = {name: options[name] for name in GAIN_NAMES if options.get(name) is not None}
    gains |= {name: GAINS[name].accepts.check(name, gains[name]) for name in gains.keys() & GAINS.keys()}
    engine: dict[str, Any] = {
        "max_num_seqs": CPU_ROWS if jax.default_backend() == "cpu" else EngineOptions.max_num_seqs,
        "pruning": PRUNING in SCALES.get(preset, ()),
        "scheduling_policy": "entropic" if MACRO in SCALES.get(preset, ()) else "fcfs",
        "warmup": "none",
        **{name: value for name, value in options.items() if name in ENGINE_NAMES and value is not None},
        **{name: gains[name] for name in ("law", *SAMPLER_OPTIONS) if name in gains},
        "preset": preset,
        "max_queue": IN_FLIGHT,
    }
    engine |= drafting
    engine["budgets"] = control_options.budget_pairs(engine.get("budgets", {}))
    if isinstance(values := engine.get("prefill_options", {}), Mapping):
        engine["prefill_options"] = tuple(values.items())
    try:
        checked = EngineOptions(**engine)
    except ParameterError as error:
        alias = next((old for old, new in ALIASES.items() if new == error.param and old in stated), None)
        if alias is None:
            raise
        raise ParameterError(str(error).replace(str(error.param), alias), alias) from None
    control = Control(preset, tuple(gains.items()), checked.method, checked.budgets, checked.prefill_options)
    check_preset(control)
    return control, checked


def _without_aliases(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options under the names of `EngineOptions`. ParameterError for one that is stated by both names."""
    for alias, name in ALIASES.items():
        if options.get(alias) is not None and options.get(name) is not None:
            message = f"{alias} must not be set together with {name}, which is the same; got {options[alias]}"
            raise ParameterError(message, alias)
    renamed = {name: options[alias] for alias, name in ALIASES.items() if options.get(alias) is not None}
    return {name: value for name, value in options.items() if name not in ALIASES} | renamed


def _suggestion(name: str) -> str:
    known = (
        "model",
        "preset",
        "seed",
        *ENGINE_NAMES,
        *GAIN_NAMES,
        *PROCESS_NAMES,
        SPECULATIVE_CONFIG,
        *ALIASES,
    )
    close = difflib.get_close_matches(name, known, 1, SIMILARITY)
    return f"did you mean {close[0]}?" if close else f"its arguments are {', '.join(known)}"
