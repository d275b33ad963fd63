"""Branch operations of `entropix_search`: select the best branch, backtrack, branch.

Each is a pure function of all sequences at once; sequences without a pending action of that kind stay
unchanged.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..state import FAILED, FULL, ROW_FIELDS, RUNNING, STOPPED, State, TopLogprobs, Trace
from ..state.cache import fork, release_rows, rewind
from ..state.row_subset import RowSubset, map_rows
from .entropix import ADAPT, EXPLORE, RESAMPLE, EntropixState

NO_ACTION, LOOK_AHEAD, BRANCH, BACKTRACK, SELECT_BRANCH = range(5)
SEED = 0x5BD1E995  # odd, so that no two branches of a sequence draw alike


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SearchPlan:
    """Limits of a search; static.

    Args:
        branches: rows per sequence, at least 1.
        length: tokens of a branch, at least 1.
        window: tokens that may be taken back at once.
        rest: tokens between two explorations.
        look: look one step ahead in the ADAPT quadrant.
        worth: value of a nat of entropic time per token, in nats of mean log-probability.

    Raises:
        ValueError: for a value below its least.
    """

    branches: int = 4
    length: int = 8
    window: int = 16
    rest: int = 8
    look: bool = True
    worth: float = 0.1

    def __post_init__(self) -> None:
        least = dict(branches=1, length=1, window=0, rest=0)
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be an integer of at least {low}; got {getattr(self, name)}")


class SearchCounts(NamedTuple):
    """Event counts of each sequence's search; int32 `[sequences]`."""

    explored: jax.Array  # times it branched
    looked: jax.Array  # times it looked one step ahead
    returned: jax.Array  # times it backtracked
    discarded: jax.Array  # tokens computed that are not in the text


class SearchState(NamedTuple):
    """State of a search; `[rows]` is sequences × branches, sequence by sequence."""

    state: State
    text: Trace  # trace of every row by position modulo n, [rows, n]; without the prompt
    alive: jax.Array  # bool [rows]: the row holds a branch
    first_log_probability: jax.Array  # [rows], log-probability of the token at the fork
    total_log_probability: jax.Array  # [rows], sum of log-probabilities since the fork, inclusive
    num_tokens: jax.Array  # int32 [rows], tokens since the fork, inclusive
    fork_entropic_time: jax.Array  # [rows], entropic time at the fork
    uncertain_position: (
        jax.Array
    )  # int32 [rows]: where the last uncertain token was drawn (one position below its own),
    previous_uncertain_position: jax.Array  # and the one before; −1 for none
    fork_position: jax.Array  # int32 [sequences], position of the token at the fork
    steps_left: jax.Array  # int32 [sequences], steps until a branch is selected; 0: not branching
    looking_ahead: jax.Array  # bool [sequences]: the branches look one step ahead
    tokens_since_exploration: jax.Array  # int32 [sequences], tokens since the last exploration
    last_backtrack: jax.Array  # int32 [sequences], length at the last backtrack
    pending_action: jax.Array  # int32 [sequences]: action before the next step, NO_ACTION … SELECT_BRANCH
    max_branches: (
        jax.Array
    )  # int32 [sequences], branches that it may have; 0: it neither branches nor goes back
    counts: SearchCounts


def find_entropix_state(control: Any) -> EntropixState | None:
    """The `EntropixState` within a controller state, None if there is none."""
    result = jax.tree.leaves(control, is_leaf=lambda x: isinstance(x, EntropixState))
    return next((x for x in result if isinstance(x, EntropixState)), None)


def _with_memory(control: Any, new: EntropixState) -> Any:
    is_memory = lambda x: isinstance(x, EntropixState)
    return jax.tree.map(lambda x: new if is_memory(x) else x, control, is_leaf=is_memory)


def entropix_state(search: SearchState) -> EntropixState:
    """The state of the law in a search."""
    result = find_entropix_state(search.state.control)
    assert result is not None
    return result


