"""Plan a model on a slice of TPUs: what fits and how long a step takes, without weights or TPUs.

The step is compiled ahead of time where libtpu is installed; else the numbers follow from shapes.
"""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropic_jax.parameter_tables.control_gains import PRESETS
from entropic_jax.parameter_tables.table import ParameterError

from ..options import kv_cache
from ..options.option_types import positive

if TYPE_CHECKING:
    from entropic_jax.analysis.plan import Plan

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic plan` takes."""
    parser.add_argument(
        "--model", type=Path, required=True, metavar="PATH", help="model directory, or its config.json"
    )
    parser.add_argument(
        "--topology", required=True, metavar="NAME", help="TPU slice: chip and shape, as v5e:2x4 or v5p:2x2x2"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="data type of the weights (default: bfloat16)",
    )
    kv_cache.add_argument(parser)
    parser.add_argument(
        "--expert-parallel-size",
        type=positive,
        default=1,
        metavar="INT",
        help="groups of chips over which experts are divided; their number of chips is the tensor axis "
        "(default: 1)",
    )
    parser.add_argument(
        "--max-num-seqs", type=positive, default=32, metavar="INT", help="sequences (default: 32)"
    )
    parser.add_argument(
        "--max-model-len",
        type=positive,
        default=8192,
        metavar="INT",
        help="positions of each (default: 8192)",
    )
    parser.add_argument(
        "--block-size", type=positive, default=128, metavar="INT", help="of a page (default: 128)"
    )
    parser.add_argument("--preset", choices=PRESETS, default="off", help="of control (default: off)")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the step for the slice if libtpu is installed (default: on)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the plan. Returns 0, or 1 if not even one sequence fits."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs
    plan, note, smallest = make(options)
    if options.json:
        print(json.dumps(as_json(plan, note, smallest)))
    else:
        print("\n".join(describe(options, plan, note, smallest)))
    return int(plan.sequences == 0)


def make(options: argparse.Namespace) -> "tuple[Plan, str, str | None]":
    """The plan of the options, why the step was not compiled if it was not, and what fits if nothing does."""
    from entropic_jax.analysis import ahead_of_time
    from entropic_jax.analysis.chips import topology
    from entropic_jax.analysis.plan import Dtypes, first_that_fits, make_plan
    from entropic_jax.methods.presets import preset
    from entropic_jax.models import ModelError
    from entropic_jax.models.model import read_config
    from entropic_jax.models.sharding import check_sizes

    try:
        slice_ = topology(options.topology)
    except ValueError as error:
        raise ParameterError(str(error), "topology") from None
    experts = options.expert_parallel_size
    if slice_.devices % experts:
        raise ParameterError(
            f"expert_parallel_size must divide the number of chips, {slice_.devices}; got {experts}",
            "expert_parallel_size",
        )
    try:
        config = read_config(options.model)
        check_sizes(config, slice_.devices // experts, experts)
    except (ModelError, OSError) as error:
        raise ParameterError(f"--model {options.model}: {error}", "model") from None
    setting = preset(options.preset, options.max_num_seqs, platform="tpu")
    page_size = options.block_size if setting.page_policy is None else setting.page_policy.page_size
    per_row = -(-options.max_model_len // page_size)
    batch = ahead_of_time.Batch(
        options.max_num_seqs, options.max_model_len, page_size, options.max_num_seqs * per_row
    )
    dtypes = Dtypes(options.dtype, str(kv_cache.stored_as(options.kv_cache_dtype, options.dtype)))
    state = ahead_of_time.state_shapes(config, batch, dtypes.cache, setting)
    plan = make_plan(config, slice_, dtypes, state, experts=experts)
    if plan.sequences == 0:
        return plan, "nothing fits", first_that_fits(config, dtypes, state)
    if not options.compile:
        return plan, "--no-compile", None
    # Compiled for as many sequences as fit: the compiler refuses a program that does not.
    rows = min(options.max_num_seqs, plan.sequences)
    batch = batch._replace(rows=rows, pages=rows * per_row)
    state = ahead_of_time.state_shapes(config, batch, dtypes.cache, setting)
    try:
        devices = ahead_of_time.devices_of(options.topology)
    except RuntimeError as error:
        return plan, str(error), None
    compiled = ahead_of_time.compile_step(config, devices, batch, dtypes, setting, experts)
    return make_plan(config, slice_, dtypes, state, compiled, experts), "", None


def as_json(plan: "Plan", note: str, smallest: str | None) -> dict[str, Any]:
    """The plan as JSON has it.

    Args:
        plan: To be shown.
        note: Why the step was not compiled, if it was not.
        smallest: Where nothing fits, the first slice on which a sequence does.
    """
    from entropic_jax.analysis.plan import counted

    return {
        **plan._asdict(),
        "sequences": plan.sequences,
        "collectives": {
            name: {"count": number, "bytes": size} for name, number, size in counted(plan.collectives)
        },
        "roofline": {**plan.roofline._asdict(), "total": plan.roofline.total},
        "not_compiled": note or None,
        "fits_on": smallest,
    }


def what_fits(plan: "Plan", smallest: str | None) -> str:
    """A line on how much fits, or on the first slice on which the model fits."""
    if plan.sequences:
        tokens = plan.pages * plan.page_size
        return f"{plan.sequences} sequences of {plan.context} positions fit ({tokens} tokens)"
    instead = f"it fits on {smallest}" if smallest else "it fits on no slice whose chips divide its heads"
    return f"does not fit: not one sequence of {plan.context} positions; {instead}"


def window_note(plan: "Plan") -> list[str]:
    """A line on layers with a window, where there are any."""
    if not plan.windowed_layers:
        return []
    return [f"{plan.windowed_layers} layers see a window only; pages before it are kept in all layers"]


def axes_of(options: argparse.Namespace, plan: "Plan") -> str:
    """How the model is divided, in words."""
    experts = options.expert_parallel_size
    if experts == 1:
        return "tensor parallel"
    return f"{plan.devices // experts} along tensor, {experts} along expert"


def describe(options: argparse.Namespace, plan: "Plan", note: str, smallest: str | None) -> list[str]:
    """The plan as lines of text.

    Args:
        options: The options of the command line.
        plan: To be shown.
        note: Why the step was not compiled, if it was not.
        smallest: Where nothing fits, the first slice on which a sequence does.
    """
    from entropic_jax.analysis.plan import counted

    axes = axes_of(options, plan)
    mebibytes = lambda number: f"{number / MIB:10.1f} MiB"
    pages = f"{plan.pages} pages of {plan.page_size} positions"
    lines = [
        f"{options.model} in {options.dtype} on {options.topology}: {plan.devices} chips, {axes}",
        f"numbers from: {plan.source}" + (f" ({note})" if note else ""),
        "",
        "per chip",
        f"  weights      {mebibytes(plan.weight_bytes)}",
        f"  KV cache     {mebibytes(plan.pages * plan.page_bytes)}   {pages}",
        f"  other state  {mebibytes(plan.state_bytes)}",
        f"  temporaries  {mebibytes(plan.temporary_bytes)}",
        f"  memory       {mebibytes(plan.memory_bytes)}   90 % of it may be in use",
        what_fits(plan, smallest),
        *window_note(plan),
        "",
        f"a decode step of {plan.rows} rows with {plan.context} positions each",
    ]
    lines += [
        f"  {name:<18} {number:4} times {mebibytes(size)} per chip"
        for name, number, size in counted(plan.collectives)
    ]
    time = plan.roofline
    parts = " + ".join(f"{name.replace('_', ' ')} {value:.2f} ms" for name, value in time._asdict().items())
    lines += [
        f"  {parts} = {time.total:.2f} ms at least",
        *(f"  {rows:4} rows: at most {rate:8.0f} tokens/s" for rows, rate in plan.tokens_per_second.items()),
    ]
    return lines
