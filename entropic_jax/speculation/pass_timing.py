"""Pass costs of this machine: times forward passes of a model over several tokens, for the draft-length law.

The passes run on scratch pages, a few times each and in turn. Larger ones that would take seconds are
not timed: their cost is taken to grow in proportion to their tokens.
"""

from collections.abc import Sequence
from functools import partial
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
from ..phases.forward import narrowest
from ..phases.headed_decoder import HeadedDecoder, HeadSteps
from ..sampling import sample
from ..state.cache import Cache, allocate, grant
from ..state.decoder import Decoder
from ..state.ledger import default_hardware
from ..state.sampling_parameters import parameters
from .emission_timing import emitting_launches
from .pass_costs import PassCosts
from .timed_launch import TimedLaunch, least_seconds

SHORT = 64  # cached positions of a row where products are timed
NEAR = 1024  # where attention is timed, besides a long context: processors' caches may hold what it reads
LARGEST_WIDTH = 16  # tokens of a row; a larger pass has more rows
TOKENS_OF_LAUNCH = 512  # enough passes that dispatching them, and a cold first pass, count little
MOST_PASSES, FEWEST_PASSES = 32, 4  # of a launch
EMITTING_ROWS = 8  # of a batch whose emission is timed
LONGEST_PASS = 2.0  # seconds of its products by a roofline, above which a pass of many tokens is not timed
ALWAYS_TIMED = 4  # tokens of a pass that is timed however long it takes
LONGEST_EMITTING = 0.02  # seconds of a step by a roofline, above which what emission adds to it is neglected


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
    """Times passes of 1, 2, 4, … tokens, and what contexts add to those of one row and of a batch.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        most_tokens: largest number of tokens of a pass, at least 2.
        context: the most cached positions of a row at which attention is timed, above 64.
        page_size: positions per page, by default that of the device.
        dtype: the dtype of keys and values, as for `cache.allocate`.
        repeat: how often each pass is timed at most, at least once; less often where that takes long.
        pages: those that the pruned drafter reads; None does not time steps of drafters. With a draft model,
            its steps are timed instead, with a draft head those of the head, too.
        batch: rows, and cached positions of each, of a batch whose keys and values do not fit the processor's
            caches: together more than `context`; None times no such batch.

    Raises:
        ValueError: for an argument out of range.
    """
    _check(most_tokens, context, repeat, batch)
    per_token = 2 * decoder.shape.weights / float(default_hardware().peak)
    timed = [n for n in _sizes(most_tokens) if n <= ALWAYS_TIMED or per_token * n <= LONGEST_PASS]
    shapes = _shapes(timed[-1], context, batch)
    programs = _programs(decoder, params, shapes, page_size, dtype)
    of_passes = [[_launch_of(programs[shape.rows, shape.width], shape) for shape in part] for part in shapes]
    drafting = [] if pages is None else _drafting(decoder, params, pages)
    longest = PassShape(1, 1, context)
    step = partial(PassProgram, shape=longest, page_size=page_size, dtype=dtype, drafts=True)
    steps = [step(model, weights, read) for model, weights, read in drafting]
    of_drafts = [_launch_of(step, longest._replace(length=n)) for step in steps for n in (SHORT, context)]
    rows, most_drafts = (1, min(EMITTING_ROWS, most_tokens)), shapes.near[-1].width - 1
    options = dict(page_size=page_size, dtype=jnp.dtype(dtype).name)
    of_emission = _emitting(decoder, params, rows, most_drafts, options)
    parts = [*of_passes, of_drafts, of_emission]
    seconds = iter(least_seconds([launch for part in parts for launch in part], repeat))
    *passes, draft_steps, emitting = (list(islice(seconds, len(part))) for part in parts)
    costs = _costs_of_model(shapes, passes)
    if emitting:
        of_model = np.interp(rows, [shape.rows * shape.width for shape in shapes.short], passes[0])
        costs = costs._replace(
            emission=_emission(rows, emitting[:2], of_model),
            step_emission=_emission(rows, emitting[2:], of_model),
        )
    of_position = (costs.farther[0][1] if shapes.long else costs.seconds_per_position)[0]
    kinds = zip(drafting, draft_steps[::2], draft_steps[1::2], strict=True)
    of_kinds = [_draft_step(model, times, context, of_position) for (model, *_), *times in kinds]
    draft_step, head_step = (*of_kinds, None, None)[:2]
    return costs._replace(draft_step=draft_step, head_step=head_step).up_to(most_tokens)


