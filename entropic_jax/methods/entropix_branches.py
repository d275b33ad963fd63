"""What `entropix_search` does with the rows of a sequence: judge its branches, go back, branch.

Each is a pure function of all sequences at once, in which those that nothing is due for stay as they are.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..cache import fork, release_rows, rewind
from ..row_subset import RowSubset
from ..sampling.constraints import TopLogprobs
from ..state import FAILED, FULL, RUNNING, STOPPED, State, Trace
from .entropix import ADAPT, EXPLORE, RESAMPLE, Memory

NOTHING, LOOK, BRANCH, RETURN, JUDGE = range(5)
SEED = 0x5BD1E995  # odd, so that no two branches of a sequence draw alike


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Plan:
    """How far a sequence searches; static."""

    branches: int = 4  # rows of a group
    length: int = 8  # tokens of a branch
    window: int = 16  # tokens that may be taken back at once
    rest: int = 8  # tokens between two explorations
    look: bool = True  # one step ahead where nothing is clear
    worth: float = 0.1  # of a nat of entropic time per token, in nats of mean log-probability

    def __post_init__(self) -> None:
        least = dict(branches=1, length=1, window=0, rest=0)
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted are integers of at least {low}")


class Tally(NamedTuple):
    """What the search of each sequence came to; int32 `[sequences]`."""

    explored: jax.Array  # times it branched
    looked: jax.Array  # times it looked one step ahead
    returned: jax.Array  # times it went back
    discarded: jax.Array  # tokens that were computed and are not in the text


class Search(NamedTuple):
    """Sequences that search: `[rows]` is sequences × branches, sequence by sequence."""

    state: State
    text: Trace  # of every row, by position modulo n: [rows, n], the prompt not included
    alive: jax.Array  # bool [rows]: the row takes part in its group
    first: jax.Array  # [rows], log-probability of the token at the fork
    score: jax.Array  # [rows], sum of log-probabilities since then, that one included
    count: jax.Array  # int32 [rows], of so many tokens
    began: jax.Array  # [rows], entropic time at the fork
    mark: jax.Array  # int32 [rows]: where the last uncertain token was drawn (one position below its own),
    earlier: jax.Array  # and the one before; −1 for none
    base: jax.Array  # int32 [sequences], position of the token at the fork
    left: jax.Array  # int32 [sequences], steps until the branches are judged; 0: not branching
    looking: jax.Array  # bool [sequences]: it is one step ahead that they are judged by
    calm: jax.Array  # int32 [sequences], tokens since the last exploration
    turned: jax.Array  # int32 [sequences], positions at which the sequence last went back
    due: jax.Array  # int32 [sequences]: what is to be done before the next step
    most: jax.Array  # int32 [sequences], branches that it may have; 0: it neither branches nor goes back
    tally: Tally


def memory(control: Any) -> Memory | None:
    """The memory of the Entropix among the states of controllers."""
    found = jax.tree.leaves(control, is_leaf=lambda x: isinstance(x, Memory))
    return next((x for x in found if isinstance(x, Memory)), None)


def _with_memory(control: Any, new: Memory) -> Any:
    is_memory = lambda x: isinstance(x, Memory)
    return jax.tree.map(lambda x: new if is_memory(x) else x, control, is_leaf=is_memory)


def said_of(search: Search) -> Memory:
    found = memory(search.state.control)
    assert found is not None
    return found


def wishes(search: Search, fresh: jax.Array, plan: Plan) -> jax.Array:
    """What the leaders that have just drawn a token (bool `[sequences]`) should do before the next step."""
    state = search.state
    lead = lambda x: x[:: plan.branches]
    said = jax.tree.map(lead, said_of(search))
    length, earlier = lead(state.length), lead(search.earlier)
    ready = fresh & (search.most > 0) & (lead(state.status) == RUNNING) & (lead(state.action.temperature) > 0)
    others = said.candidates[:, 1 : plan.branches]
    within = jnp.arange(others.shape[1]) + 1 < search.most[:, None]
    choice = ready & ((others >= 0) & within).any(1)
    explore = choice & (said.quadrant == EXPLORE) & (search.calm >= plan.rest)
    look = choice & (said.quadrant == ADAPT) & plan.look
    # The token at hand is uncertain itself: it is the one before that led here.
    near = (earlier >= 0) & (length - earlier <= plan.window)
    back = ready & (said.quadrant == RESAMPLE) & near & (length > search.turned)
    return jnp.select([explore, look, back], [BRANCH, LOOK, RETURN], NOTHING).astype(jnp.int32)


def _from_rows(state: State, source: jax.Array) -> State:
    """Every row's own part of the state, the cache left out, from the row `source` int32 `[rows]`."""
    shared = ("key", "belief_temperature", "page_policy", "hardware", "cache")
    rows = source.shape[0]
    pick = lambda x: x[source] if x.ndim and x.shape[0] == rows else x
    return state._replace(
        **{name: jax.tree.map(pick, x) for name, x in state._asdict().items() if name not in shared}
    )


