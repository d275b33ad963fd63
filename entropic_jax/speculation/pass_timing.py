"""Pass costs of this machine: times forward passes of a model over several tokens, for the draft-length law.

The passes run on scratch pages, a few times each and in turn. The shortest time counts: what else the machine
does only adds to it.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..attention.attend import TokenSpan, attend_to
from ..attention.window_pages import WindowPages
from ..entropy import entropy_statistics
from ..pallas.gumbel_argmax import gumbel_argmax
from ..phases.drafting_decoder import DraftingDecoder
from ..phases.headed_decoder import HeadedDecoder, HeadSteps
from ..sampling import sample
from ..state.cache import Cache, allocate, grant
from ..state.decoder import Decoder
from ..state.sampling_parameters import parameters
from .pass_costs import PassCosts

SHORT = 64  # cached positions of a row where products are timed
LARGEST_WIDTH = 16  # tokens of a row; a larger pass has more rows
TOKENS_OF_LAUNCH = 512  # enough passes that dispatching them, and a cold first pass, count little
MOST_PASSES, FEWEST_PASSES = 32, 4  # of a launch


class PassShape(NamedTuple):
    """The size of a pass."""

    rows: int
    width: int  # tokens of a row
    length: int  # cached positions of a row

    @property
    def passes(self) -> int:
        """How many of them make a launch."""
        fitting = TOKENS_OF_LAUNCH // (self.rows * self.width)
        return max(FEWEST_PASSES, min(MOST_PASSES, fitting))


def measure_pass_costs(
    decoder: Decoder,
    params: Any,
    *,
    most_tokens: int = 256,
    context: int = 2048,
    page_size: int | None = None,
    dtype: Any = jnp.float32,
    repeat: int = 8,
    pages: WindowPages | None = None,
    batch: tuple[int, int] | None = None,
) -> PassCosts:
    """Times passes of 1, 2, 4, … tokens, and what a long context adds to those of one row and of a batch.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        most_tokens: largest number of tokens of a pass, at least 2.
        context: cached positions of a row where attention is timed, above 64.
        page_size: positions per page, by default that of the device.
        dtype: the dtype of keys and values, as for `cache.allocate`.
        repeat: how often each pass is timed, at least once.
        pages: those that the pruned drafter reads; None does not time steps of drafters. With a draft model,
            its steps are timed instead, with a draft head those of the head, too.
        batch: rows, and cached positions of each, of a batch whose keys and values do not fit the processor's
            caches: together more than `context`; None times no such batch.

    Raises:
        ValueError: for an argument out of range.
    """
    _check(most_tokens, context, repeat, batch)
    sizes = [1 << n for n in range(most_tokens.bit_length())]
    widths = [size for size in sizes if size <= LARGEST_WIDTH]
    short = [PassShape(-(-size // LARGEST_WIDTH), min(size, LARGEST_WIDTH), SHORT) for size in sizes]
    long = [PassShape(1, width, context) for width in widths]
    many = [PassShape(batch[0], n, batch[1]) for n in widths if batch[0] * n <= most_tokens] if batch else []

    def run(shape):
        return _pass(decoder, params, shape, page_size, dtype)

    drafting: list[Any] = [] if pages is None else [(decoder, params, pages)]
    if drafting and isinstance(decoder, DraftingDecoder):
        drafting = [(decoder.draft_model, params.draft, None)]
    if drafting and isinstance(decoder, HeadedDecoder):
        drafting.append((decoder.draft_model, params, None))
    drafts = [
        _pass(model, weights, PassShape(1, 1, length), page_size, dtype, read, drafts=True)
        for model, weights, read in drafting
        for length in (SHORT, context)
    ]
    launches = [*(run(shape) for shape in (*short, *long, *many)), *drafts]
    seconds = iter(_least_seconds(launches, repeat))
    products, attention, of_batch, of_drafts = (
        list(islice(seconds, len(part))) for part in (short, long, many, drafts)
    )
    slopes = _ascending(np.subtract(attention, products[: len(widths)]) / (context - SHORT))
    reading = [s.rows * s.length * slopes[widths.index(s.width)] for s in short]
    base = _ascending(np.subtract(products, reading))
    steps: list[tuple[float, float] | None] = []
    for (model, _, _), near, far in zip(drafting, of_drafts[::2], of_drafts[1::2], strict=True):
        # Such a step reads no more than a pass, and no more than the window of a head.
        slope = min(max(0.0, (far - near) / (context - SHORT)), float(slopes[0]))
        saturated = (_window(model) or context) < context
        steps.append((far, 0.0) if saturated else (max(0.0, near - slope * SHORT), slope))
    draft_step, head_step = (*steps, None, None)[:2]
    costs = PassCosts(
        tuple(sizes),
        tuple(base.tolist()),
        tuple(widths),
        tuple(slopes.tolist()),
        draft_step,
        head_step=head_step,
    )
    return _with_batch(costs, many, of_batch, context)


def _window(model: Any) -> int | None:
    """Positions that a step of a drafter reads at most, if it is a head with a window."""
    return model.headed.head.window if isinstance(model, HeadSteps) else None


def _check(most_tokens: int, context: int, repeat: int, batch: tuple[int, int] | None) -> None:
    """Raises ValueError for an argument of `measure_pass_costs` that is out of range."""
    for name, value, least in (("most_tokens", most_tokens, 2), ("context", context, SHORT + 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1; got {repeat}")
    if batch is not None and (batch[0] > most_tokens or batch[0] * batch[1] <= context):
        raise ValueError(
            f"batch must have at most {most_tokens} rows and more than {context} positions; got {batch}"
        )


def _with_batch(costs: PassCosts, shapes: list[PassShape], seconds: list[float], single: int) -> PassCosts:
    """The costs with those of each cached position of a batch.

    Args:
        costs: the costs of passes of one row.
        shapes: the passes of the batch, the narrowest first.
        seconds: the seconds of each of them.
        single: the number of cached positions up to which `costs` hold.
    """
    if not shapes:
        return costs
    positions = shapes[0].rows * shapes[0].length
    products = np.interp([shape.rows * shape.width for shape in shapes], costs.tokens, costs.seconds)
    near = np.asarray(costs.seconds_per_position)
    # A position of memory costs no less than one of the caches.
    far = np.maximum(_ascending(np.subtract(seconds, products) / positions), near[: len(shapes)])
    # Wider passes than the batch was timed with compute, and grow with their computation.
    wider = far[-1] + near[len(shapes) :] - near[len(shapes) - 1]
    slopes = (*far.tolist(), *wider.tolist())
    return costs._replace(
        batch_seconds_per_position=slopes, single_positions=single, batch_positions=positions
    )


def _ascending(seconds: np.ndarray) -> np.ndarray:
    """Costs without disturbances: a pass does not cost more than a larger one, nor less than nothing."""
    return np.maximum(0.0, np.minimum.accumulate(seconds[::-1])[::-1])


def _pass(
    decoder: Decoder,
    params: Any,
    shape: PassShape,
    page_size: int | None,
    dtype: Any,
    pages: WindowPages | None = None,
    drafts: bool = False,
) -> Callable[[], int]:
    """A function that runs a launch of passes of one shape, waits for it, and returns their number.

    Args:
        decoder, params, page_size, dtype: as for `measure_pass_costs`.
        shape: the shape of the passes.
        pages: read by steps of the pruned drafter; None for all.
        drafts: whether the passes are steps of a drafter, which also sample and measure.
    """
    rows, width, length = shape
    cache = allocate(decoder.shape, rows, length + width, page_size=page_size, dtype=dtype)
    # Of memory that was never written to, the system would show the same few bytes everywhere.
    cache = cache._replace(layers=jax.tree.map(jnp.zeros_like, cache.layers))
    cache, _ = grant(cache, jnp.full(rows, length + width, jnp.int32))
    span = TokenSpan(jnp.full(rows, length, jnp.int32), jnp.full(rows, width, jnp.int32))
    position = span.start[:, None] + jnp.arange(width)

    def launch(params: Any, cache: Cache) -> tuple[Cache, jax.Array]:
        def body(_: Any, carry: Any) -> Any:
            layers, tokens = carry
            current = cache._replace(layers=layers)
            reader = None if pages is None else pages.reader(current, span.start + span.num_tokens)
            hidden, layers = decoder.hidden(
                params, tokens, position, layers, attend_to(current, span, reader)
            )
            # The next pass depends on the logits of this one, so that none is left out.
            return layers, jnp.minimum(_next_tokens(decoder.logits(params, hidden), drafts), 1)

        start = cache.layers, jnp.zeros((rows, width), jnp.int32)
        layers, tokens = jax.lax.fori_loop(0, shape.passes, body, start)
        return cache._replace(layers=layers), tokens

    program = jax.jit(launch, donate_argnums=1)

    def run() -> int:
        nonlocal cache
        cache, tokens = program(params, cache)
        tokens.block_until_ready()
        return shape.passes

    return run


def _next_tokens(logits: jax.Array, sampled: bool) -> jax.Array:
    """The likeliest tokens int32 `[rows, n]`, or those of a draft: sampled, with the entropy measured."""
    rows, flat = logits.shape[0], logits.reshape(-1, logits.shape[-1])
    if not sampled:
        # A kernel, because XLA takes as long for the maximum of a row as for a layer of a small model.
        nothing, key = jnp.zeros(len(flat), jnp.int32), jnp.zeros(2, jnp.uint32)
        return gumbel_argmax(flat, jnp.zeros(len(flat)), key, nothing, nothing).reshape(logits.shape[:-1])
    warm, seed = parameters(rows, temperature=1.0), jnp.arange(rows, dtype=jnp.int32)
    token = sample(flat, warm, warm.temperature, jax.random.key(0), seed, seed)
    measured = entropy_statistics(flat).entropy >= 0
    return jnp.where(measured, token, 0)[:, None]


def _least_seconds(launches: Sequence[Callable[[], int]], repeat: int) -> list[float]:
    """Seconds of a pass of each launch: the least of `repeat` turns, after one that compiles."""
    seconds: list[list[float]] = [[] for _ in launches]
    for repetition in range(repeat + 1):
        for launch, values in zip(launches, seconds, strict=True):
            began = time.perf_counter()
            passes = launch()
            if repetition:
                values.append((time.perf_counter() - began) / passes)
    return [min(values) for values in seconds]
