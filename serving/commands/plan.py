"""Plan a model on a slice of TPUs or a host of GPUs: what fits and how long a step takes, without either.

The step is compiled ahead of time where a compiler for it is installed; else the numbers follow from shapes.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from entropic_jax.parameter_tables.control_gains import PRESETS
from entropic_jax.parameter_tables.table import ParameterError

from ..options import kv_cache, parallelism, speculation_options
from ..options.option_types import ROWS, number, path, positive
from . import model_options

if TYPE_CHECKING:
    from entropic_jax.analysis.plan import Plan

MIB = 2**20

NARROWER = {None: ("int8", "int4"), "int8": ("int4",), "fp8": ("int4",)}  # quantizations, the widest first

Ways = list[dict[str, str]]  # options with each of which a batch fits, by name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `entropic plan` takes."""
    parser.add_argument(
        "--model", type=path, required=True, metavar="PATH", help="model directory, or its config.json"
    )
    text = "TPU slice, chip and shape, as v5e:2x4 or v5p:2x2x2; or GPUs of a host, as h100:8"
    parser.add_argument("--topology", required=True, metavar="NAME", help=text)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="data type of the weights (default: bfloat16)",
    )
    model_options.add_quantization(parser)
    kv_cache.add_argument(parser)
    parser.add_argument(
        "--data-parallel-size",
        "-dp",
        type=positive,
        default=1,
        metavar="INT",
        help="engines, each with a copy of the model on an equal part of the chips (default: 1)",
    )
    parser.add_argument(
        "--expert-parallel-size",
        type=positive,
        default=1,
        metavar="INT",
        help="groups of an engine's chips over which experts are divided; their number of chips is the "
        "tensor axis (default: 1)",
    )
    parallelism.add_decode_context_parallel_size(parser)
    parser.add_argument(
        "--max-num-seqs",
        type=number(ROWS),
        default=32,
        metavar="INT",
        help="sequences of an engine (default: 32)",
    )
    parser.add_argument(
        "--max-model-len",
        type=positive,
        default=8192,
        metavar="INT",
        help="most positions of a sequence (default: 8192)",
    )
    parser.add_argument(
        "--block-size",
        type=positive,
        default=128,
        metavar="INT",
        help="positions of a KV cache page (default: 128)",
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="preset of control (default: that of `entropic serve`: meso, or off on several chips); drafts "
        "do not change the step that is counted",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the step for the slice if libtpu, or jax[cuda13] for GPUs, is installed (default: on)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the plan. Returns 0, or 1 if not even one sequence fits."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs
    plan, note, smallest = make(options)
    if options.json:
        print(json.dumps(as_json(plan, options.data_parallel_size, note, smallest)))
    else:
        print("\n".join(describe(options, plan, note, smallest)))
    return int(plan.sequences == 0)


def make(options: argparse.Namespace) -> "tuple[Plan, str, Ways]":
    """The plan of the options, why the step was not compiled if it was not, and what fits if nothing does."""
    from entropic_jax.analysis import ahead_of_time
    from entropic_jax.analysis.chips import topology
    from entropic_jax.analysis.compile_process import Request, compiled_needs
    from entropic_jax.analysis.plan import Dtypes, check_groups_of, make_plan
    from entropic_jax.methods.presets import preset
    from entropic_jax.models import ModelError
    from entropic_jax.models.model import read_config
    from entropic_jax.models.sharding import BOTH_SIZES, check_page_shards, check_sizes

    try:
        slice_ = topology(options.topology)
    except ValueError as error:
        raise ParameterError(str(error), "topology") from None
    ranks, experts = options.data_parallel_size, options.expert_parallel_size
    page_shards = options.decode_context_parallel_size
    check_divides("data_parallel_size", ranks, "the number of chips", slice_.devices)
    slice_, all_chips = slice_.group(ranks), slice_.name
    chips = "the number of chips" if ranks == 1 else "the chips of an engine"
    check_divides("expert_parallel_size", experts, chips, slice_.devices)
    try:
        config = read_config(options.model)
        check_sizes(config, slice_.devices // experts, experts)
        check_page_shards(config, slice_.devices, page_shards)
        check_groups_of(config, options.quantization, slice_.devices // experts, experts)
    except (ModelError, OSError) as error:
        if str(error).startswith("tensor_parallel_size"):  # which follows from the chips, as does the product
            size = "the number of chips" if experts == 1 else "the number of chips along tensor"
            reason = (
                str(error).replace(BOTH_SIZES, "the number of chips").replace("tensor_parallel_size", size)
            )
            raise ParameterError(f"--topology {options.topology}: {reason}", "topology") from None
        raise ParameterError(f"--model {options.model}: {error}", "model") from None
    chosen = options.preset or speculation_options.default_preset(divided=slice_.devices > 1)
    setting = preset(chosen, options.max_num_seqs, platform=slice_.chip.platform)
    page_size = options.block_size if setting.page_policy is None else setting.page_policy.page_size
    per_row = -(-options.max_model_len // page_size)
    batch = ahead_of_time.Batch(
        options.max_num_seqs, options.max_model_len, page_size, options.max_num_seqs * per_row
    )
    cache_dtype = str(kv_cache.stored_as(options.kv_cache_dtype, options.dtype))
    dtypes = Dtypes(options.dtype, cache_dtype, options.quantization)
    state = ahead_of_time.state_shapes(config, batch, dtypes.cache, setting)
    plan = make_plan(config, slice_, dtypes, state, experts=experts, page_shards=page_shards)
    larger: Ways = []
    if plan.sequences < options.max_num_seqs:
        narrower = partial(make_plan, config, slice_, state=state, experts=experts, page_shards=page_shards)
        larger = what_would_fit(
            config, dtypes, state, options.max_num_seqs, narrower, slice_, experts, page_shards
        )
    if plan.sequences == 0:
        return plan, "nothing fits", larger
    # A step for as many sequences as fit: the compiler refuses a program that does not.
    rows = min(options.max_num_seqs, plan.sequences)
    batch = batch._replace(rows=rows, pages=rows * per_row)
    state = ahead_of_time.state_shapes(config, batch, dtypes.cache, setting)
    plan = make_plan(config, slice_, dtypes, state, experts=experts, page_shards=page_shards)
    if not options.compile:
        return plan, "--no-compile", larger
    step = (config, all_chips, slice_.devices, batch, tuple(dtypes), chosen, options.max_num_seqs)
    try:
        needs = compiled_needs(Request(*step, slice_.chip.platform, experts, page_shards))
    except RuntimeError as error:
        return plan, str(error), larger
    return make_plan(config, slice_, dtypes, state, needs, experts, page_shards), "", larger


def what_would_fit(
    config: Any,
    dtypes: Any,
    state: Any,
    sequences: int,
    plan_with: "Callable[..., Plan]",
    slice_: Any,
    experts: int,
    page_shards: int | None,
) -> Ways:
    """Ways to hold so many sequences: a quantization on this slice, and the first larger slice.

    Args:
        config: the model's configuration.
        dtypes: the dtypes that were asked for.
        state: the `State` of the batch, as shapes.
        sequences: how many must fit.
        plan_with: the plan of the slice with other dtypes.
        slice_: the slice, too small as it is.
        experts: groups of its chips over which experts are divided.
        page_shards: chips that divide a KV head.
    """
    from entropic_jax.analysis.plan import check_groups_of, first_that_fits
    from entropic_jax.models import ModelError

    results: Ways = []
    for quantization in NARROWER.get(dtypes.quantization, ()):
        with contextlib.suppress(ModelError):
            check_groups_of(config, quantization, slice_.devices // experts, experts)
            if plan_with(dtypes=dtypes._replace(quantization=quantization)).sequences >= sequences:
                results.append({"quantization": quantization})
                break
    name = first_that_fits(config, dtypes, state, sequences, slice_.chip.platform, page_shards)
    if name is not None and name != slice_.name:
        results.append({"topology": name})
    return results


def check_divides(option: str, value: int, name: str, number: int) -> None:
    """Raise ParameterError unless the value of an option divides a number.

    Args:
        option: the name of the option.
        value: the value of the option.
        name: what the number is.
        number: the number to divide.
    """
    if number % value:
        raise ParameterError(f"{option} must divide {name}, {number}; got {value}", option)


def of_all_ranks(plan: "Plan", ranks: int) -> dict[str, Any]:
    """Memory and rates of all ranks together, each an engine with the plan's chips.

    Args:
        plan: the plan of one engine.
        ranks: number of engines.
    """
    chips, cached = plan.devices * ranks, max(0, plan.pages) * plan.page_bytes
    return {
        "engines": ranks,
        "devices": chips,
        "weight_bytes": chips * plan.weight_bytes,
        "kv_cache_bytes": chips * cached,
        "sequences": ranks * plan.sequences,
        "tokens": ranks * max(0, plan.pages) * plan.page_size,
        "tokens_per_second": {ranks * rows: ranks * rate for rows, rate in plan.tokens_per_second.items()},
    }


def as_json(plan: "Plan", ranks: int, note: str, smallest: Ways) -> dict[str, Any]:
    """The plan as JSON has it.

    Args:
        plan: the plan to show, of one engine.
        ranks: number of engines.
        note: why the step was not compiled, if it was not.
        smallest: where fewer sequences fit than were asked for, what holds these, as options.
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
        "total": of_all_ranks(plan, ranks),
    }


def what_fits(plan: "Plan", requested: int, larger: Ways) -> str:
    """A line on how much fits.

    Args:
        plan: the plan to show.
        requested: sequences that were asked for.
        larger: where fewer fit, what holds as many, as options; empty for no slice that is known.
    """
    tokens = plan.pages * plan.page_size
    fit = f"{plan.sequences} sequences of {plan.context} positions fit ({tokens} tokens)"
    if plan.sequences >= requested:
        return fit
    words = {"quantization": "with --quantization {}", "topology": "on {}"}
    ways = [words[name].format(value) for way in larger for name, value in way.items()]
    instead = f"{requested} fit {' or '.join(ways) or 'on no slice whose chips divide its heads'}"
    if plan.sequences:
        return f"{fit}, not the {requested} of --max-num-seqs; {instead}"
    return f"does not fit: not one sequence of {plan.context} positions; {instead}"


def window_note(plan: "Plan") -> list[str]:
    """A line on layers with a window, where there are any."""
    if not plan.windowed_layers:
        return []
    return [f"{plan.windowed_layers} layers see a window only; pages before it are kept in all layers"]


def copies_note(plan: "Plan") -> list[str]:
    """A line on KV heads that several chips have, where there are any, with what copies of pages take."""
    sharers = plan.kv_head_copies * plan.page_shards
    if sharers == 1:
        return []
    if plan.kv_head_copies == 1:
        return [f"each KV head is divided over {sharers} chips, and so are its pages"]
    more = (1 - 1 / plan.kv_head_copies) * plan.pages * plan.page_bytes / MIB
    return [f"each KV head is on {sharers} chips: {more:.1f} MiB of the KV cache of a chip are copies"]


def axes_of(options: argparse.Namespace, plan: "Plan") -> str:
    """How the model is divided, in words."""
    ranks, experts = options.data_parallel_size, options.expert_parallel_size
    if experts == 1:
        axes = "tensor parallel"
    else:
        axes = f"{plan.devices // experts} along tensor, {experts} along expert"
    return axes if ranks == 1 else f"{ranks} engines with {plan.devices} each, {axes}"


def totals(plan: "Plan", ranks: int) -> list[str]:
    """Lines on all engines together, where there are several.

    Args:
        plan: the plan of one engine.
        ranks: number of engines.
    """
    if ranks == 1:
        return []
    total = of_all_ranks(plan, ranks)
    rates = total["tokens_per_second"].items()
    return [
        "",
        f"{ranks} engines, {total['devices']} chips together",
        f"  weights      {total['weight_bytes'] / MIB:10.1f} MiB   {ranks} copies",
        f"  KV cache     {total['kv_cache_bytes'] / MIB:10.1f} MiB   {total['tokens']} tokens",
        f"  {total['sequences']} sequences of {plan.context} positions",
        *(f"  {rows:4} rows: at most {rate:8.0f} tokens/s" for rows, rate in rates),
    ]


def describe(options: argparse.Namespace, plan: "Plan", note: str, smallest: Ways) -> list[str]:
    """The plan as lines of text.

    Args:
        options: the options of the command line.
        plan: the plan to show.
        note: why the step was not compiled, if it was not.
        smallest: where fewer sequences fit than were asked for, what holds these, as options.
    """
    from entropic_jax.analysis.plan import counted

    axes, ranks = axes_of(options, plan), options.data_parallel_size
    chips, of_each = ranks * plan.devices, "" if ranks == 1 else " of each engine"
    count_of_chips = "1 chip" if chips == 1 else f"{chips} chips"
    mebibytes = lambda number: f"{number / MIB:10.1f} MiB"
    weights = options.quantization or options.dtype
    fits = what_fits(plan, options.max_num_seqs, smallest)
    pages = f"{plan.pages} pages of {plan.page_size} positions"
    lines = [
        f"{options.model} in {weights} on {options.topology}: {count_of_chips}, {axes}",
        f"numbers from: {plan.source}" + (f" ({note})" if note else ""),
        "",
        "per chip",
        f"  weights      {mebibytes(plan.weight_bytes)}",
        f"  KV cache     {mebibytes(plan.pages * plan.page_bytes)}   {pages}",
        f"  other state  {mebibytes(plan.state_bytes)}",
        f"  temporaries  {mebibytes(plan.temporary_bytes)}",
        f"  memory       {mebibytes(plan.memory_bytes)}   90 % of it may be in use",
        fits if ranks == 1 else f"of each engine, {fits}",
        *window_note(plan),
        *copies_note(plan),
        "",
        f"a decode step{of_each} of {plan.rows} rows with {plan.context} positions each",
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
        *totals(plan, ranks),
    ]
    return lines