def _drafting(decoder: Decoder, params: Any, pages: WindowPages) -> list[tuple[Any, Any, WindowPages | None]]:
    """The functions, parameters and pages of each kind of draft step that is timed, the head's last."""
    if isinstance(decoder, DraftingDecoder):
        return [(decoder.draft_model, params.draft, None)]
    pruned = decoder, params, pages
    return [pruned, (decoder.draft_model, params, None)] if isinstance(decoder, HeadedDecoder) else [pruned]


def _emitting(
    decoder: Decoder, params: Any, rows: Sequence[int], most_drafts: int, options: Any
) -> list[TimedLaunch]:
    """Launches of passes that emit, with each number of rows, and of plain steps; none for a large model.

    Args:
        decoder: the functions of the model.
        params: its parameters.
        rows: numbers of rows.
        most_drafts: k, for which passes have room.
        options: page size and dtype of the cache.
    """
    read = decoder.shape.weights * narrowest(params)
    if read / float(default_hardware().bandwidth) > LONGEST_EMITTING:
        return []
    pairs = [emitting_launches(decoder, params, n, SHORT, most_drafts, **options) for n in rows]
    return [launch for kind in zip(*pairs, strict=True) for launch in kind]


class PassShapes(NamedTuple):
    """The passes that are timed; in each list the smallest first."""

    short: list[PassShape]  # of all numbers of tokens, with a short context
    near: list[PassShape]  # of one row, with as many cached positions as caches may hold
    long: list[PassShape]  # of one row, with more of them; there may be none
    many: list[PassShape]  # of a batch; there may be none


def _sizes(most_tokens: int) -> list[int]:
    """Powers of two up to a number of tokens."""
    return [1 << n for n in range(most_tokens.bit_length())]


