"""Options of an engine, and the sizes that follow from them for a model and a device."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax

from entropic_jax import models
from entropic_jax.attention.page_selection import PagePolicy
from entropic_jax.methods.entropix_branches import SearchPlan
from entropic_jax.methods.method import Method
from entropic_jax.methods.presets import pruned_pages
from entropic_jax.parameter_tables.control_gains import DRAFTS, MACRO, SCALES
from entropic_jax.parameter_tables.speculation_names import drafter_of, has_weights
from entropic_jax.parameter_tables.table import Choice, Flag, Number, ParameterError, short
from entropic_jax.state import cache

from .. import memory
from ..options import control_options, lora, parallelism, prefill_options, speculation_options
from ..options.control_options import METHODS, SAMPLERS
from ..options.kv_cache import KvCacheDtype
from ..options.model import QUANTIZATIONS
from ..options.option_types import BYTES, DEFAULT_ROWS, POSITIVE, ROWS
from .launch_shapes import chunk_shapes, widths
from .program_shapes import Shapes

Warmup = Literal["none", "min", "full"]
Policy = Literal["entropic", "predicted", "fcfs"]
PRIORITY = "priority"  # vLLM's name of "fcfs" where requests state priorities, which all policies heed here
UTILIZATIONS = Number(float, 0, 1, above_low=True)
NUMBERS = {  # what numeric fields of `EngineOptions` accept
    "max_num_seqs": ROWS,
    "max_model_len": POSITIVE,
    "max_num_batched_tokens": POSITIVE,
    "block_size": POSITIVE,
    "gpu_memory_utilization": UTILIZATIONS,
    "kv_cache_bytes": BYTES,
    "num_pages": BYTES,  # refused by what fits into the memory
    "max_queue": POSITIVE,
    "max_steps": Number(int, 1, 4096),
    "branches": control_options.BRANCHES,
    "compile_workers": POSITIVE,
    **lora.NUMBERS,
    **parallelism.NUMBERS,
}
# Fields that may not be None.
REQUIRED = ("max_num_seqs", "max_queue", "max_steps", "max_lora_rank", *parallelism.SIZES)
EXACT_CHUNK = 64  # tokens of a prefill chunk with `batch_invariant`: one shape, so keep it small


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes and policies of an engine. None stands for what suits the model and the device.

    The scale macro is a property of the engine: `scheduling_policy` "entropic" ranks all requests by their
    priority π, "predicted" by predicted work, "fcfs" by arrival; the `priority` that they state comes first.

    Drafts, too, are a property of the engine. If `speculate` names a drafter, tokens are drafted for every
    request that reads all pages; if it follows from `preset`, for those with meso or full. A launch drafts
    for all of its sequences or none. Only "entropic" accepts macro; meso needs a drafter. `LLM` and commands
    state `speculation_options.default_preset()` where none is stated: meso, or off where nothing may draft.

    Raises:
        ParameterError: A ValueError, for a field with a value that is not accepted.
    """

    dtype: str | None = None  # of the weights, and of the KV cache with `kv_cache_dtype` auto; None is "auto"
    quantization: str | None = None  # of the weights, as `--quantization`; None keeps their dtype
    kv_cache_dtype: KvCacheDtype = "auto"
    max_num_seqs: int = DEFAULT_ROWS  # rows: sequences that run at once
    max_model_len: int | None = None  # positions of a sequence, prompt and continuation
    max_num_batched_tokens: int | None = None  # token budget: prompt tokens of one prefill chunk
    enable_chunked_prefill: bool = True  # False: a prompt is one chunk, as far as the budget allows
    block_size: int | None = None  # positions of a page
    gpu_memory_utilization: float | None = None  # share of the device's memory in use, KV cache included
    kv_cache_bytes: int | None = None  # of the page pool
    num_pages: int | None = None  # of the page pool, instead of bytes
    enable_prefix_caching: bool = True
    # None: "entropic" if the preset has the scale macro, else "fcfs".
    scheduling_policy: Policy | Literal["priority"] | None = None
    max_queue: int = 1024  # requests that may wait
    max_steps: int = 16  # of a launch
    pruning: bool | None = None  # may a request leave pages unread; None: unless `preset` or a model drafts
    law: str = "normalised"  # temperature law of requests with the preset micro, full or full-lossy
    batch_invariant: bool = False  # one shape per program: a request's bits do not depend on its neighbours
    parse_special: bool = True  # whether special tokens in the text of a user are more than plain text
    warmup: Warmup = "min"
    preset: str = "off"  # of most requests: `warmup` "min" compiles for it, and a sampler must be named here
    clarification: str = ""  # of entropix
    branches: int | None = None  # of entropix, at most; 1 decides token by token
    method: str = "dense"  # sparse prefill or KV compression, for all requests
    budgets: tuple[tuple[str, int], ...] = ()  # of the method
    prefill_options: tuple[tuple[str, Any], ...] = ()  # of the method, by the names of `PREFILL_OPTIONS`
    speculate: str | None = None  # the drafter, or the directory of a draft model; None: that of the preset
    num_speculative_tokens: int | None = None  # k, tokens drafted for a sequence in a pass, at most
    enable_lora: bool = False  # whether requests may name LoRA adapters
    lora_modules: tuple[lora.LoRAModule, ...] = ()  # adapters that are loaded at the start
    max_loras: int | None = None  # adapters that are loaded at once; None: the `lora_modules`, at least one
    max_lora_rank: int = 16  # largest rank of an adapter
    compile_workers: int | None = None
    tensor_parallel_size: int = 1  # devices over which the model is divided
    data_parallel_size: int = 1  # engines, each with a copy of the model and these rows, pages and queue
    expert_parallel_size: int = 1  # groups of devices over which experts are divided
    decode_context_parallel_size: int | None = None  # of devices that share a KV head; None: all of them
    mesh: Any = None  # a `jax.sharding.Mesh` from `entropic_jax.mesh.make_mesh`, instead of the sizes

    def __post_init__(self) -> None:
        """Check every field."""
        for name, accepts in NUMBERS.items():
            if (value := getattr(self, name)) is not None or name in REQUIRED:
                object.__setattr__(self, name, accepts.check(name, value))
        flags = ("enable_prefix_caching", "enable_chunked_prefill", "batch_invariant", "parse_special")
        for name in (*flags, "pruning"):
            if name != "pruning" or self.pruning is not None:
                Flag().check(name, getattr(self, name))
        Choice(METHODS).check("method", self.method)
        speculation_options.check(
            self.speculate,
            self.preset,
            self.method,
            num_speculative_tokens=self.num_speculative_tokens,
            batch_invariant=self.batch_invariant,
            pruning=self.pruning,
            divided=self.mesh is not None or parallelism.divided(self),
        )
        parallelism.check(self)
        lora.check(self)
        control_options.check_budgets(self.budgets, self.method)
        prefill_options.check(self.prefill_options, self.method)
        control_options.check_clarification(self.clarification, self.preset)
        choices = {
            "warmup": get_args(Warmup),
            "scheduling_policy": (None, *get_args(Policy), PRIORITY),
            "kv_cache_dtype": get_args(KvCacheDtype),
            "quantization": (None, *QUANTIZATIONS),
        }
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                names = ", ".join(map(str, accepted))
                raise ParameterError(f"{name} must be one of {names}; got {short(getattr(self, name))}", name)

    @property
    def policy(self) -> Policy:
        """The scheduling policy in force: by default "entropic" if the preset has the scale macro."""
        if self.scheduling_policy == PRIORITY:
            return "fcfs"
        if self.scheduling_policy is not None:
            return self.scheduling_policy
        return "entropic" if MACRO in SCALES.get(self.preset, ()) else "fcfs"

    @property
    def lora_slots(self) -> int:
        """Adapters that are loaded at once, at most."""
        return self.max_loras or max(1, len(self.lora_modules))

    @property
    def drafter(self) -> str:
        """The name of the drafter in force."""
        return drafter_of(self.preset, self.speculate)

    @property
    def prunes(self) -> bool:
        """Whether a request may leave pages unread, as far as no method forbids it."""
        drafts = DRAFTS in SCALES.get(self.preset, ()) or has_weights(self.speculate)
        return not drafts if self.pruning is None else self.pruning