def judge(search: Search, plan: Plan) -> Search:
    """The best branch takes the place of the leader, the others give their pages back."""
    sequences, k = search.left.shape[0], plan.branches
    groups = lambda x: x.reshape(sequences, k)
    due = search.due == JUDGE
    said, account = said_of(search), search.state.ledger
    many = jnp.maximum(search.count, 1).astype(jnp.float32)
    rising = (account.entropic_time - search.began) / many
    explored = search.score / many + plan.worth * rising
    value = jnp.where(jnp.repeat(search.looking, k), search.first + said.confidence, explored)
    sound = search.alive & jnp.isfinite(value) & (search.state.status != FAILED)
    best = jnp.argmax(groups(jnp.where(sound, value, -jnp.inf)), 1)
    best = jnp.where(due, best, 0).astype(jnp.int32)

    # The leader and the best change places.
    slot = jnp.arange(k)
    swapped = jnp.where(slot == 0, best[:, None], jnp.where(slot == best[:, None], 0, slot))
    source = (jnp.arange(sequences)[:, None] * k + swapped).reshape(-1)
    lost = jnp.repeat(due, k) & (jnp.tile(slot, sequences) > 0)
    discarded = jnp.where(groups(lost & search.alive[source]), groups(search.count[source]) - 1, 0).sum(1)
    seed = search.state.seed
    state, cache = _from_rows(search.state, source), search.state.cache
    cache = cache._replace(table=cache.table[source], granted=cache.granted[source])
    leads = jnp.tile(slot == 0, sequences)
    total = lambda x: jnp.where(leads, jnp.repeat(groups(x).sum(1), k), 0.0)
    ledger = state.ledger
    state = state._replace(
        seed=jnp.where(leads, seed, state.seed),
        status=jnp.where(lost, FULL, state.status),
        # What the branches cost, the sequence pays.
        ledger=ledger._replace(
            **{
                name: jnp.where(jnp.repeat(due, k), total(getattr(ledger, name)), getattr(ledger, name))
                for name in ("flops", "bytes_read", "seconds")
            }
        ),
        cache=release_rows(cache, lost),
    )
    carried = {
        name: getattr(search, name)[source]
        for name in ("first", "score", "count", "began", "mark", "earlier")
    }
    tally = search.tally
    search = search._replace(
        state=state,
        text=jax.tree.map(lambda x: x[source], search.text),
        alive=search.alive[source] & ~lost,
        left=jnp.where(due, 0, search.left),
        looking=search.looking & ~due,
        calm=jnp.where(due & ~search.looking, 0, search.calm),
        tally=tally._replace(discarded=tally.discarded + discarded),
        **carried,
    )
    advanced = due & (groups(search.count)[:, 0] > 1)
    return search._replace(due=jnp.where(due, wishes(search, advanced, plan), search.due))