def next_actions(search: SearchState, fresh: jax.Array, plan: SearchPlan) -> jax.Array:
    """The action of each sequence before the next step, int32 `[sequences]`.

    Args:
        search: state of the search.
        fresh: bool `[sequences]`, a token was emitted in this step.
        plan: the plan of the search; static.
    """
    state = search.state
    lead = lambda x: x[:: plan.branches]
    law_state = jax.tree.map(lead, entropix_state(search))
    length, earlier = lead(state.length), lead(search.previous_uncertain_position)
    ready = (
        fresh
        & (search.max_branches > 0)
        & (lead(state.status) == RUNNING)
        & (lead(state.action.temperature) > 0)
    )
    others = law_state.candidates[:, 1 : plan.branches]
    within = jnp.arange(others.shape[1]) + 1 < search.max_branches[:, None]
    choice = ready & ((others >= 0) & within).any(1)
    explore = choice & (law_state.quadrant == EXPLORE) & (search.tokens_since_exploration >= plan.rest)
    look = choice & (law_state.quadrant == ADAPT) & plan.look
    # The newest token is uncertain itself: the previous uncertain token led to it.
    near = (earlier >= 0) & (length - earlier <= plan.window)
    back = ready & (law_state.quadrant == RESAMPLE) & near & (length > search.last_backtrack)
    return jnp.select([explore, look, back], [BRANCH, LOOK_AHEAD, BACKTRACK], NO_ACTION).astype(jnp.int32)


def _from_rows(state: State, source: jax.Array) -> State:
    """Copies per-row state, without the cache, from the rows `source`, int32 `[rows]`."""
    return state._replace(
        **{name: map_rows(lambda x: x[source], getattr(state, name)) for name in ROW_FIELDS}
    )


def select_branch(search: SearchState, plan: SearchPlan) -> SearchState:
    """The best branch becomes the leading row; the others release their pages."""
    sequences, k = search.steps_left.shape[0], plan.branches
    groups = lambda x: x.reshape(sequences, k)
    due = search.pending_action == SELECT_BRANCH
    law_state, account = entropix_state(search), search.state.ledger
    num_tokens = jnp.maximum(search.num_tokens, 1).astype(jnp.float32)
    resolved_per_token = (account.entropic_time - search.fork_entropic_time) / num_tokens
    explored = search.total_log_probability / num_tokens + plan.worth * resolved_per_token
    value = jnp.where(
        jnp.repeat(search.looking_ahead, k), search.first_log_probability + law_state.confidence, explored
    )
    sound = search.alive & jnp.isfinite(value) & (search.state.status != FAILED)
    best = jnp.argmax(groups(jnp.where(sound, value, -jnp.inf)), 1)
    best = jnp.where(due, best, 0).astype(jnp.int32)

    # The leading row and the best branch swap places.
    slot = jnp.arange(k)
    swapped = jnp.where(slot == 0, best[:, None], jnp.where(slot == best[:, None], 0, slot))
    source = (jnp.arange(sequences)[:, None] * k + swapped).reshape(-1)
    lost = jnp.repeat(due, k) & (jnp.tile(slot, sequences) > 0)
    discarded = jnp.where(groups(lost & search.alive[source]), groups(search.num_tokens[source]) - 1, 0).sum(
        1
    )
    seed = search.state.seed
    state, cache = _from_rows(search.state, source), search.state.cache
    cache = cache._replace(table=cache.table[source], granted=cache.granted[source])
    leads = jnp.tile(slot == 0, sequences)

    def total(x):
        return jnp.where(leads, jnp.repeat(groups(x).sum(1), k), 0.0)

    ledger = state.ledger
    state = state._replace(
        seed=jnp.where(leads, seed, state.seed),
        status=jnp.where(lost, FULL, state.status),
        # The sequence is charged for all its branches.
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
        for name in (
            "first_log_probability",
            "total_log_probability",
            "num_tokens",
            "fork_entropic_time",
            "uncertain_position",
            "previous_uncertain_position",
        )
    }
    counts = search.counts
    search = search._replace(
        state=state,
        text=jax.tree.map(lambda x: x[source], search.text),
        alive=search.alive[source] & ~lost,
        steps_left=jnp.where(due, 0, search.steps_left),
        looking_ahead=search.looking_ahead & ~due,
        tokens_since_exploration=jnp.where(due & ~search.looking_ahead, 0, search.tokens_since_exploration),
        counts=counts._replace(discarded=counts.discarded + discarded),
        **carried,
    )
    advanced = due & (groups(search.num_tokens)[:, 0] > 1)
    return search._replace(
        pending_action=jnp.where(due, next_actions(search, advanced, plan), search.pending_action)
    )


