"""Emission timing: seconds that passes and plain steps take beside the model, in emission and decisions.

A small model's pass takes little longer than that, so that long drafts pay earlier than its products say. And
a row that drafts nothing soon takes plain steps, which do not ask whether to: drafts have to beat those.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from ..parameter_tables.speculation_names import AUTO
from ..phases.batch import gather_active, record, record_text, scatter
from ..phases.emission import emit
from ..phases.forward import decode, decode_cost
from ..phases.headed_decoder import HeadedDecoder
from ..phases.prefill import start
from ..state import Action, Signal, State, Trace
from ..state.cache import allocate
from ..state.decoder import Decoder
from ..state.pytree import pytree
from ..state.stacking import changed_fields
from .drafter import ControlledModel
from .pass_costs import PassCosts
from .registry import make_speculator
from .speculator import Speculator, draft, verify_and_emit
from .timed_launch import TimedLaunch

PASSES = 32  # of a launch, as of an engine: what the launch costs is part of it
# A further token costs as much as the first, and a draft step more than all: no draft is worth its pass.
PROHIBITIVE = PassCosts((1, 1024), (1.0, 1024.0), (1,), (0.0,), draft_step=(1e6, 0.0), head_step=(1e6, 0.0))


@pytree
class _NoControl:
    """A control law that changes nothing."""

    def init(self, action: Action) -> tuple[()]:
        return ()

    def update(self, signal: Signal, action: Action, state: tuple[()]) -> tuple[Action, tuple[()]]:
        return action, state


def emitting_launches(
    decoder: Decoder, params: Any, rows: int, length: int, most_tokens: int, **cache_options: Any
) -> tuple[TimedLaunch, TimedLaunch]:
    """A launch of passes, and one of plain steps.

    All of them emit a token a row. The passes decide about drafts as those of an engine do, and draft none.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        rows: number of rows.
        length: cached positions of a row, at least 1.
        most_tokens: k, for which passes have room.
        cache_options: the page size and the dtype of keys and values, as for `cache.allocate`.
    """
    headed = isinstance(decoder, HeadedDecoder)
    speculator = make_speculator(AUTO, rows, most_tokens, PROHIBITIVE, headed)
    assert speculator is not None
    pool = allocate(decoder.shape, rows, length + PASSES + 1, **cache_options)
    tokens = [number % decoder.shape.vocabulary for number in range(length + 1)]
    state = start(
        decoder,
        params,
        _NoControl(),
        pool,
        [tokens] * rows,
        key=jax.random.key(0),
        max_tokens=PASSES,
        speculator=speculator,
    )
    kinds = partial(_pass, decoder, speculator), partial(_step, decoder)
    passes, steps = (EmittingProgram(kind, params, state) for kind in kinds)
    return TimedLaunch(passes.compile, passes.run), TimedLaunch(steps.compile, steps.run)


class EmittingProgram:
    """A program that runs a launch of passes or steps from a state, which it leaves as it is.

    Args:
        advance: the state and the trace after a pass or a step of these parameters and the state before.
        params: the model's parameters.
        state: before the launch.
    """

    def __init__(
        self, advance: Callable[[Any, State], tuple[State, Trace]], params: Any, state: State
    ) -> None:
        self._advance, self._arguments = advance, (params, state)
        self._program: Any = None

    def compile(self) -> None:
        """Compile the program."""
        self._program = jax.jit(self._launch).lower(*self._arguments).compile()

    def run(self, passes: int) -> int:
        """Run the launch, wait for it, and return the number of its passes, whatever was requested."""
        jax.block_until_ready(self._program(*self._arguments))
        return PASSES

    def _launch(self, params: Any, state: State) -> tuple[Any, Trace]:
        step = lambda current, _: self._advance(params, current)
        after, trace = jax.lax.scan(step, state, None, PASSES)
        return changed_fields(after), trace  # what is not returned would not be computed


def _pass(decoder: Decoder, speculator: Speculator, params: Any, state: State) -> tuple[State, Trace]:
    """A pass in which no drafted token is verified, see `loop.speculative_step`."""
    model = ControlledModel(decoder, params, _NoControl())
    rows, state, batch = gather_active(state, None, speculator.drafter.most_tokens)
    room = state.cache.granted * state.cache.page_size
    drafted, plan = draft(speculator, model, batch, room, None)
    after, trace = verify_and_emit(speculator, model, drafted, plan, None)
    state = scatter(state, rows, batch.state, after)._replace(history=after.history)
    return record_text(state, trace.token, trace.emitted), trace


def _step(decoder: Decoder, params: Any, state: State) -> tuple[State, Trace]:
    """A plain step, see `loop.step`."""
    rows, state, batch = gather_active(state, None)
    after, output = decode(decoder, params, batch, None)
    cost = decode_cost(decoder, params, batch, output)
    emitted, trace = emit(_NoControl(), after, output, cost, None, None)
    state = scatter(state, rows, batch.state, emitted)
    return record(state, trace.token[None], trace.emitted[None]), trace
