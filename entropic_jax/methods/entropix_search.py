"""Entropix search: branching and backtracking around the law of `entropix`.

Every sequence has a group of rows, of which the first leads; the others are empty until the sequence
branches. After every step, the quadrant of the law decides:

* explore: each candidate continues in a row of its own for `length` tokens, over shared pages. The branch
  with the best mean log-probability plus `worth` times the entropic time per token is kept;
* adapt: the same for one step. Each candidate is scored by its log-probability plus the confidence of the
  state after it. That step draws the token after it as well, so looking ahead costs rows and no steps;
* resample: back to the last uncertain token, at most `window` tokens ago, which is drawn again with the old
  token banned. A sequence backtracks again only beyond its last backtrack, so it terminates.

Everything runs on the device in one launch; a fork copies at most one page of a row. A branch without a free
page is left out.

Source: xjdr-alt/entropix (2024), which describes this search and does not implement it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..state import FULL, RUNNING, State, Trace
from ..state.cache import Cache
from .entropix_branches import (
    NO_ACTION,
    SELECT_BRANCH,
    SearchCounts,
    SearchPlan,
    SearchState,
    backtrack,
    branch,
    entropix_state,
    find_entropix_state,
    next_actions,
    select_branch,
)


def start(
    decoder: Any,
    params: Any,
    controller: Any,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    plan: SearchPlan,
    *,
    max_tokens: int | Sequence[int],
    seeds: Sequence[int] | None = None,
    **options: Any,
) -> SearchState:
    """Starts a search, as `loop.start` starts sequences.

    Args:
        decoder: the model's functions.
        params: the model's parameters.
        controller: a controller that contains an `Entropix`.
        cache: an empty cache of `len(prompts) · plan.branches` rows, without surprisals.
        prompts: token ids, none empty.
        plan: limits of the search.
        max_tokens: tokens to generate, for all or each of the prompts.
        seeds: one per prompt; None numbers the prompts.
        **options: further arguments of `loop.start`; `sample` and `stop` are for all rows.

    Raises:
        ValueError: for empty prompts, a cache that does not fit, or a controller without an `Entropix`.
    """
    count, rows = len(prompts), len(prompts) * plan.branches
    if count == 0 or not all(map(len, prompts)):
        raise ValueError("prompts must hold at least one prompt, none empty")
    if cache.table.shape[0] != rows:
        raise ValueError(
            f"cache must have {rows} rows, {plan.branches} for each prompt; got {cache.table.shape[0]}"
        )
    if cache.surprisal is not None:
        raise ValueError("cache must be allocated without surprisals, which cannot be taken back")

    def spread(values):
        return np.repeat(np.broadcast_to(np.asarray(values, np.int32), count), plan.branches)

    prompt_rows: list[Sequence[int]] = [[] for _ in range(rows)]
    prompt_rows[:: plan.branches] = prompts
    state = loop.start(
        decoder,
        params,
        controller,
        cache,
        prompt_rows,
        max_tokens=spread(max_tokens).tolist(),
        seeds=spread(np.arange(count) if seeds is None else seeds).tolist(),
        **options,
    )
    if find_entropix_state(state.control) is None:
        raise ValueError(f"controller must contain an Entropix; got {type(controller).__name__}")
    context = cache.table.shape[1] * cache.page_size
    trace = jax.eval_shape(lambda s: loop.step(decoder, params, controller, s)[1], state)
    return new_search(state, trace, plan, context + 1)


def new_search(state: State, trace: Trace, plan: SearchPlan, held: int) -> SearchState:
    """The search state of sequences whose prompts are in the cache.

    Args:
        state: state of the loop.
        trace: has the shapes of a step's trace.
        plan: limits of the search.
        held: positions of a text that are kept, at least `num_revisable(plan)` plus the steps of a launch.
    """
    rows = state.status.shape[0]
    count = rows // plan.branches
    text = jax.tree.map(lambda x: jnp.zeros((rows, held, *x.shape[1:]), x.dtype), trace)
    # The last token of a prompt is what the first one drawn may be taken back to.
    text = text._replace(token=text.token + state.token[:, None])
    fill = lambda size, value=0: jnp.full(size, value, jnp.int32)
    real = lambda: jnp.zeros(rows, jnp.float32)
    return SearchState(
        state=state,
        text=text,
        alive=state.status == RUNNING,
        first_log_probability=real(),
        total_log_probability=real(),
        num_tokens=fill(rows),
        fork_entropic_time=real(),
        uncertain_position=fill(rows, -1),
        previous_uncertain_position=fill(rows, -1),
        fork_position=fill(count),
        steps_left=fill(count),
        looking_ahead=jnp.zeros(count, bool),
        tokens_since_exploration=fill(count, plan.rest),
        last_backtrack=fill(count),
        pending_action=fill(count, NO_ACTION),
        max_branches=fill(count, plan.branches),
        counts=SearchCounts(*(fill(count) for _ in SearchCounts._fields)),
    )


@partial(jax.jit, static_argnames=("decoder", "plan"), donate_argnames="search")
def generate(
    decoder: Any,
    params: Any,
    controller: Any,
    search: SearchState,
    steps: jax.Array | int,
    *,
    plan: SearchPlan,
) -> SearchState:
    """Runs up to `steps` steps in one launch, fewer if every sequence ends. The search is consumed.

    A step advances the leading rows or, while any sequence branches, every row with a branch.

    Args:
        search: state of the search; it is consumed.
        plan: the plan of the search; static.
        decoder: the model's pure functions.
        params: its parameters.
        controller: the control law; an `Entropix` is part of it.
        steps: traced, the most steps.
    """

    def step(state: State, done: jax.Array, width: int | None) -> tuple[State, Trace]:
        return loop.step(decoder, params, controller, state, width=width)

    return run_steps(step, search, steps, plan, search.steps_left.shape[0], None)[0]


def run_steps(
    step: Callable[[State, jax.Array, int | None], tuple[State, Trace]],
    search: SearchState,
    steps: jax.Array | int,
    plan: SearchPlan,
    narrow: int | None,
    wide: int | None,
) -> tuple[SearchState, jax.Array]:
    """Runs up to `steps` steps with a caller-defined step function.

    Args:
        step: `step(state, done, width)` runs the loop's step number `done` on `width` rows.
        search: the search.
        steps: most steps.
        plan: limits of the search.
        narrow: width while no sequence branches; None is `wide`.
        wide: width while a sequence branches; None is all rows.

    Returns:
        The search, and the number of steps, int32 `[]`.
    """

    def stepping(width: int | None, fits: Callable[[jax.Array], Any]):
        def running(carry):
            done, search = carry
            go = (
                (done < steps)
                & (search.pending_action == NO_ACTION).all()
                & (search.state.status == RUNNING).any()
            )
            return go & fits((search.steps_left > 0).any())

        def body(carry):
            done, search = carry
            state, trace = step(search.state, done, width)
            return done + 1, _record_step(search._replace(state=state), trace, plan)

        return lambda carry: jax.lax.while_loop(running, body, carry)

    def going(carry):
        done, search = carry
        return (done < steps) & (search.state.status == RUNNING).any()

    def cycle(carry):
        if narrow is None:
            carry = stepping(wide, lambda _: True)(carry)
        else:
            carry = stepping(narrow, jnp.logical_not)(carry)
            if plan.branches > 1:
                carry = stepping(wide, lambda busy: busy)(carry)
        done, search = carry
        due = lambda search: (search.pending_action != NO_ACTION).any()
        return done, jax.lax.while_loop(due, lambda search: _apply_actions(search, plan, narrow), search)

    done, search = jax.lax.while_loop(going, cycle, (jnp.int32(0), search))
    return search, done


def _record_step(search: SearchState, trace: Trace, plan: SearchPlan) -> SearchState:
    """Records a step in texts and scores, and determines the pending actions."""
    state, rows = search.state, search.alive.shape[0]
    groups = lambda x: x.reshape(-1, plan.branches)
    emitted, law_state = trace.emitted, entropix_state(search)
    held = search.text.token.shape[1]
    place = jnp.where(emitted, state.length % held, held)

    def enter(all_, x):
        return all_.at[jnp.arange(rows), place].set(x, mode="drop")

    uncertain = (
        emitted & law_state.uncertain & (law_state.tokens_since_clarification > 0)
    )  # clarifications are not taken back
    uncertain &= jnp.repeat(search.max_branches > 0, plan.branches)
    branching, left = search.steps_left > 0, jnp.maximum(search.steps_left - 1, 0)
    over = ~(groups(search.alive) & (groups(state.status) == RUNNING)).any(1)
    search = search._replace(
        text=jax.tree.map(enter, search.text, trace),
        total_log_probability=search.total_log_probability - jnp.where(emitted, trace.surprisal, 0.0),
        num_tokens=search.num_tokens + emitted.astype(jnp.int32),
        uncertain_position=jnp.where(uncertain, state.length - 1, search.uncertain_position),
        previous_uncertain_position=jnp.where(
            uncertain, search.uncertain_position, search.previous_uncertain_position
        ),
        steps_left=left,
        tokens_since_exploration=search.tokens_since_exploration + groups(emitted)[:, 0].astype(jnp.int32),
    )
    wished = next_actions(search, groups(emitted)[:, 0] & ~branching, plan)
    return search._replace(pending_action=jnp.where(branching & ((left == 0) | over), SELECT_BRANCH, wished))


def _apply_actions(search: SearchState, plan: SearchPlan, max_sequences: int | None = None) -> SearchState:
    """Applies the pending actions: select branches, branch (again at once, if due), backtrack.

    At most `max_sequences` sequences have one (static; None for all).

    Backtracking reads pages and branching writes them. In this order one depends on the other, so XLA writes
    in place; in the reverse order nothing orders the read before the write, and XLA copies the pool.
    """
    if plan.branches > 1:
        search = branch(select_branch(search, plan), plan, max_sequences)
    search = backtrack(search, plan, max_sequences)
    return search._replace(pending_action=jnp.full_like(search.pending_action, NO_ACTION))


def end_sequences(search: SearchState, plan: SearchPlan, ended: np.ndarray) -> SearchState:
    """Ends sequences: their rows do not advance any more.

    Args:
        search: state of the search.
        plan: the plan of the search; static.
        ended: bool `[sequences]`, the sequences to end.
    """
    rows = jnp.repeat(jnp.asarray(ended), plan.branches)
    status = jnp.where(rows & (search.state.status == RUNNING), FULL, search.state.status)
    return search._replace(
        state=search.state._replace(status=status),
        steps_left=jnp.where(jnp.asarray(ended), 0, search.steps_left),
    )


def num_revisable(plan: SearchPlan) -> int:
    """Most tokens at the end of a text that may still change."""
    return plan.window + plan.length + 1


def final_positions(search: SearchState, plan: SearchPlan) -> jax.Array:
    """The last position of each sequence's text that is final, int32 `[sequences]`."""
    state, mark = search.state, search.uncertain_position
    lead = lambda x: x[:: plan.branches]
    open_ = (mark >= 0) & (state.length + 1 - mark <= plan.window)
    earliest = jnp.where(search.alive, jnp.where(open_, mark, state.length), jnp.iinfo(jnp.int32).max)
    earliest = earliest.reshape(-1, plan.branches).min(1)
    length, branching = lead(state.length), search.steps_left > 0
    last = jnp.minimum(jnp.where(branching, search.fork_position - 1, length), earliest)
    return jnp.where((lead(state.status) != RUNNING) & ~branching, length, last)


def traces(search: SearchState, plan: SearchPlan) -> list[Trace]:
    """The trace of each sequence's text so far, without the prompt; each array `[tokens]`."""
    host, length = jax.device_get((search.text, search.state.length[:: plan.branches]))
    result = []
    for number, last in enumerate(length):
        row = jax.tree.map(lambda x: x[number * plan.branches, : last + 1], host)
        result.append(jax.tree.map(lambda x: x[row.emitted], row))
    return result
