"""How an engine is set up, and the sizes that follow for a model and a device."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax

from entropic_jax import cache, models
from entropic_jax.attention.page_selection import PagePolicy
from entropic_jax.control.presets import FINE_PAGES, preset
from entropic_jax.methods import registry
from entropic_jax.methods.entropix_branches import Plan
from entropic_jax.methods.method import Method

from ..control_options import SAMPLERS
from ..kv_cache import KvCacheDtype
from .programs import Shapes

# The lists of a step are for that step: kept for several, they would be made anew at steps that the sequence
# shares with its neighbours, and depend on them.
SELECTION = dataclasses.replace(FINE_PAGES, refresh=1)
Warmup = Literal["none", "min", "full"]
Policy = Literal["entropic", "fcfs"]
GIB = 2**30
CPU_CACHE = GIB  # bytes of keys and values on a CPU, at most, unless told
EXACT_CHUNK = 64  # positions of a piece of a prompt where all pieces have one shape, short prompts too
SHARE = 0.9  # of an accelerator's memory, less what is in use when the cache is made


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes and policies of an engine; None is what suits the model and the device."""

    dtype: str | None = None  # of weights, and of keys and values with `kv_cache_dtype` auto
    kv_cache_dtype: KvCacheDtype = "auto"
    max_num_seqs: int = 64  # rows: sequences that run at once
    max_model_len: int | None = None  # positions of a sequence, prompt and continuation
    max_num_batched_tokens: int | None = None  # positions of prompts read between two launches
    block_size: int | None = None  # positions of a page
    kv_cache_bytes: int | None = None  # of the pool of pages
    num_pages: int | None = None  # of the pool, in place of bytes
    enable_prefix_caching: bool = True
    scheduling_policy: Policy = "entropic"
    max_queue: int = 1024  # jobs that may wait
    max_steps: int = 16  # of a launch
    pruning: bool = True  # whether a job may leave pages unread: meso, full
    law: str = "normalised"  # of temperature, for jobs that ask for micro or full
    batch_invariant: bool = False  # one shape of each program: a job's bits do not depend on its neighbours
    warmup: Warmup = "min"
    preset: str = "off"  # of most jobs: `min` compiles what it needs; a sampler is there if it is one
    clarification: str = ""  # of entropix
    branches: int | None = None  # of entropix, at most; 1 decides token by token
    method: str = "dense"  # of reading less of prompts, or keeping less of them, for all jobs
    budgets: tuple[tuple[str, int], ...] = ()  # of the method
    compile_workers: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        optional = ("max_model_len", "max_num_batched_tokens", "block_size", "kv_cache_bytes", "num_pages")
        for name in (*optional, "max_num_seqs", "max_queue", "max_steps", "branches", "compile_workers"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; accepted are integers of at least 1")
        choices = {"warmup": Warmup, "scheduling_policy": Policy, "kv_cache_dtype": KvCacheDtype}
        for name, accepted in ((name, get_args(choice)) for name, choice in choices.items()):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted are {', '.join(accepted)}")


class Sizes(NamedTuple):
    """What an engine allocates and compiles."""

    rows: int  # of sequences; branches have more, of their own
    context: int  # positions of a sequence
    page_size: int
    pages: int
    chunk: int  # positions of one prompt read at once, at most
    shapes: Shapes

    def spare(self, branches: int, length: int, limit: int) -> int:
        """Pages that a sequence may come to need beyond those of its first `length` positions, of `limit`.

        0 for one without branches, which asks for them one by one. One with branches has all of them from
        its beginning: what it has told nobody yet cannot be made again from what it has told.
        """
        plan = self.shapes.plan
        if not branches or plan is None:
            return 0
        rest = -(-limit // self.page_size) - -(-length // self.page_size)
        return rest + (branches - 1) * branch_pages(plan, self.page_size)

    @property
    def longest(self) -> int:
        """Most positions of a sequence that has the whole pool."""
        return (self.pages - self.spare(self.shapes.branches, 0, 0)) * self.page_size


def branch_pages(plan: Plan, page_size: int) -> int:
    """Pages that a branch may come to hold for itself, wherever in a page it begins.

    >>> branch_pages(Plan(length=8), 4), branch_pages(Plan(length=8), 64)
    (3, 2)
    """
    return -(-plan.length // page_size) + 1


def plan_of(options: EngineOptions) -> Plan | None:
    """How sequences search, None where none does. ValueError where they cannot."""
    branches = options.branches
    if options.preset != "entropix":
        if branches not in (None, 1):
            raise ValueError(f"branches is {branches}; accepted with the preset {options.preset} is 1")
        return None
    plan = Plan() if branches is None else Plan(branches=branches)
    if plan.branches == 1:
        return None
    if options.method != "dense":
        raise ValueError(f"method is {options.method!r}; accepted with branches is dense")
    return plan


def sizes(model: models.Model, options: EngineOptions, itemsize: float) -> Sizes:
    """The sizes for a model whose keys and values take `itemsize` bytes a number."""
    shape, on_cpu = model.decoder.shape, jax.default_backend() == "cpu"
    longest = model.config.max_position_embeddings
    context: int = min(options.max_model_len or longest, longest)
    method = method_of(options, model)
    asked = FINE_PAGES.page_size if options.pruning else None
    if method is not None:
        asked = asked or method.page_size
    page_size: int = options.block_size or asked or cache.default_page_size()
    context = max(page_size, context // page_size * page_size)
    budget: int = options.max_num_batched_tokens or (512 if on_cpu else 2048)
    widest = min(budget, EXACT_CHUNK) if options.batch_invariant else budget
    if method is not None and method.prefill is not None:
        widest = method.segment
        budget = max(budget, widest)
    chunk = max(page_size, min(widest, 1 << (context - 1).bit_length()) // page_size * page_size)
    pages, plan = options.num_pages, plan_of(options)
    spare = 0 if plan is None else (plan.branches - 1) * branch_pages(plan, page_size)
    if pages is None:
        position = int(2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize)
        room = options.kv_cache_bytes or (CPU_CACHE if on_cpu else accelerator_room())
        pages = min(options.max_num_seqs * (context // page_size + spare), room // (position * page_size))
        if pages < 1:
            raise ValueError(
                f"kv_cache_bytes is {room}; accepted are at least {position * page_size}, for one page"
            )
    if pages <= spare:
        raise ValueError(f"the pool has {pages} pages; accepted with {plan} are at least {spare + 1}")
    page_policies = page_policies_of(options, method)
    samplers = (False, True) if options.preset in SAMPLERS else (False,)
    if options.batch_invariant:
        shapes = Shapes(
            (options.max_num_seqs,),
            ((min(4, max(1, budget // chunk)), chunk),),
            options.max_steps,
            page_policies[-1:],
            samplers[-1:],
            method,
            plan,
            exact=True,
        )
    else:
        shapes = Shapes(
            widths(options.max_num_seqs),
            chunk_shapes(chunk, budget),
            options.max_steps,
            page_policies,
            samplers,
            method,
            plan,
        )
    return Sizes(options.max_num_seqs, context, page_size, pages, chunk, shapes)


def method_of(options: EngineOptions, model: models.Model) -> Method | None:
    """The method of the options. ValueError where it is not known, or not for this model."""
    found = registry.add_method(options.method, preset("off"), **dict(options.budgets)).page_policy
    if found is None:
        return None
    made = found if isinstance(found, Method) else Method(decode_policy=found)
    window = model.config.sliding_window
    if made.compression is not None and window is not None:
        raise ValueError(
            f"method is {options.method!r}; accepted for a model with a sliding_window (of {window}) are "
            "those that compress nothing"
        )
    return made


def may_prune(options: EngineOptions, method: Method | None) -> bool:
    """Whether a job may leave pages unread: not beside a method that says what steps read, or heads hold."""
    taken = method is not None and (method.decode_policy is not None or method.ragged)
    return options.pruning and not taken


def page_policies_of(options: EngineOptions, method: Method | None) -> tuple[PagePolicy | None, ...]:
    """What a step reads: for rows that read all, and last for those that may leave pages unread."""
    pruned: tuple[PagePolicy | None, ...] = (None, SELECTION) if may_prune(options, method) else (None,)
    if method is None:
        return pruned
    if method.decode_policy is not None:
        return (method,)
    return tuple(dataclasses.replace(method, decode_policy=policy) for policy in pruned)


def widths(rows: int) -> tuple[int, ...]:
    """Rows of a step that programs are compiled for: a step computes the fewest that suffice.

    >>> widths(8), widths(64)
    ((1, 4, 8), (1, 4, 16, 32, 64))
    """
    return tuple(sorted({*steps_up(1, rows), *((rows // 2,) if rows >= 32 else ())}))


def steps_up(low: int, high: int, factor: int = 4) -> tuple[int, ...]:
    """Low, `factor` times that, and so on, up to and with `high`.

    >>> steps_up(1, 48)
    (1, 4, 16, 48)
    """
    found = []
    while low < high:
        found.append(low)
        low *= factor
    return (*found, high)


def chunk_shapes(chunk: int, budget: int) -> tuple[tuple[int, int], ...]:
    """(prompts, positions): lengths from 16 to `chunk`, for one prompt and for as many as the budget allows.

    >>> chunk_shapes(128, 512)
    ((1, 16), (1, 32), (1, 64), (1, 128), (4, 128), (8, 64), (16, 16), (16, 32))
    """
    lengths = steps_up(min(16, chunk), chunk, 2)
    many = {(max(1, min(16, budget // length)), length) for length in lengths}
    return tuple(sorted({(1, length) for length in lengths} | many))


def accelerator_room() -> int:
    """Bytes that an accelerator has left for keys and values."""
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit", 8 * GIB)
    return max(0, int(SHARE * limit) - stats.get("bytes_in_use", 0))


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
