"""Kernel report: which back end serves each operation of an engine, and why its kernel declined."""

import logging
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entropic_jax import models
from entropic_jax.mesh.devices import default_device
from entropic_jax.methods.presets import pruned_pages
from entropic_jax.models.layer_stack import on_device
from entropic_jax.pallas import grouped_matmul, paged_attention, topk_entropy
from entropic_jax.pallas.dispatch import REFERENCE, Operation
from entropic_jax.pallas.paged_attention import PageSummary, quantised
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.state.cache import ModelShape, default_page_size

from ..options.draft_model import target_of
from ..options.kv_cache import pages_of
from .options import EngineOptions, Sizes, may_prune

log = logging.getLogger(__name__)
PREFILL_PARTIAL = paged_attention.PREFILL_PARTIAL
ATTENTION = (paged_attention.DECODE, paged_attention.PREFILL, paged_attention.VERIFY, PREFILL_PARTIAL)
CONSEQUENCE = "plain JAX, one row after the other and with a copy of every page that is read"


class ServedOperation(NamedTuple):
    """The back end of an operation."""

    operation: str
    backend: str | None  # None: every back end declines
    has_kernel: bool  # whether there is one for this kind of device
    reason: str | None  # why that kernel declines; None where it serves, or there is none

    @property
    def text(self) -> str:
        """The report as text for people.

        >>> ServedOperation("write", "xla", False, None).text
        'xla (there is no kernel for this device)'
        """
        remark = self.reason if self.has_kernel else "there is no kernel for this device"
        return f"{self.backend}" if remark is None else f"{self.backend} ({remark})"


class AttentionShape(NamedTuple):
    """Shapes with which the kernels of an engine are called."""

    rows: int
    chunk: int  # tokens of a prompt
    context: int  # positions of a row
    pages: int  # of the pool
    page_size: int
    dtype: Any  # of queries
    cache_dtype: Any
    listed: bool  # whether a step may leave pages unread
    verified: int  # tokens that are verified together; 0: none
    experts: tuple[Any, ...] = ()  # operands of the products of a layer's experts; see `expert_operands`


def served_operations(shape: ModelShape, sizes: AttentionShape) -> list[ServedOperation]:
    """The back ends of the operations that an engine's programs call. Nothing is compiled or allocated.

    Args:
        shape: the sizes of the model.
        sizes: the shapes of its programs.
    """
    like: Any = jax.ShapeDtypeStruct
    integers = lambda *dims: like(dims, jnp.int32)
    rows, heads, width = sizes.rows, shape.kv_heads, shape.head_dim
    group, row_pages = shape.heads // heads, -(-sizes.context // sizes.page_size)
    divided = shape.page_shards > 1  # a device then has some of the pages of a list
    tile = (-(-sizes.pages // shape.page_shards) + 1, heads, sizes.page_size, width)
    pool = jax.eval_shape(lambda: quantised.zeros(tile, sizes.cache_dtype))
    summary, norm = like((tile[0], heads, width), jnp.float32), like(tile[:2], jnp.float32)
    table, row = integers(rows, row_pages), integers(rows)
    lists_of = lambda rows: (integers(rows, heads, row_pages), integers(rows, heads))
    lists = lists_of(rows) if sizes.listed or divided else (None, None)
    q, new = like((rows, heads, group, width), sizes.dtype), like((rows, heads, width), sizes.dtype)

    def queries(rows: int, number: int) -> tuple[Any, ...]:
        several = like((rows, heads, group, number, width), sizes.dtype)
        positions = (integers(rows, number), integers(rows), integers(rows))
        lists = lists_of(rows) if divided else (None, None)
        return (several, pool, pool, integers(rows, row_pages), *lists, *positions)

    limit = like((rows,), jnp.float32)
    calls: list[tuple[Operation, tuple[Any, ...]]] = [
        (paged_attention.DECODE, (q, pool, pool, table, *lists, row, row)),
        (PREFILL_PARTIAL if divided else paged_attention.PREFILL, queries(1, sizes.chunk)),
    ]
    if sizes.verified and not divided:
        calls.append((paged_attention.VERIFY, queries(rows, sizes.verified)))
    summaries = (summary, summary, summary, norm)
    calls.append((paged_attention.WRITE, ((pool, pool), summaries, new, new, row, row)))
    if sizes.listed:
        rules, bounds = pruned_pages().rules, PageSummary(summary, summary, summary)
        arguments = (q, bounds, norm, table, row, limit, sizes.page_size, rules)
        calls.append((paged_attention.SELECT_PAGES, arguments))
    logits = like((rows, shape.vocabulary), jnp.float32)
    calls.append((topk_entropy.TOPK_ENTROPY, (logits, 1, limit, limit)))
    if sizes.experts:
        calls.append((grouped_matmul.GROUPED_MATMUL, sizes.experts))
    return [_served(operation, arguments) for operation, arguments in calls]


def _served(operation: Operation, arguments: tuple[Any, ...]) -> ServedOperation:
    reasons, platform = operation.decline_reasons(*arguments), default_device().platform
    chosen = next((name for name in operation.candidates() if reasons.get(name) is None), None)
    kernel = platform if platform in operation.backends else None
    reason = None if chosen == kernel or kernel is None else reasons.get(kernel)
    return ServedOperation(operation.name, chosen, kernel is not None, reason)


def attention_shape(model: models.Model, options: EngineOptions, sizes: Sizes) -> AttentionShape:
    """The shapes of an engine's programs.

    Args:
        model: the model that the engine runs; its params may be abstract.
        options: its options.
        sizes: its sizes.
    """
    shapes = sizes.shapes
    return AttentionShape(
        rows=sizes.rows * shapes.branches,
        chunk=sizes.chunk,
        context=sizes.context,
        pages=sizes.pages,
        page_size=sizes.page_size,
        dtype=target_of(model).activation_dtype,
        cache_dtype=pages_of(options.kv_cache_dtype, model.params),
        listed=may_prune(options, shapes.method),
        verified=shapes.tokens(True) if shapes.speculates else 0,
        experts=expert_operands(target_of(model), sizes.rows * shapes.branches),
    )


def expert_operands(model: models.Model, rows: int) -> tuple[Any, ...]:
    """Operands of a step's first product of a layer's experts on a device; () without experts.

    Args:
        model: the model; its params may be abstract.
        rows: tokens of the step.
    """
    of_layers = (layer.get("mlp", {}).get("experts") for layer in model.params["layers"])
    experts = next((part for part in of_layers if part is not None), None)
    if experts is None:
        return ()

    local = lambda x: jax.ShapeDtypeStruct(on_device(x), x.dtype)
    arrays = [{name: local(x) for name, x in experts[part].items()} for part in ("gate_proj", "up_proj")]
    is_stacked = len(arrays[0]["kernel"].shape) > 3  # over the layers that repeat
    merged = lambda x: jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), x.dtype)
    parts = lambda name: tuple(merged(x[name]) if is_stacked else x[name] for x in arrays if name in x)
    pairs = rows * model.config.num_experts_per_tok
    x = jax.ShapeDtypeStruct((pairs, model.config.hidden_size), model.activation_dtype)
    sizes = jax.ShapeDtypeStruct((arrays[0]["kernel"].shape[is_stacked],), jnp.int32)
    return x, sizes, parts("kernel"), parts("scale"), jax.ShapeDtypeStruct((), jnp.int32)