def _shapes(most_tokens: int, context: int, batch: tuple[int, int] | None) -> PassShapes:
    """The passes that `measure_pass_costs` times, which has these arguments."""
    sizes = _sizes(most_tokens)
    widths = [size for size in sizes if size <= LARGEST_WIDTH]
    return PassShapes(
        [PassShape(-(-size // LARGEST_WIDTH), min(size, LARGEST_WIDTH), SHORT) for size in sizes],
        [PassShape(1, width, min(NEAR, context)) for width in widths],
        [PassShape(1, width, context) for width in widths] if context > NEAR else [],
        [PassShape(batch[0], n, batch[1]) for n in widths if n == 1 or batch[0] * n <= most_tokens]
        if batch
        else [],
    )


def _costs_of_model(shapes: PassShapes, seconds: list[list[float]]) -> PassCosts:
    """The costs of passes without what they cost besides the model, and without drafters.

    Args:
        shapes: the passes.
        seconds: the seconds of the passes of each list.
    """
    (short, near, *farther), (products, attention, *of_farther) = shapes, seconds
    widths = [shape.width for shape in near]
    slopes = _ascending(np.subtract(attention, products[: len(widths)]) / (near[0].length - SHORT))
    reading = [shape.rows * SHORT * slopes[widths.index(shape.width)] for shape in short]
    base = _ascending(np.subtract(products, reading))
    sizes = tuple(shape.rows * shape.width for shape in short)
    costs = PassCosts(sizes, tuple(base.tolist()), tuple(widths), tuple(slopes.tolist()))
    costs = costs._replace(near_positions=near[0].length)
    for part, times in zip(farther, of_farther, strict=True):
        costs = _with_farther(costs, part, times)
    return costs


def _draft_step(
    model: Any, seconds: Sequence[float], context: int, of_position: float
) -> tuple[float, float]:
    """Cost of a step of a drafter without context, and of each cached position.

    Args:
        model: the functions of the drafter.
        seconds: those of a step with `SHORT` cached positions, and with `context`.
        context: the number of positions.
        of_position: what a position adds to a pass, which reads no less.
    """
    short, long = seconds
    if (_window(model) or context) < context:  # a head that has read all that it reads
        return long, 0.0
    slope = min(max(0.0, (long - short) / (context - SHORT)), of_position)
    return max(0.0, short - slope * SHORT), slope


def _emission(rows: tuple[int, int], seconds: list[float], of_model: np.ndarray) -> tuple[float, float]:
    """Cost of passes or plain steps besides the model: with one row, and for each further row.

    Args:
        rows: the rows of the passes.
        seconds: those of passes or steps that emit.
        of_model: the seconds of passes of the same rows that do not.
    """
    single, several = np.maximum(0.0, np.subtract(seconds, of_model)).tolist()
    return single, max(0.0, several - single) / max(1, rows[1] - rows[0])


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


def _with_farther(costs: PassCosts, shapes: list[PassShape], seconds: list[float]) -> PassCosts:
    """The costs with those of each cached position where there are more of them.

    Args:
        costs: the costs so far.
        shapes: passes of as many rows with as many cached positions, the narrowest first; there may be none.
        seconds: the seconds of each of them.
    """
    if not shapes:
        return costs
    positions = shapes[0].rows * shapes[0].length
    products = np.interp([shape.rows * shape.width for shape in shapes], costs.tokens, costs.seconds)
    before = np.asarray(costs.farther[-1][1] if costs.farther else costs.seconds_per_position)
    # A position of memory costs no less than one of the caches.
    far = np.maximum(_ascending(np.subtract(seconds, products) / positions), before[: len(shapes)])
    # Wider passes than were timed compute, and grow with their computation.
    wider = far[-1] + before[len(shapes) :] - before[len(shapes) - 1]
    return costs._replace(farther=(*costs.farther, (positions, (*far.tolist(), *wider.tolist()))))


def _ascending(seconds: np.ndarray) -> np.ndarray:
    """Costs without disturbances: a pass does not cost more than a larger one, nor less than nothing."""
    return np.maximum(0.0, np.minimum.accumulate(seconds[::-1])[::-1])


class PassProgram:
    """A program of passes of one size, with any number of cached positions, and the pages that it runs on.

    Args:
        decoder: the functions of the model.
        params: its parameters.
        pages: read by steps of the pruned drafter; None for all.
        shape: the shape of the passes, with the most cached positions.
        page_size: as for `measure_pass_costs`.
        dtype: as for `measure_pass_costs`.
        drafts: whether the passes are steps of a drafter, which also sample and measure.
    """

    def __init__(
        self,
        decoder: Any,
        params: Any,
        pages: WindowPages | None,
        shape: PassShape,
        page_size: int | None,
        dtype: Any,
        *,
        drafts: bool = False,
    ) -> None:
        self._decoder, self._params, self._pages = decoder, params, pages
        self._shape, self._drafts = shape, drafts
        rows, width, length = shape
        cache = allocate(decoder.shape, rows, length + width, page_size=page_size, dtype=dtype)
        # Of memory that was never written to, the system would show the same few bytes everywhere.
        cache = cache._replace(layers=jax.tree.map(jnp.zeros_like, cache.layers))
        self._cache, _ = grant(cache, jnp.full(rows, length + width, jnp.int32))
        self._program: Any = None

    def compile(self) -> None:
        """Compile the program."""
        arguments = self._params, self._cache, np.int32(0), np.int32(1)
        self._program = jax.jit(self._launch, donate_argnums=1).lower(*arguments).compile()

    def run(self, length: int, passes: int) -> int:
        """Run a launch, wait for it, and return its number of passes.

        Args:
            length: cached positions of a row.
            passes: the number of passes.
        """
        self._cache, tokens = self._program(self._params, self._cache, np.int32(length), np.int32(passes))
        tokens.block_until_ready()
        return passes

    def _launch(
        self, params: Any, cache: Cache, length: jax.Array, passes: jax.Array
    ) -> tuple[Cache, jax.Array]:
        rows, width, _ = self._shape
        span = TokenSpan(jnp.full(rows, length), jnp.full(rows, width, jnp.int32))
        position = span.start[:, None] + jnp.arange(width)
        decoder, pages = self._decoder, self._pages

        def body(_: Any, carry: Any) -> Any:
            layers, tokens = carry
            current = cache._replace(layers=layers)
            reader = None if pages is None else pages.reader(current, span.start + span.num_tokens)
            hidden, layers = decoder.hidden(
                params, tokens, position, layers, attend_to(current, span, reader)
            )
            # The next pass depends on the logits of this one, so that none is left out.
            return layers, jnp.minimum(_next_tokens(decoder.logits(params, hidden), self._drafts), 1)

        start = cache.layers, jnp.zeros((rows, width), jnp.int32)
        layers, tokens = jax.lax.fori_loop(0, passes, body, start)
        return cache._replace(layers=layers), tokens


def _programs(
    decoder: Decoder, params: Any, shapes: PassShapes, page_size: int | None, dtype: Any
) -> dict[tuple[int, int], PassProgram]:
    """The programs of all passes, by rows and width; those that differ in their positions alone share one.

    Args:
        decoder, params, page_size, dtype: as for `measure_pass_costs`.
        shapes: the passes.
    """
    longest: dict[tuple[int, int], PassShape] = {}
    for shape in (shape for part in shapes for shape in part):
        key = shape.rows, shape.width
        longest[key] = max(shape, longest.get(key, shape))
    make = partial(PassProgram, decoder, params, None, page_size=page_size, dtype=dtype)
    return {key: make(shape=shape) for key, shape in longest.items()}


def _launch_of(program: PassProgram, shape: PassShape) -> TimedLaunch:
    """A launch of a program's passes with as many cached positions as a shape says."""
    return TimedLaunch(program.compile, partial(program.run, shape.length), shape.passes)


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
