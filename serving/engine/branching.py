"""Branch state of the engine, for sequences that branch and go back (the sampler `entropix`).

A branch group is `plan.branches` consecutive rows of the state. Its first row leads; the others stay empty
until the sequence branches. The host sees branch groups only, and receives a token once no branch can take it
back.
`methods.entropix_search` defines how a sequence searches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entropic_jax import State, Trace
from entropic_jax.methods import entropix_search
from entropic_jax.methods.entropix import NEVER
from entropic_jax.methods.entropix_branches import NO_ACTION, SearchCounts, SearchPlan, SearchState
from entropic_jax.state import PREFILLING, RUNNING

UNKNOWN = -1


class BranchState(NamedTuple):
    """The searches of all branch groups between two launches."""

    search: SearchState  # its `state` is that of `DeviceState`, and () here
    delivered: jax.Array  # int32 [groups], position of the last token that the host has; -1 before a launch


def new_branch_state(state: State, trace: Trace, plan: SearchPlan, capacity: int) -> BranchState:
    """The branch state of groups without a sequence.

    Args:
        state: the state of the loop, with `plan.branches` rows a branch group.
        trace: shapes and dtypes of the trace of one step.
        plan: how sequences branch.
        capacity: steps of a launch, at most.
    """
    text_length = capacity + entropix_search.num_revisable(plan)
    search = entropix_search.new_search(state, trace, plan, text_length)
    no_state: Any = ()
    delivered = jnp.full(search.steps_left.shape, UNKNOWN, jnp.int32)
    return BranchState(jax.tree.map(jnp.copy, search._replace(state=no_state)), delivered)


def assign_groups(
    branch_state: BranchState, freed: jax.Array, groups: jax.Array, token: jax.Array, branches: jax.Array
) -> BranchState:
    """End the searches of freed branch groups and begin those of newly placed sequences.

    Args:
        branch_state: the search state of all branch groups.
        freed: bool `[groups]`, whose sequence has left.
        groups: int32 `[k]`, where sequences are placed; numbers past the last branch group are ignored.
        token: int32 `[k]`, the last token of each prompt.
        branches: int32 `[k]`, branches that each may have.
    """
    search, count = branch_state.search, branch_state.delivered.shape[0]
    rows = search.alive.shape[0]
    k = rows // count
    new = jnp.zeros(count, bool).at[groups].set(True, mode="drop")
    old = freed | new

    def put(values):
        return jnp.zeros(count, jnp.int32).at[groups].set(values, mode="drop")

    def by_group(flag, value, x):
        return jnp.where(flag.reshape(-1, *(1,) * (x.ndim - 1)), value, x)

    def by_row(flag, value, x):
        return by_group(jnp.repeat(flag, k), value, x)

    text = jax.tree.map(lambda x: by_row(new, jnp.zeros((), x.dtype), x), search.text)
    last = jnp.repeat(put(token), k)[:, None]
    search = search._replace(
        text=text._replace(token=by_row(new, last, text.token)),
        alive=by_row(old, False, search.alive) | (jnp.repeat(new, k) & (jnp.arange(rows) % k == 0)),
        uncertain_position=by_row(old, -1, search.uncertain_position),
        previous_uncertain_position=by_row(old, -1, search.previous_uncertain_position),
        steps_left=by_group(old, 0, search.steps_left),
        looking_ahead=by_group(old, False, search.looking_ahead),
        tokens_since_exploration=by_group(new, NEVER, search.tokens_since_exploration),
        last_backtrack=by_group(new, 0, search.last_backtrack),
        pending_action=by_group(old, NO_ACTION, search.pending_action),
        max_branches=jnp.where(new, put(branches), search.max_branches),
    )
    return BranchState(search, jnp.where(new, UNKNOWN, branch_state.delivered))


def launch(
    step: Callable[[State, jax.Array, int | None], tuple[State, Trace]],
    branch_state: BranchState,
    state: State,
    steps: jax.Array,
    plan: SearchPlan,
    width: int,
    exact: bool,
) -> tuple[BranchState, State, jax.Array, Trace]:
    """Run up to `steps` decode steps of groups that may branch.

    Args:
        step: as in `entropix_search.run_steps`.
        branch_state: the search state of all branch groups.
        state: the state of the loop, with `plan.branches` rows a branch group.
        steps: int32 `[]`.
        plan: how sequences branch.
        width: branch groups that a step computes, at most.
        exact: whether every step computes the same rows, so that no rounding depends on who branches.

    Returns:
        The new branch state and state, the number of steps that ran, and the trace `[n, groups]` of the
        tokens that became final in this launch, valid where `emitted`.
    """
    k = plan.branches

    def leading(values):
        return values[::k]

    # The host has every token of the prompt and of sequences that do not search.
    searching = (branch_state.search.max_branches > 0) & (branch_state.delivered != UNKNOWN)
    prefilled = leading(state.status) != PREFILLING
    delivered = jnp.where(searching, branch_state.delivered, leading(state.length))
    search = branch_state.search._replace(state=state)
    search, num_steps = entropix_search.run_steps(
        step, search, steps, plan, None if exact else width, width * k
    )
    last = jnp.maximum(delivered, entropix_search.final_positions(search, plan))
    text_length = search.text.token.shape[1]
    position = delivered[None] + 1 + jnp.arange(text_length)[:, None]
    groups = jnp.arange(delivered.shape[0])[None]
    trace = jax.tree.map(lambda x: leading(x)[groups, position % text_length], search.text)
    trace = trace._replace(emitted=position <= last)
    no_state: Any = ()
    delivered = jnp.where(prefilled, last, UNKNOWN)
    return BranchState(search._replace(state=no_state), delivered), search.state, num_steps, trace


def take_tally(branch_state: BranchState) -> tuple[BranchState, jax.Array]:
    """Event counts since the last call, int32 `[len(SearchCounts)]`, and the state with counters reset."""
    tally = branch_state.search.counts
    totals = jnp.stack([x.sum() for x in tally])
    cleared = SearchCounts(*(jnp.zeros_like(x) for x in tally))
    return branch_state._replace(search=branch_state.search._replace(counts=cleared)), totals


def status(branch_state: BranchState, state: State) -> jax.Array:
    """Status, int32 `[groups]`: a group that branches runs, even where its leading row has ended."""
    left = branch_state.search.steps_left
    leaders = state.status[:: state.status.shape[0] // left.shape[0]]
    return jnp.where(left > 0, RUNNING, leaders)
