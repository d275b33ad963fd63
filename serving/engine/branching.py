"""Sequences that branch and go back, in the engine: every seat is a group of rows, of which the first leads.

The host knows seats alone. Rows beside the leader hold nothing until their sequence branches. The host is
told of a token once nothing can change it. How a sequence searches is in `entropix_search`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entropic_jax import State, Trace
from entropic_jax.methods import entropix_search
from entropic_jax.methods.entropix import NEVER
from entropic_jax.methods.entropix_branches import NOTHING, Plan, Search, Tally
from entropic_jax.state import PREFILLING, RUNNING

UNKNOWN = -1


class BranchState(NamedTuple):
    """What is known of the searches of all seats between two launches."""

    search: Search  # its state is the board's: (), here
    delivered: (
        jax.Array
    )  # int32 [seats], position of the last token that the host has; −1 before the first launch


def new_branch_state(state: State, trace: Trace, plan: Plan, capacity: int) -> BranchState:
    """The desk of rows that nothing is in, for launches of `capacity` steps.

    `trace` has the shapes of that of a step.
    """
    held = capacity + entropix_search.unsettled(plan)
    search = entropix_search.begun(state, trace, plan, held)
    away: Any = ()
    delivered = jnp.full(search.left.shape, UNKNOWN, jnp.int32)
    return BranchState(jax.tree.map(jnp.copy, search._replace(state=away)), delivered)


def place_in_slots(
    branch_state: BranchState, ended: jax.Array, slots: jax.Array, token: jax.Array, branches: jax.Array
) -> BranchState:
    """End the searches flagged bool `[seats]`, and begin one in each of `slots` int32 `[k]`.

    `token` `[k]` is the last of the prompt, `branches` `[k]` how many it may have. Seats past the last are
    ignored.
    """
    search, count = branch_state.search, branch_state.delivered.shape[0]
    rows = search.alive.shape[0]
    k = rows // count
    new = jnp.zeros(count, bool).at[slots].set(True, mode="drop")
    old = ended | new
    put = lambda values: jnp.zeros(count, jnp.int32).at[slots].set(values, mode="drop")
    by_seat = lambda flag, value, x: jnp.where(flag.reshape(-1, *(1,) * (x.ndim - 1)), value, x)
    by_row = lambda flag, value, x: by_seat(jnp.repeat(flag, k), value, x)
    text = jax.tree.map(lambda x: by_row(new, jnp.zeros((), x.dtype), x), search.text)
    first = jnp.repeat(put(token), k)[:, None]
    search = search._replace(
        text=text._replace(token=by_row(new, first, text.token)),
        alive=by_row(old, False, search.alive) | (jnp.repeat(new, k) & (jnp.arange(rows) % k == 0)),
        mark=by_row(old, -1, search.mark),
        earlier=by_row(old, -1, search.earlier),
        left=by_seat(old, 0, search.left),
        looking=by_seat(old, False, search.looking),
        calm=by_seat(new, NEVER, search.calm),
        turned=by_seat(new, 0, search.turned),
        due=by_seat(old, NOTHING, search.due),
        most=jnp.where(new, put(branches), search.most),
    )
    return BranchState(search, jnp.where(new, UNKNOWN, branch_state.delivered))


def launch(
    step: Callable[[State, jax.Array, int | None], tuple[State, Trace]],
    branch_state: BranchState,
    state: State,
    steps: jax.Array,
    plan: Plan,
    width: int,
    exact: bool,
) -> tuple[BranchState, State, jax.Array, Trace]:
    """Run up to `steps` steps of at most `width` seats; `step` as in `entropix_search.advance`.

    Also returns how many steps there were, and what is settled by now and was not before: `[n, seats]`, valid
    where `emitted`. With `exact` every step computes the same rows, so that no rounding depends on whether
    others branch.
    """
    k = plan.branches
    lead = lambda x: x[::k]
    # The host has all of what does not search, and of a prompt.
    known = (branch_state.search.most > 0) & (branch_state.delivered != UNKNOWN)
    begun = lead(state.status) != PREFILLING
    delivered = jnp.where(known, branch_state.delivered, lead(state.length))
    search = branch_state.search._replace(state=state)
    search, done = entropix_search.advance(step, search, steps, plan, None if exact else width, width * k)
    last = jnp.maximum(delivered, entropix_search.settled(search, plan))
    held = search.text.token.shape[1]
    place = delivered[None] + 1 + jnp.arange(held)[:, None]
    trace = jax.tree.map(lambda x: lead(x)[jnp.arange(delivered.shape[0])[None], place % held], search.text)
    trace = trace._replace(emitted=place <= last)
    away: Any = ()
    branch_state = BranchState(search._replace(state=away), jnp.where(begun, last, UNKNOWN))
    return branch_state, search.state, done, trace


def tallied(branch_state: BranchState) -> tuple[BranchState, jax.Array]:
    """What was counted since the last time, int32 `[len(Tally)]`; it is counted anew from here."""
    tally = branch_state.search.tally
    found = jnp.stack([x.sum() for x in tally])
    return branch_state._replace(
        search=branch_state.search._replace(tally=Tally(*(jnp.zeros_like(x) for x in tally)))
    ), found


def status(branch_state: BranchState, state: State) -> jax.Array:
    """Of each seat, int32 `[seats]`: one that branches runs, even where its first branch has ended."""
    left = branch_state.search.left
    leaders = state.status[:: state.status.shape[0] // left.shape[0]]
    return jnp.where(left > 0, RUNNING, leaders)