def go_back(search: Search, plan: Plan, most: int | None = None) -> Search:
    """Take tokens back as far as the earlier uncertain one, which the next step draws anew.

    Of at most `most` sequences (static; None for all), which is how many pages are looked at.
    """
    state, rows, k = search.state, search.alive.shape[0], plan.branches
    leads = jnp.arange(rows) % k == 0
    row, to = jnp.arange(rows), jnp.maximum(search.earlier, 0)
    cache = state.cache
    entry = jnp.minimum(to // cache.page_size, cache.table.shape[1] - 1)
    shared = cache.references[cache.table[row, entry]] > 1  # what others read stays as it is
    back = jnp.repeat(search.due == RETURN, k) & leads & ~shared
    said, text, length = said_of(search), search.text, state.length
    held = text.token.shape[1]
    at = lambda x: x[row, to % held]
    taken = to[:, None] + 1 + jnp.arange(plan.window)
    gone = back[:, None] & (taken <= length[:, None])
    token = text.token[row[:, None], taken % held]
    vocabulary = state.history.generated.shape[1]
    where = (row[:, None], jnp.where(gone, token, vocabulary))
    first = text.token[row, (to + 1) % held]
    keep = lambda new, old: jnp.where(back, new, old)
    state = state._replace(
        length=keep(to, length),
        token=keep(at(text.token), state.token),
        history=state.history._replace(generated=state.history.generated.at[where].add(-1, mode="drop")),
        signal=state.signal._replace(entropy=keep(at(text.entropy), state.signal.entropy)),
        ledger=state.ledger._replace(entropic_time=keep(at(text.entropic_time), state.ledger.entropic_time)),
        control=_with_memory(state.control, said._replace(barred=keep(first, said.barred))),
        cache=rewind(cache, back, to, most),
    )
    by_sequence = lambda x: x[::k]
    turns, tally = by_sequence(back), search.tally
    return search._replace(
        state=state,
        mark=keep(-1, search.mark),
        earlier=keep(-1, search.earlier),
        turned=jnp.where(turns, by_sequence(length), search.turned),
        tally=tally._replace(
            returned=tally.returned + turns.astype(jnp.int32),
            discarded=tally.discarded + jnp.where(turns, by_sequence(length - to), 0),
        ),
    )


def _drawn(text: Trace, new: jax.Array, length: jax.Array, token: jax.Array, score: jax.Array) -> Trace:
    """The texts with another token, of log-probability `score`, at the end of those flagged; all `[rows]`."""
    rows, held = text.token.shape
    row, place = jnp.arange(rows), jnp.where(new, length % held, held)
    text = text._replace(
        token=text.token.at[row, place].set(token, mode="drop"),
        surprisal=text.surprisal.at[row, place].set(-score, mode="drop"),
    )
    if not isinstance(text.top_logprobs, TopLogprobs):
        return text
    shown = jax.tree.map(lambda x: x[row, length % held], text.top_logprobs)
    same = shown.token == token[:, None]
    known = jnp.where(same, shown.token_logprob, -jnp.inf).max(1)
    logprob = jnp.where(same.any(1), known, score)  # of what is not among them, penalties included
    put = text.top_logprobs.logprob.at[row, place].set(logprob, mode="drop")
    return text._replace(top_logprobs=text.top_logprobs._replace(logprob=put))


def branch(search: Search, plan: Plan, most: int | None = None) -> Search:
    """Give each candidate of the sequences that branch a row of its own.

    At most `most` sequences do (static; None for all), which is for how many pages are copied.
    """
    sequences, k = search.left.shape[0], plan.branches
    rows, slot = sequences * k, jnp.arange(k)
    wanted = (search.due == BRANCH) | (search.due == LOOK)
    leader = jnp.arange(sequences) * k
    said = said_of(search)
    offered = said.candidates.shape[1]
    pad = ((0, 0), (0, max(0, k - offered)))
    candidate = jnp.pad(said.candidates[leader, :k], pad, constant_values=-1)
    likely = jnp.pad(said.log_probability[leader, :k], pad)
    real = wanted[:, None] & (candidate >= 0) & (slot > 0) & (slot < search.most[:, None])
    own = leader[:, None] + slot
    state = search.state
    forks = RowSubset(real[:, 1:].reshape(-1), None if most is None else most * (k - 1))
    sources = forks.gather(jnp.repeat(leader, k - 1))
    places = forks.gather(jnp.where(real, own, rows)[:, 1:].reshape(-1), rows)
    cache, enough = fork(state.cache, sources, places, state.length[sources])
    made = real & jnp.pad(forks.scatter(enough, False).reshape(sequences, k - 1), ((0, 0), (1, 0)))
    some = made.any(1)
    new = made.reshape(-1)

    first = candidate[:, :1]
    source = jnp.where(made, leader[:, None], own).reshape(-1)
    row, token, score = jnp.arange(rows), candidate.reshape(-1), likely.reshape(-1)
    state = _from_rows(state, source)
    before = jnp.repeat(first[:, 0], k)
    vocabulary = state.history.generated.shape[1]
    counted = state.history.generated.at[row, jnp.where(new, before, vocabulary)].add(-1, mode="drop")
    counted = counted.at[row, jnp.where(new, token, vocabulary)].add(1, mode="drop")
    ended = (state.stop == token[:, None]).any(1)
    zero = lambda x: jnp.where(new, 0.0, x)
    ledger = state.ledger
    state = state._replace(
        seed=jnp.where(new, state.seed + jnp.tile(slot, sequences) * SEED, state.seed),
        token=jnp.where(new, token, state.token),
        status=jnp.where(new & ended, STOPPED, state.status),
        history=state.history._replace(generated=counted),
        signal=state.signal._replace(surprisal=jnp.where(new, -score, state.signal.surprisal)),
        ledger=ledger._replace(
            flops=zero(ledger.flops), bytes_read=zero(ledger.bytes_read), seconds=zero(ledger.seconds)
        ),
        cache=cache,
    )
    text = _drawn(jax.tree.map(lambda x: x[source], search.text), new, state.length, token, score)
    whole = jnp.repeat(some, k)
    begin = lambda value, old: jnp.where(whole, value, old)
    exploring, tally = some & (search.due == BRANCH), search.tally
    return search._replace(
        state=state,
        text=text,
        alive=jnp.where(whole, new | (row % k == 0), search.alive),
        first=begin(-state.signal.surprisal, search.first),
        score=begin(-state.signal.surprisal, search.score),
        count=begin(1, search.count),
        began=begin(state.ledger.entropic_time, search.began),
        mark=search.mark[source],
        earlier=search.earlier[source],
        base=jnp.where(some, state.length[leader], search.base),
        left=jnp.where(some, jnp.where(exploring, plan.length, 1), search.left),
        looking=jnp.where(some, ~exploring, search.looking),
        tally=tally._replace(
            explored=tally.explored + exploring.astype(jnp.int32),
            looked=tally.looked + (some & ~exploring).astype(jnp.int32),
        ),
    )
