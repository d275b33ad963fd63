"""The methods by name: for the command line, and for comparing them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ..attention.page_selection import Selection
from ..control.controller import chain
from ..control.presets import Preset
from . import quest
from .adakv import AdaKV
from .criti_prefill import CritiPrefill
from .entropy_prefill import AS_RELEASED, EntropyPrefill
from .h2o import H2O
from .latent_compression import LatentCompression
from .method import Compression, Method, Prefill
from .oracle import Oracle
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM
from .uniform_budget import UniformBudget


class Entry(NamedTuple):
    """A named method: what it says in a list, and its parts, made for a budget of tokens or the usual one."""

    summary: str
    prefill: Callable[..., Prefill] | None = None
    compression: Callable[..., Compression] | None = None
    steps: Callable[..., Selection] | None = None


LEAST = 64  # tokens: what a window, its sinks and a few pages need
METHODS: dict[str, Entry] = {
    "dense": Entry("everything is read and kept"),
    "entropyinfer": Entry(
        "sparse prefill by entropy, then latent KV compression", EntropyPrefill, LatentCompression
    ),
    "entropy-prefill": Entry("the sparse prefill alone", EntropyPrefill),
    "entropy-matched": Entry(
        "the same, with budgets that are `base` on average", partial(EntropyPrefill, matched=True)
    ),
    "entropy-as-released": Entry("the same as in its release", partial(replace, AS_RELEASED)),
    "latent-compression": Entry("the compression alone", None, LatentCompression),
    "criti-prefill": Entry("sparse prefill by criticality", CritiPrefill),
    "uniform-prefill": Entry("sparse prefill, the same budget whatever the entropy", UniformBudget),
    "oracle-prefill": Entry("sparse prefill by the true attention", Oracle),
    "snapkv": Entry("keep what the end of the prompt attends to", None, SnapKV),
    "adakv": Entry("the same, with a layer's budget shared unevenly by its heads", None, AdaKV),
    "h2o": Entry("keep what has been attended to most, and the newest", None, H2O),
    "streaming-llm": Entry("keep the first tokens and the newest", None, StreamingLLM),
    "quest": Entry("read the pages that could matter most to the query", None, None, quest.page_policy),
}


def method(name: str, preset: Preset, *, base: int | None = None, budget: int | None = None) -> Preset:
    """A preset of control with a published method added to it.

    `base` is the budget of a prefill in tokens per KV head and segment, `budget` that of a compression or of
    a step's reading in tokens per KV head; both are the published ones by default. Raises ValueError for a
    name that is not known, a budget below 64, and a method that chooses what steps read beside a preset that
    does, too.

    >>> from ..control.presets import preset
    >>> method("snapkv", preset("micro")).page_policy.compression.budget
    1024
    """
    if name not in METHODS:
        raise ValueError(f"name is {name!r}; accepted are {', '.join(METHODS)}")
    for argument, value in (("base", base), ("budget", budget)):
        if value is not None and value < LEAST:
            raise ValueError(f"{argument} is {value}; accepted are integers of at least {LEAST}")
    entry = METHODS[name]
    if name == "dense":
        return preset
    given: dict[str, Any] = {} if budget is None else {"budget": budget}
    steps, controller = preset.page_policy, preset.controller
    if entry.steps is not None:
        if steps is not None:
            raise ValueError(
                f"name is {name!r}, which says what a step reads, as the preset does; accepted are presets "
                "that do not: off, micro, macro"
            )
        steps = entry.steps(**given)
        controller = chain(*controller.controllers, quest.Always(budget or 1024))
    prefill = None if entry.prefill is None else entry.prefill(**({} if base is None else {"base": base}))
    compression = None if entry.compression is None else entry.compression(**given)
    return preset._replace(controller=controller, page_policy=Method(prefill, compression, steps))
