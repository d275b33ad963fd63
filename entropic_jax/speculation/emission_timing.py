"""What a pass costs besides the model, timed: the draft-length law, emission, and room for the logits.

A small model's pass takes little longer than that, so that long drafts pay earlier than its products say.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from ..phases.batch import Batch
from ..phases.prefill import start
from ..state import RUNNING, Action, Signal, State, Trace
from ..state.cache import allocate
from ..state.decoder import Decoder
from ..state.pytree import STATIC, pytree
from ..state.stacking import changed_fields
from .draft_length import draft_length
from .drafter import ControlledModel, Draft
from .speculator import Speculator, draft, verify_and_emit

PASSES = 32  # of a launch, as of an engine: what the launch costs is part of it
TOKEN = 1  # that prompts consist of


@pytree
class _NoDrafts:
    """Drafts nothing, with room for k tokens."""

    most_tokens: Annotated[int, STATIC]

    def draft(self, model: ControlledModel, batch: Batch, max_drafts: jax.Array) -> tuple[Batch, Draft]:
        """See `Drafter`."""
        rows = batch.active.shape[0]
        shape = rows, self.most_tokens
        nothing = Draft(jnp.zeros(shape, jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros(shape))
        return batch, nothing


@pytree
class _NoControl:
    """A control law that changes nothing."""

    def init(self, action: Action) -> tuple[()]:
        return ()

    def update(self, signal: Signal, action: Action, state: tuple[()]) -> tuple[Action, tuple[()]]:
        return action, state


def emitting_passes(
    decoder: Decoder, params: Any, rows: int, length: int, most_tokens: int, **cache_options: Any
) -> Callable[[], int]:
    """A function that runs a launch of passes that emit a token a row, waits, and returns their number.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        rows: number of rows.
        length: cached positions of a row, at least 1.
        most_tokens: k, for which passes have room.
        cache_options: the page size and the dtype of keys and values, as for `cache.allocate`.
    """
    speculator = Speculator(_NoDrafts(most_tokens), draft_length(rows, widths=(1,)))
    pool = allocate(decoder.shape, rows, length + PASSES + 1, **cache_options)
    prompts = [[TOKEN] * (length + 1)] * rows
    state = start(
        decoder,
        params,
        _NoControl(),
        pool,
        prompts,
        key=jax.random.key(0),
        max_tokens=PASSES,
        speculator=speculator,
    )
    program = jax.jit(partial(_launch, decoder, speculator))

    def run() -> int:
        jax.block_until_ready(program(params, state))
        return PASSES

    return run


def _launch(decoder: Decoder, speculator: Speculator, params: Any, state: State) -> tuple[Any, Trace]:
    """What passes change besides the cache, and their traces: what is not returned would not be computed.

    Args:
        decoder: the model's pure functions.
        speculator: drafts nothing.
        params: the model's parameters.
        state: before the passes.
    """
    model = ControlledModel(decoder, params, _NoControl())

    def body(current: State, _: None) -> tuple[State, Trace]:
        batch = Batch(current, current.status == RUNNING)
        room = current.cache.granted * current.cache.page_size
        drafted, plan = draft(speculator, model, batch, room, None)
        return verify_and_emit(speculator, model, drafted, plan, None)

    after, trace = jax.lax.scan(body, state, None, PASSES)
    return changed_fields(after), trace
