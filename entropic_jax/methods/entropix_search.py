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

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..cache import Cache
from ..state import FULL, RUNNING, Trace
from .entropix_moves import (
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
    blank = jax.eval_shape(lambda s: loop.step(decoder, params, controller, s)[1], state)
    text = jax.tree.map(lambda x: jnp.zeros((rows, context + 1), x.dtype), blank)
    # The last token of a prompt is what the first one drawn may be taken back to.
    text = text._replace(token=text.token.at[jnp.arange(rows), state.length].set(state.token))
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
        tally=Tally(*(whole(count) for _ in Tally._fields)),
    )


@partial(jax.jit, static_argnames=("decoder", "plan"), donate_argnames="search")
def generate(
    decoder: Any, params: Any, controller: Any, search: Search, steps: jax.Array | int, *, plan: Plan
) -> Search:
    """Run up to `steps` steps in one launch, fewer if every sequence ends. The search is consumed.

    A step advances the leaders, or, while any sequence branches, every row that lives.
    """
    sequences = search.left.shape[0]

    def stepping(wide: bool):
        def running(carry):
            done, search = carry
            busy = (search.left > 0).any()
            go = (done < steps) & (search.due == NOTHING).all() & (search.state.status == RUNNING).any()
            return go & (busy if wide else ~busy)

        def advance(carry):
            done, search = carry
            width = None if wide else sequences
            state, trace = loop.step(decoder, params, controller, search.state, width=width)
            return done + 1, note(search._replace(state=state), trace, plan)

        return lambda carry: jax.lax.while_loop(running, advance, carry)

    def going(carry):
        done, search = carry
        return (done < steps) & (search.state.status == RUNNING).any()

    def turn(carry):
        carry = stepping(wide=False)(carry)
        if plan.branches > 1:
            carry = stepping(wide=True)(carry)
        done, search = carry
        return done, rearrange(search, plan)

    return jax.lax.while_loop(going, turn, (jnp.int32(0), search))[1]


def note(search: Search, trace: Trace, plan: Plan) -> Search:
    """Enter a step into the texts and the scores, and see what is due."""
    state, rows = search.state, search.alive.shape[0]
    groups = lambda x: x.reshape(-1, plan.branches)
    emitted, said = trace.emitted, said_of(search)
    place = jnp.where(emitted, state.length, search.text.token.shape[1])
    enter = lambda all_, x: all_.at[jnp.arange(rows), place].set(x, mode="drop")
    uncertain = emitted & said.uncertain & (said.since > 0)  # what is said is not taken back
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


def rearrange(search: Search, plan: Plan) -> Search:
    """Do what is due: judge branches, branch, go back; who was judged may branch again at once.

    To go back reads pages and to branch writes them. In this order the one depends on the other, so that XLA
    writes in place; in the other, nothing says that the reading comes first, and it copies the pool.
    """
    if plan.branches > 1:
        search = branch(judge(search, plan), plan)
    search = go_back(search, plan)
    return search._replace(due=jnp.full_like(search.due, NOTHING))


def close(search: Search, plan: Plan, ended: np.ndarray) -> Search:
    """End the sequences flagged bool `[sequences]`, whatever they are at: their rows advance no more."""
    rows = jnp.repeat(jnp.asarray(ended), plan.branches)
    status = jnp.where(rows & (search.state.status == RUNNING), FULL, search.state.status)
    return search._replace(
        state=search.state._replace(status=status), left=jnp.where(jnp.asarray(ended), 0, search.left)
    )


def settled(search: Search, plan: Plan) -> np.ndarray:
    """The last position of each sequence's text that nothing can change any more, int `[sequences]`."""
    state, k = search.state, plan.branches
    found = jax.device_get((state.length, state.status, search.alive, search.mark, search.base, search.left))
    length, status, alive, mark, base, left = found
    open_ = alive & (mark >= 0) & (length + 1 - mark <= plan.window)
    earliest = (
        np.where(open_, mark, length).reshape(-1, k).min(1, where=alive.reshape(-1, k), initial=2**31 - 1)
    )
    length, status = length[::k], status[::k]
    last = np.minimum(np.where(left > 0, base - 1, length), earliest)
    return np.where((status != RUNNING) & (left == 0), length, last)


def texts(search: Search, plan: Plan) -> list[Trace]:
    """The trace of every token of each sequence's text so far, the prompt left out; `[tokens]` each."""
    host, length = jax.device_get((search.text, search.state.length[:: plan.branches]))
    found = []
    for number, last in enumerate(length):
        row = jax.tree.map(lambda x: x[number * plan.branches, : last + 1], host)
        found.append(jax.tree.map(lambda x: x[row.emitted], row))
    return found
