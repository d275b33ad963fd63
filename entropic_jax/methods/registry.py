"""Registry of methods: sparse prefill, cache compression and page selection by name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ..attention.page_selection import Selection
from ..control.controller import chain
from ..parameter_tables.prefill_options import check_prefill_options
from ..parameter_tables.table import LARGEST_INT, ParameterError
from . import quest
from .adakv import AdaKV
from .budgeted_prefill import BudgetedPrefill
from .criti_prefill import CritiPrefill
from .entropy_prefill import AS_RELEASED, EntropyPrefill
from .h2o import H2O
from .head_needs import HeadNeeds, load_head_needs
from .latent_compression import LatentCompression
from .method import Method
from .oracle import Oracle
from .policies import CompressionPolicy, PrefillPolicy
from .presets import Preset
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM
from .uniform_budget import UniformBudget


class Entry(NamedTuple):
    """A named method: a one-line summary, and constructors of its parts; None for parts that it lacks."""

    summary: str
    prefill: Callable[..., PrefillPolicy] | None = None
    compression: Callable[..., CompressionPolicy] | None = None
    decode_policy: Callable[..., Selection] | None = None


MIN_BUDGET = 64  # tokens, enough for a window, its sinks and a few pages
METHODS: dict[str, Entry] = {
    "dense": Entry("reads and keeps everything"),
    "entropyinfer": Entry(
        "sparse prefill by entropy, then latent KV compression", EntropyPrefill, LatentCompression
    ),
    "entropy-prefill": Entry("EntropyInfer's sparse prefill alone", EntropyPrefill),
    "entropy-matched": Entry(
        "the same, with budgets that are `base` on average", partial(EntropyPrefill, matched=True)
    ),
    "entropy-as-released": Entry("the same as in its release", partial(replace, AS_RELEASED)),
    "latent-compression": Entry("EntropyInfer's KV compression alone", None, LatentCompression),
    "criti-prefill": Entry("sparse prefill by criticality", CritiPrefill),
    "uniform-prefill": Entry("sparse prefill with the same budget whatever the entropy", UniformBudget),
    "budgeted-prefill": Entry(
        "sparse prefill with one budget shared over layers and KV heads by a table of needs", BudgetedPrefill
    ),
    "oracle-prefill": Entry("sparse prefill by the true attention", Oracle),
    "snapkv": Entry("keeps the entries that the end of the prompt attends to", None, SnapKV),
    "adakv": Entry("SnapKV with a layer's budget shared unevenly by its heads", None, AdaKV),
    "h2o": Entry("keeps the entries attended to most, and the newest", None, H2O),
    "streaming-llm": Entry("keeps the first tokens and the newest", None, StreamingLLM),
    "quest": Entry(
        "each step reads the pages that could matter most to its query", None, None, quest.page_policy
    ),
}


def budgets_of(name: str) -> tuple[str, ...]:
    """The budgets that a method has, among the arguments `base` and `budget` of `add_method`.

    >>> budgets_of("dense"), budgets_of("snapkv")
    ((), ('budget',))
    """
    entry = METHODS[name]
    has = {"base": entry.prefill, "budget": entry.decode_policy or entry.compression}
    return tuple(argument for argument, part in has.items() if part is not None)


def add_method(
    name: str,
    preset: Preset,
    *,
    base: int | None = None,
    budget: int | None = None,
    prefill_options: Mapping[str, Any] | None = None,
) -> Preset:
    """Adds a published method to a preset of control.

    Args:
        name: one of `METHODS`.
        preset: the preset to add it to.
        base: budget of a sparse prefill, in tokens per KV head and segment; None is the published one.
        budget: budget of a compression or of a decode step, in tokens per KV head; None is the published one.
        prefill_options: further options of a sparse prefill, by the names of `PREFILL_OPTIONS`.

    Raises:
        ValueError: for an unknown name, a budget below 64 or that the method does not have, an option that it
            does not have or accept, an unusable table, or a method that selects the pages of decode steps
            with a preset that does so too.

    >>> from .presets import preset
    >>> add_method("snapkv", preset("micro")).page_policy.compression.budget
    1024
    """
    if name not in METHODS:
        raise ValueError(f"name must be one of {', '.join(METHODS)}; got {name!r}")
    for argument, value in (("base", base), ("budget", budget)):
        if value is not None and not MIN_BUDGET <= value <= LARGEST_INT:
            accepted = f"at least {MIN_BUDGET}" if value < MIN_BUDGET else f"at most {LARGEST_INT}"
            raise ParameterError(f"{argument} must be an integer of {accepted}; got {value}", argument)
        if value is not None and argument not in budgets_of(name):
            message = f"{argument} must not be set with the method {name}, which has none; got {value}"
            raise ParameterError(message, argument)
    options = check_prefill_options(prefill_options or {}, name)
    entry = METHODS[name]
    if name == "dense":
        return preset
    decode_options: dict[str, Any] = {} if budget is None else {"budget": budget}
    if base is not None:
        options["base"] = base
    if (table := options.pop("table", None)) is not None:
        options["needs"] = _needs(table)
    decode_policy, controller = preset.page_policy, preset.controller
    if entry.decode_policy is not None:
        if decode_policy is not None:
            raise ValueError(
                f"preset must be off, micro or macro with {name!r}, which selects the pages of steps; "
                f"got one with {decode_policy}"
            )
        decode_policy = entry.decode_policy(**decode_options)
        controller = chain(*controller.controllers, quest.PruneBeyondBudget(budget or 1024))
    prefill = None if entry.prefill is None else entry.prefill(**options)
    compression = None if entry.compression is None else entry.compression(**decode_options)
    return preset._replace(controller=controller, page_policy=Method(prefill, compression, decode_policy))


def _needs(file: str) -> HeadNeeds:
    """The table of a file. Raises ParameterError, which names the option."""
    try:
        return load_head_needs(file)
    except (OSError, ValueError) as error:
        raise ParameterError(f"table must be a table of head needs: {error}", "table") from None