def report(model: models.Model, options: EngineOptions, sizes: Sizes) -> list[ServedOperation]:
    """Log at info which back end serves each operation of an engine on an accelerator; check the page size.

    On a CPU nothing is done: there, to ask a kernel is to compile it.

    Args:
        model: the model that the engine runs; its params may be abstract.
        options: its options.
        sizes: its sizes.

    Raises:
        ParameterError: A kernel declines the page size that the options state, see `check_page_size`.
    """
    if default_device().platform == "cpu":
        return []
    attention = attention_shape(model, options, sizes)
    shape = target_of(model).decoder.shape
    served = served_operations(shape, attention)
    texts = {x.operation.rpartition(".")[2]: x.text for x in served}
    log.info("kernels", extra={"page_size": sizes.page_size, **texts})
    check_page_size(shape, attention, options.block_size, served)
    return served


def check_page_size(
    shape: ModelShape, sizes: AttentionShape, block_size: int | None, served: Many[ServedOperation]
) -> None:
    """Raise ParameterError where a kernel of attention declines a stated page size, but not the usual one.

    Where a method sets the page size, or the kernel declines both, a warning is logged.

    Args:
        shape: the sizes of the model.
        sizes: the shapes of the engine's programs.
        block_size: the page size that the user stated, None without one.
        served: the back ends of the operations.
    """
    names = {operation.name for operation in ATTENTION}
    declined = [x for x in served if x.operation in names and x.backend == REFERENCE and x.reason is not None]
    if not declined:
        return
    usual = default_page_size()
    better = {x.operation: x.backend for x in served_operations(shape, sizes._replace(page_size=usual))}
    for served_operation in declined:
        name, reason = served_operation.operation, served_operation.reason
        at_fault = usual != sizes.page_size and better[name] != REFERENCE
        if at_fault and block_size is not None:
            raise ParameterError(
                f"block_size must be one that the kernel of {name} accepts, as {usual}: without it, "
                f"attention is computed by {CONSEQUENCE}; got {block_size} ({reason})",
                "block_size",
            )
        why = f"page_size {sizes.page_size}, not {usual}: " if at_fault else ""
        log.warning("%s is computed by %s: %s%s", name, CONSEQUENCE, why, reason)