def backtrack(search: SearchState, plan: SearchPlan, max_sequences: int | None = None) -> SearchState:
    """Takes back tokens up to the previous uncertain one, which the next step draws again.

    Args:
        search: state of the search.
        plan: the plan of the search; static.
        max_sequences: sequences that backtrack at most, which bounds the pages that are read; static, None
            for all.
    """
    state, rows, k = search.state, search.alive.shape[0], plan.branches
    leads = jnp.arange(rows) % k == 0
    row, to = jnp.arange(rows), jnp.maximum(search.previous_uncertain_position, 0)
    cache = state.cache
    entry = jnp.minimum(to // cache.page_size, cache.table.shape[1] - 1)
    shared = cache.references[cache.table[row, entry]] > 1  # a shared page is not changed
    back = jnp.repeat(search.pending_action == BACKTRACK, k) & leads & ~shared
    law_state, text, length = entropix_state(search), search.text, state.length
    held = text.token.shape[1]
    at = lambda x: x[row, to % held]
    taken = to[:, None] + 1 + jnp.arange(plan.window)
    gone = back[:, None] & (taken <= length[:, None])
    token = text.token[row[:, None], taken % held]
    history, vocabulary = state.history, state.history.generated.shape[1]
    occurrences = (row[:, None], jnp.where(gone, token, vocabulary))
    num_gone = gone.sum(1, dtype=jnp.int32)
    last = history.number[:, None] - num_gone[:, None] + jnp.arange(plan.window)
    window = history.latest.shape[1]
    emptied = (row[:, None], jnp.where(jnp.arange(plan.window) < num_gone[:, None], last % window, window))
    first = text.token[row, (to + 1) % held]
    keep = lambda new, old: jnp.where(back, new, old)
    state = state._replace(
        length=keep(to, length),
        token=keep(at(text.token), state.token),
        history=history._replace(
            generated=history.generated.at[occurrences].add(-1, mode="drop"),
            latest=history.latest.at[emptied].set(-1, mode="drop"),
            number=history.number - num_gone,
        ),
        measured=state.measured._replace(entropy=keep(at(text.entropy), state.measured.entropy)),
        ledger=state.ledger._replace(entropic_time=keep(at(text.entropic_time), state.ledger.entropic_time)),
        control=_with_memory(
            state.control, law_state._replace(banned_token=keep(first, law_state.banned_token))
        ),
        cache=rewind(cache, back, to, max_sequences),
    )
    by_sequence = lambda x: x[::k]
    returns, counts = by_sequence(back), search.counts
    return search._replace(
        state=state,
        uncertain_position=keep(-1, search.uncertain_position),
        previous_uncertain_position=keep(-1, search.previous_uncertain_position),
        last_backtrack=jnp.where(returns, by_sequence(length), search.last_backtrack),
        counts=counts._replace(
            returned=counts.returned + returns.astype(jnp.int32),
            discarded=counts.discarded + jnp.where(returns, by_sequence(length - to), 0),
        ),
    )


def _drawn(text: Trace, new: jax.Array, length: jax.Array, token: jax.Array, score: jax.Array) -> Trace:
    """Replaces the last token of the flagged rows, of log-probability `score`; all arguments `[rows]`."""
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


def branch(search: SearchState, plan: SearchPlan, max_sequences: int | None = None) -> SearchState:
    """Forks a row for each candidate of the sequences that branch.

    Args:
        search: state of the search.
        plan: the plan of the search; static.
        max_sequences: sequences that branch at most, which bounds the pages that are copied; static, None
            for all.
    """
    sequences, k = search.steps_left.shape[0], plan.branches
    rows, slot = sequences * k, jnp.arange(k)
    forking = (search.pending_action == BRANCH) | (search.pending_action == LOOK_AHEAD)
    leader = jnp.arange(sequences) * k
    law_state = entropix_state(search)
    offered = law_state.candidates.shape[1]
    pad = ((0, 0), (0, max(0, k - offered)))
    candidate = jnp.pad(law_state.candidates[leader, :k], pad, constant_values=-1)
    likely = jnp.pad(law_state.log_probability[leader, :k], pad)
    real = forking[:, None] & (candidate >= 0) & (slot > 0) & (slot < search.max_branches[:, None])
    rows_of_sequence = leader[:, None] + slot
    state = search.state
    forks = RowSubset(real[:, 1:].reshape(-1), None if max_sequences is None else max_sequences * (k - 1))
    sources = forks.gather(jnp.repeat(leader, k - 1))
    places = forks.gather(jnp.where(real, rows_of_sequence, rows)[:, 1:].reshape(-1), rows)
    cache, enough = fork(state.cache, sources, places, state.length[sources])
    forked = real & jnp.pad(forks.scatter(enough, False).reshape(sequences, k - 1), ((0, 0), (1, 0)))
    any_forked = forked.any(1)
    new = forked.reshape(-1)

    first = candidate[:, :1]
    source = jnp.where(forked, leader[:, None], rows_of_sequence).reshape(-1)
    row, token, score = jnp.arange(rows), candidate.reshape(-1), likely.reshape(-1)
    state = _from_rows(state, source)
    before = jnp.repeat(first[:, 0], k)
    history, vocabulary = state.history, state.history.generated.shape[1]
    counted = history.generated.at[row, jnp.where(new, before, vocabulary)].add(-1, mode="drop")
    counted = counted.at[row, jnp.where(new, token, vocabulary)].add(1, mode="drop")
    window = history.latest.shape[1]
    place = jnp.where(new, (history.number - 1) % window, window)
    ended = (state.stop == token[:, None]).any(1)
    zero = lambda x: jnp.where(new, 0.0, x)
    ledger = state.ledger
    state = state._replace(
        seed=jnp.where(new, state.seed + jnp.tile(slot, sequences) * SEED, state.seed),
        token=jnp.where(new, token, state.token),
        status=jnp.where(new & ended, STOPPED, state.status),
        history=history._replace(
            generated=counted, latest=history.latest.at[row, place].set(token, mode="drop")
        ),
        measured=state.measured._replace(surprisal=jnp.where(new, -score, state.measured.surprisal)),
        ledger=ledger._replace(
            flops=zero(ledger.flops), bytes_read=zero(ledger.bytes_read), seconds=zero(ledger.seconds)
        ),
        cache=cache,
    )
    text = _drawn(jax.tree.map(lambda x: x[source], search.text), new, state.length, token, score)
    by_row = jnp.repeat(any_forked, k)
    begin = lambda value, old: jnp.where(by_row, value, old)
    exploring, counts = any_forked & (search.pending_action == BRANCH), search.counts
    return search._replace(
        state=state,
        text=text,
        alive=jnp.where(by_row, new | (row % k == 0), search.alive),
        first_log_probability=begin(-state.measured.surprisal, search.first_log_probability),
        total_log_probability=begin(-state.measured.surprisal, search.total_log_probability),
        num_tokens=begin(1, search.num_tokens),
        fork_entropic_time=begin(state.ledger.entropic_time, search.fork_entropic_time),
        uncertain_position=search.uncertain_position[source],
        previous_uncertain_position=search.previous_uncertain_position[source],
        fork_position=jnp.where(any_forked, state.length[leader], search.fork_position),
        steps_left=jnp.where(any_forked, jnp.where(exploring, plan.length, 1), search.steps_left),
        looking_ahead=jnp.where(any_forked, ~exploring, search.looking_ahead),
        counts=counts._replace(
            explored=counts.explored + exploring.astype(jnp.int32),
            looked=counts.looked + (any_forked & ~exploring).astype(jnp.int32),
        ),
    )
