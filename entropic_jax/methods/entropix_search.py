"""Branches and second thoughts around `entropix`: what a sequence cannot do in one row of the cache.

Every sequence has a group of rows of which the first leads; the others hold nothing until the sequence
branches. What its law finds decides, after every step:

* explore: each candidate continues in a row of its own for `length` tokens, over shared pages; that with the
  best mean log-probability, plus `worth` times the entropic time per token, goes on;
* adapt: the same for one step, in which each candidate is judged by what it leads to: its log-probability
  plus the confidence of the state after it. That step draws the token after it as well, so looking ahead
  costs rows and no steps;
* resample: back to the last uncertain token, at most `window` tokens ago, which is drawn anew, the old one
  barred. A sequence goes back again only beyond where it turned round, so that it ends.

All of it runs on the device, in one launch; a fork copies at most one page of a row. A branch for which there
is no page is left out.

Source: xjdr-alt/entropix (2024), which describes this and does none of it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..cache import Cache
from ..state import FULL, RUNNING, State, Trace
from .entropix_branches import (
    JUDGE,
    NOTHING,
    Plan,
    Search,
    Tally,
    branch,
    go_back,
    judge,
    memory,
    said_of,
    wishes,
)


def begin(
    decoder: Any,
    params: Any,
    controller: Any,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    *,
    max_tokens: int | Sequence[int],
    seeds: Sequence[int] | None = None,
    **given: Any,
) -> Search:
    """As `loop.start`, for a cache of `len(prompts) · plan.branches` rows; `given.sample` is for all rows.

    Raises ValueError where the cache does not fit, or keeps surprisals, which cannot be taken back.
    """
    count, rows = len(prompts), len(prompts) * plan.branches
    if count == 0 or not all(map(len, prompts)):
        raise ValueError("prompts is or holds an empty list; accepted is at least one prompt, none empty")
    if cache.table.shape[0] != rows:
        raise ValueError(
            f"cache has {cache.table.shape[0]} rows; accepted are {rows}, {plan.branches} for each prompt"
        )
    if cache.surprisal is not None:
        raise ValueError("cache keeps surprisals; accepted is one allocated without")
    spread = lambda values: np.repeat(np.broadcast_to(np.asarray(values, np.int32), count), plan.branches)
    texts: list[Sequence[int]] = [[] for _ in range(rows)]
    texts[:: plan.branches] = prompts
    state = loop.start(
        decoder,
        params,
        controller,
        cache,
        texts,
        max_tokens=spread(max_tokens).tolist(),
        seeds=spread(np.arange(count) if seeds is None else seeds).tolist(),
        **given,
    )
    if memory(state.control) is None:
        raise ValueError(f"controller is {type(controller).__name__}; accepted is one that holds an Entropix")
    context = cache.table.shape[1] * cache.page_size
    trace = jax.eval_shape(lambda s: loop.step(decoder, params, controller, s)[1], state)
    return begun(state, trace, plan, context + 1)


def begun(state: State, trace: Trace, plan: Plan, held: int) -> Search:
    """The search of sequences whose prompts are in the cache; it keeps the last `held` positions of a text.

    `trace` has the shapes of that of a step. `held` is at least what may still change, `unsettled(plan)`, and
    what a launch adds; nothing of a text is lost where it is more than a row can have.
    """
    rows = state.status.shape[0]
    count = rows // plan.branches
    text = jax.tree.map(lambda x: jnp.zeros((rows, held, *x.shape[1:]), x.dtype), trace)
    # The last token of a prompt is what the first one drawn may be taken back to.
    text = text._replace(token=text.token + state.token[:, None])
    whole = lambda size, value=0: jnp.full(size, value, jnp.int32)
    real = lambda: jnp.zeros(rows, jnp.float32)
    return Search(
        state=state,
        text=text,
        alive=state.status == RUNNING,
        first=real(),
        score=real(),
        count=whole(rows),
        began=real(),
        mark=whole(rows, -1),
        earlier=whole(rows, -1),
        base=whole(count),
        left=whole(count),
        looking=jnp.zeros(count, bool),
        calm=whole(count, plan.rest),
        turned=whole(count),
        due=whole(count, NOTHING),
        most=whole(count, plan.branches),
        tally=Tally(*(whole(count) for _ in Tally._fields)),
    )


@partial(jax.jit, static_argnames=("decoder", "plan"), donate_argnames="search")
def generate(
    decoder: Any, params: Any, controller: Any, search: Search, steps: jax.Array | int, *, plan: Plan
) -> Search:
    """Run up to `steps` steps in one launch, fewer if every sequence ends. The search is consumed.

    A step advances the leaders, or, while any sequence branches, every row that lives.
    """

    def step(state: State, done: jax.Array, width: int | None) -> tuple[State, Trace]:
        return loop.step(decoder, params, controller, state, width=width)

    return advance(step, search, steps, plan, search.left.shape[0], None)[0]


def advance(
    step: Callable[[State, jax.Array, int | None], tuple[State, Trace]],
    search: Search,
    steps: jax.Array | int,
    plan: Plan,
    narrow: int | None,
    wide: int | None,
) -> tuple[Search, jax.Array]:
    """As `generate`, by steps of one's own; also returns how many there were, int32 `[]`.

    `step(state, done, width)` is one of the loop after `done` others, which computes `width` rows: `narrow`
    while no sequence branches, unless that is None, else `wide`.
    """

    def stepping(width: int | None, fits: Callable[[jax.Array], Any]):
        def running(carry):
            done, search = carry
            go = (done < steps) & (search.due == NOTHING).all() & (search.state.status == RUNNING).any()
            return go & fits((search.left > 0).any())

        def body(carry):
            done, search = carry
            state, trace = step(search.state, done, width)
            return done + 1, note(search._replace(state=state), trace, plan)

        return lambda carry: jax.lax.while_loop(running, body, carry)

    def going(carry):
        done, search = carry
        return (done < steps) & (search.state.status == RUNNING).any()

    def turn(carry):
        if narrow is None:
            carry = stepping(wide, lambda _: True)(carry)
        else:
            carry = stepping(narrow, jnp.logical_not)(carry)
            if plan.branches > 1:
                carry = stepping(wide, lambda busy: busy)(carry)
        done, search = carry
        due = lambda search: (search.due != NOTHING).any()
        return done, jax.lax.while_loop(due, lambda search: rearrange(search, plan, narrow), search)

    done, search = jax.lax.while_loop(going, turn, (jnp.int32(0), search))
    return search, done


def note(search: Search, trace: Trace, plan: Plan) -> Search:
    """Enter a step into the texts and the scores, and see what is due."""
    state, rows = search.state, search.alive.shape[0]
    groups = lambda x: x.reshape(-1, plan.branches)
    emitted, said = trace.emitted, said_of(search)
    held = search.text.token.shape[1]
    place = jnp.where(emitted, state.length % held, held)
    enter = lambda all_, x: all_.at[jnp.arange(rows), place].set(x, mode="drop")
    uncertain = emitted & said.uncertain & (said.since > 0)  # what is said is not taken back
    uncertain &= jnp.repeat(search.most > 0, plan.branches)
    branching, left = search.left > 0, jnp.maximum(search.left - 1, 0)
    over = ~(groups(search.alive) & (groups(state.status) == RUNNING)).any(1)
    search = search._replace(
        text=jax.tree.map(enter, search.text, trace),
        score=search.score - jnp.where(emitted, trace.surprisal, 0.0),
        count=search.count + emitted.astype(jnp.int32),
        mark=jnp.where(uncertain, state.length - 1, search.mark),
        earlier=jnp.where(uncertain, search.mark, search.earlier),
        left=left,
        calm=search.calm + groups(emitted)[:, 0].astype(jnp.int32),
    )
    wished = wishes(search, groups(emitted)[:, 0] & ~branching, plan)
    return search._replace(due=jnp.where(branching & ((left == 0) | over), JUDGE, wished))


def rearrange(search: Search, plan: Plan, most: int | None = None) -> Search:
    """Do what is due: judge branches, branch, go back; who was judged may branch again at once.

    It is due for at most `most` sequences (static; None for all).

    To go back reads pages and to branch writes them. In this order the one depends on the other, so that XLA
    writes in place; in the other, nothing says that the reading comes first, and it copies the pool.
    """
    if plan.branches > 1:
        search = branch(judge(search, plan), plan, most)
    search = go_back(search, plan, most)
    return search._replace(due=jnp.full_like(search.due, NOTHING))


def close(search: Search, plan: Plan, ended: np.ndarray) -> Search:
    """End the sequences flagged bool `[sequences]`, whatever they are at: their rows advance no more."""
    rows = jnp.repeat(jnp.asarray(ended), plan.branches)
    status = jnp.where(rows & (search.state.status == RUNNING), FULL, search.state.status)
    return search._replace(
        state=search.state._replace(status=status), left=jnp.where(jnp.asarray(ended), 0, search.left)
    )


def unsettled(plan: Plan) -> int:
    """How many of the last tokens of a text may still change, at most."""
    return plan.window + plan.length + 1


def settled(search: Search, plan: Plan) -> jax.Array:
    """The last position of each sequence's text that nothing can change any more, int32 `[sequences]`."""
    state, mark = search.state, search.mark
    lead = lambda x: x[:: plan.branches]
    open_ = (mark >= 0) & (state.length + 1 - mark <= plan.window)
    earliest = jnp.where(search.alive, jnp.where(open_, mark, state.length), jnp.iinfo(jnp.int32).max)
    earliest = earliest.reshape(-1, plan.branches).min(1)
    length, branching = lead(state.length), search.left > 0
    last = jnp.minimum(jnp.where(branching, search.base - 1, length), earliest)
    return jnp.where((lead(state.status) != RUNNING) & ~branching, length, last)


def texts(search: Search, plan: Plan) -> list[Trace]:
    """The trace of every token of each sequence's text so far, the prompt left out; `[tokens]` each."""
    host, length = jax.device_get((search.text, search.state.length[:: plan.branches]))
    found = []
    for number, last in enumerate(length):
        row = jax.tree.map(lambda x: x[number * plan.branches, : last + 1], host)
        found.append(jax.tree.map(lambda x: x[row.emitted], row))
    return found
