"""Measurement of slices: the first dtype of a model that fits, and its programs, compiled and read."""

import importlib.metadata
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console

from entropic_jax.analysis import ahead_of_time
from entropic_jax.analysis.chips import topology
from entropic_jax.analysis.collectives import collectives
from entropic_jax.analysis.compile_process import in_a_process
from entropic_jax.analysis.plan import (
    Dtypes,
    Plan,
    attention_flops,
    check_groups_of,
    counted,
    first_that_fits,
    make_plan,
)
from entropic_jax.methods.presets import preset
from entropic_jax.models import ModelError
from entropic_jax.models.sharding import check_sizes

from .workload import CONTEXT, MODELS, PAGE, ROWS, expert_groups, program_of

DTYPES = [Dtypes("bfloat16", "bfloat16", quantization) for quantization in (None, "int8", "int4")]
BATCH = ahead_of_time.Batch(ROWS, CONTEXT, PAGE, ROWS * CONTEXT // PAGE)


def plan_case(model: str, name: str) -> dict[str, Any]:
    """The plan of a model on a slice, by shapes, in the first dtype of which 32 sequences of 8192 fit.

    Args:
        model: the name of a model in `MODELS`.
        name: the name of a slice.
    """
    config, slice_ = MODELS[model], topology(name)
    experts = expert_groups(config, slice_.devices)
    case: dict[str, Any] = {"model": model, "slice": name, "experts": experts, "fits": False}
    for dtypes in DTYPES:
        state = ahead_of_time.state_shapes(config, BATCH, dtypes.cache, preset("off"))
        case["first_slice"] = case.get("first_slice") or first_that_fits(
            config, dtypes, state, ROWS, slice_.chip.platform
        )
        try:
            check_sizes(config, slice_.devices // experts, experts)
            check_groups_of(config, dtypes.quantization, slice_.devices // experts, experts)
        except ModelError as error:
            case["reason"] = str(error)
            continue
        plan = make_plan(config, slice_, dtypes, state, experts=experts)
        if plan.sequences >= ROWS:
            return {**case, "dtypes": dtypes, "fits": True, **costs(config, plan)}
        case["sequences"] = plan.sequences
    return case


def costs(config: Any, plan: Plan) -> dict[str, Any]:
    """Costs of a decode step of all sequences on a chip, and its least time.

    Args:
        config: the configuration of the model.
        plan: the plan of the step.
    """
    shape = ahead_of_time.decoder_of(config).shape
    return {
        "sequences": plan.sequences,
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": ROWS * CONTEXT // PAGE * plan.page_bytes,
        "flops": (2 * shape.weights * ROWS + attention_flops(config, ROWS, CONTEXT)) // plan.devices,
        "collectives": counted(plan.collectives),
        "milliseconds": plan.roofline._asdict(),
        "tokens_per_second": 1e3 * ROWS / plan.roofline.total,
    }


def compile_program(case: dict[str, Any], program: str, control: str) -> dict[str, Any]:
    """The compiler's report on a program of a case.

    Args:
        case: from `plan_case`.
        program: the name of a program, as `program_of` takes it.
        control: the name of the preset.
    """
    config, begin = MODELS[case["model"]], time.perf_counter()
    devices = ahead_of_time.devices_of(case["slice"])
    setting = preset(control, ROWS, platform=topology(case["slice"]).chip.platform)
    lowered = ahead_of_time.lower_step(
        config, devices, BATCH, tuple(case["dtypes"]), setting, case["experts"], program=program_of(program)
    )
    compiled = ahead_of_time.compiled(lowered)
    exchanged = collectives(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    gathered = [c.num_bytes for c in exchanged if c.operation == "all-gather"]
    return {
        "seconds": time.perf_counter() - begin,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": counted(exchanged),
        "largest_gather": max(gathered, default=0),
    }


def measure(
    models: tuple[str, ...],
    slices: tuple[str, ...],
    programs: tuple[tuple[str, str], ...],
    limit: float,
    console: Console,
    before: dict[str, Any],
    description: dict[str, Any],
) -> dict[str, Any]:
    """All cases; two programs are compiled at a time, the first program of all cases first.

    Args:
        models: names of models.
        slices: names of slices.
        programs: names of programs, each with its preset.
        limit: seconds after which no further program is begun.
        console: where to print.
        before: the results of a run that did not begin all programs; what it compiled is not compiled again.
        description: date and commit of this run, which its programs get.
    """
    cases = [plan_case(model, name) for model in models for name in slices]
    earlier = {name: before.get(name) for name in ("date", "commit")}
    compiled = {
        (case["model"], case["slice"]): {
            name: earlier | program
            for name, program in case.get("programs", {}).items()
            if "error" not in program
        }
        for case in before["cases"]
    }
    run = {name: description[name] for name in ("date", "commit")}
    end = time.monotonic() + limit

    def compile_one(task: tuple[dict[str, Any], str, str]) -> None:
        case, program, control = task
        if time.monotonic() < end:
            try:
                result = in_a_process(compile_program, stated(case), program, control)
            except RuntimeError as error:
                result = {"error": str(error)}
            case["programs"][f"{program} {control}"] = run | result
            console.print(case["model"], case["slice"], program, control, result.get("error", "compiled"))

    fitting = [
        case | {"programs": dict(compiled.get((case["model"], case["slice"]), {}))}
        for case in cases
        if case["fits"]
    ]
    reasons = {name: why_not_compiled(name) for name in slices}
    tasks = [
        (case, *program)
        for program in programs
        for case in fitting
        if not reasons[case["slice"]] and " ".join(program) not in case["programs"]
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, tasks))
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu", "jax-cuda13-plugin")}
    not_compiled = {name: reason for name, reason in reasons.items() if reason}
    every = [*fitting, *(case for case in cases if not case["fits"])]
    return {"cases": every, "versions": versions, "not_compiled": not_compiled}


def why_not_compiled(name: str) -> str:
    """Why no program can be compiled for a slice; empty where one can."""
    try:
        ahead_of_time.devices_of(name)
    except RuntimeError as error:
        return str(error)
    return ""


def stated(case: dict[str, Any]) -> dict[str, Any]:
    """The fields of a case that `compile_program` reads."""
    return {name: case[name] for name in ("model", "slice", "experts", "dtypes")}