class Sizes(NamedTuple):
    """Sizes that an engine allocates and compiles for."""

    rows: int  # sequences that run at once; each has `shapes.branches` rows on the device
    context: int  # positions of a sequence
    page_size: int
    pages: int
    chunk: int  # tokens of one prompt in a prefill chunk, at most
    shapes: Shapes

    def spare(self, branches: int, length: int, limit: int) -> int:
        """Pages to reserve beyond those of a sequence's first positions.

        0 for a sequence without branches, which reserves pages as it grows. One with branches reserves all
        that it may come to need at its admission: preempted, it could not be recomputed, as tokens that were
        not delivered yet are known on the device alone.

        Args:
            branches: the branches that the sequence may have; 0 if it does not branch.
            length: positions for which pages are reserved anyway.
            limit: positions of the sequence at most.
        """
        plan = self.shapes.plan
        if not branches or plan is None:
            return 0
        rest = -(-limit // self.page_size) - -(-length // self.page_size)
        return rest + (branches - 1) * branch_pages(plan, self.page_size)

    @property
    def longest(self) -> int:
        """Positions of a sequence that has the whole pool."""
        return (self.pages - self.spare(self.shapes.branches, 0, 0)) * self.page_size


def branch_pages(plan: SearchPlan, page_size: int) -> int:
    """Pages that a branch may come to hold for itself, wherever in a page it begins.

    >>> branch_pages(SearchPlan(length=8), 4), branch_pages(SearchPlan(length=8), 64)
    (3, 2)
    """
    return -(-plan.length // page_size) + 1


def plan_of(options: EngineOptions) -> SearchPlan | None:
    """How sequences branch, None where none does. Raises ValueError where they cannot."""
    branches = options.branches
    if options.preset != "entropix":
        if branches not in (None, 1):
            message = f"branches must be 1 with the preset {options.preset}; got {branches}"
            raise ParameterError(message, "branches")
        return None
    plan = SearchPlan() if branches is None else SearchPlan(branches=branches)
    if plan.branches == 1:
        return None
    if options.method != "dense":
        raise ParameterError(f"method must be dense where sequences branch; got {options.method!r}", "method")
    return plan


def sizes(model: models.Model, options: EngineOptions, itemsize: float, sharers: int = 1) -> Sizes:
    """The sizes for a model.

    Args:
        model: the model to serve.
        options: what the user sets; the rest follows from the model and the default device.
        itemsize: bytes of a number in the KV cache; less than 1 where two share a byte.
        sharers: engines that share the memory of the machine, if the device is a CPU.

    Raises:
        ValueError: Where the options do not fit together, or no page fits into the memory.
    """
    on_cpu, plan, method = jax.default_backend() == "cpu", plan_of(options), method_of(options, model)
    longest, page_size = model.config.longest_context, _page_size(options, method)
    if options.max_model_len is not None and options.max_model_len > longest:
        raise ParameterError(
            f"max_model_len must be at most {longest}, the model's longest sequence; "
            f"got {short(options.max_model_len)}",
            "max_model_len",
        )
    context: int = options.max_model_len or longest
    usual = (512 if on_cpu else 2048) if options.enable_chunked_prefill else context
    budget: int = options.max_num_batched_tokens or usual
    if budget < page_size and options.max_num_batched_tokens is not None:
        raise ParameterError(
            f"max_num_batched_tokens must be at least {page_size}, the positions of a page; got {budget}",
            "max_num_batched_tokens",
        )
    widest = min(budget, EXACT_CHUNK) if options.batch_invariant else budget
    if method is not None and method.prefill is not None:
        widest = method.segment
        budget = max(budget, widest)
    chunk = max(page_size, min(widest, 1 << (context - 1).bit_length()) // page_size * page_size)
    pages = _num_pages(model, options, itemsize, context, page_size, plan, sharers)
    shapes = _shapes(options, chunk, budget, method, plan)
    allocated = Sizes(options.max_num_seqs, context, page_size, pages, chunk, shapes)
    return allocated._replace(context=min(context, allocated.longest))


def _page_size(options: EngineOptions, method: Method | None) -> int:
    required = pruned_pages().page_size if options.prunes else None
    if method is not None:
        required = required or method.page_size
    return options.block_size or required or cache.default_page_size()


def _num_pages(
    model: models.Model,
    options: EngineOptions,
    itemsize: float,
    context: int,
    page_size: int,
    plan: SearchPlan | None,
    sharers: int,
) -> int:
    """Pages of the pool: as many as all rows can use, or as fit into the memory."""
    spare = 0 if plan is None else (plan.branches - 1) * branch_pages(plan, page_size)
    of_page, pages = memory.page_bytes(model.decoder.shape, page_size, itemsize), options.num_pages
    devices = memory.pooled_devices(model.mesh)
    if pages is None:
        room = options.kv_cache_bytes or devices * memory.cache_room(options.gpu_memory_utilization, sharers)
        pages = min(options.max_num_seqs * (-(-context // page_size) + spare), room // of_page)
        if pages < 1:
            raise _no_page(options, page_size, of_page, room)
    if pages <= spare:
        raise ParameterError(f"num_pages must be at least {spare + 1} with {plan}; got {pages}", "num_pages")
    _check_room(options, pages, of_page, devices, sharers)
    return pages


def _no_page(options: EngineOptions, page_size: int, of_page: int, room: int) -> ParameterError:
    """The error where the KV cache has no room for one page, which names the option that was stated."""
    if options.kv_cache_bytes is not None:
        message = f"kv_cache_bytes must be at least {of_page}, for one page; got {options.kv_cache_bytes}"
        return ParameterError(message, "kv_cache_bytes")
    if options.block_size is not None:
        most = room * page_size // of_page
        message = f"block_size must be at most {most}, for a page in {room} bytes; got {page_size}"
        return ParameterError(message, "block_size")
    share = options.gpu_memory_utilization or "the default"
    message = f"gpu_memory_utilization must leave {of_page} bytes, for one page; got {share}"
    return ParameterError(message, "gpu_memory_utilization")


def _check_room(options: EngineOptions, pages: int, of_page: int, devices: int, sharers: int) -> None:
    """Raise ParameterError where pages of `of_page` bytes each are more than the memory has room for."""
    available = memory.available_memory()
    if available is None or pages * of_page * sharers <= devices * available:
        return
    available = devices * available // sharers
    why = f"with {memory.gibibytes(available)} of memory available"
    why += f" to each of {sharers} engines" if sharers > 1 else ""
    if options.num_pages is not None:
        raise ParameterError(
            f"num_pages must be at most {available // of_page} {why}, at {of_page} bytes a page; "
            f"got {options.num_pages}",
            "num_pages",
        )
    raise ParameterError(
        f"kv_cache_bytes must be at most {available} {why}; got {options.kv_cache_bytes}", "kv_cache_bytes"
    )


def _shapes(
    options: EngineOptions, chunk: int, budget: int, method: Method | None, plan: SearchPlan | None
) -> Shapes:
    page_policies = page_policies_of(options, method)
    samplers = (False, True) if options.preset in SAMPLERS else (False,)
    if options.batch_invariant:
        return Shapes(
            widths=(options.max_num_seqs,),
            chunks=((min(4, max(1, budget // chunk)), chunk),),
            capacity=options.max_steps,
            page_policies=page_policies[-1:],
            samplers=samplers[-1:],
            method=method,
            plan=plan,
            exact=True,
        )
    return Shapes(
        widths=widths(options.max_num_seqs),
        chunks=chunk_shapes(chunk, budget),
        capacity=options.max_steps,
        page_policies=page_policies,
        samplers=samplers,
        method=method,
        plan=plan,
        speculate=options.drafter,
        num_speculative_tokens=options.num_speculative_tokens,
    )


def method_of(options: EngineOptions, model: models.Model) -> Method | None:
    """The method of the options. Raises ValueError where it is unknown, or not for this model."""
    if (policy := prefill_options.method_preset(options).page_policy) is None:
        return None
    method = policy if isinstance(policy, Method) else Method(decode_policy=policy)
    method.check_model(model.decoder.shape)
    window = min(filter(None, model.decoder.windows), default=None)
    if method.compression is not None and window is not None:
        limit = f"a KV cache with a sliding_window (of {window})"
        raise ParameterError(f"method must not compress {limit}; got {options.method!r}", "method")
    return method


def may_prune(options: EngineOptions, method: Method | None) -> bool:
    """Whether a request may leave pages unread.

    It may not with a method that selects the pages of decode steps itself, or whose heads keep different
    positions.
    """
    if method is None:
        return options.prunes
    return options.prunes and method.decode_policy is None and not method.ragged


def page_policies_of(options: EngineOptions, method: Method | None) -> tuple[PagePolicy | None, ...]:
    """Page policies of decode programs: the first reads all pages, the last may leave some unread."""
    # Page lists are made at every step, as the presets say: what lists kept for several steps cost in quality
    # is measured by the ablation only.
    selection = dataclasses.replace(pruned_pages(), refresh=1)
    pruned: tuple[PagePolicy | None, ...] = (None, selection) if may_prune(options, method) else (None,)
    if method is None:
        return pruned
    if method.decode_policy is not None:
        return (method,)
    return tuple(dataclasses.replace(method, decode_policy=policy) for policy in pruned)
