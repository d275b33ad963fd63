"""Prefill: reads prompt tokens into the KV cache, in chunks; the offline loop and the engine share it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import entropy, sampling
from ..attention.attend import TokenSpan
from ..attention.page_selection import PagePolicy
from ..control import Controller
from ..mesh import gather_last_axis, sharding
from ..sampling.constraints import top_logprobs
from ..state import FULL, PREFILLING, RUNNING, Hardware, State, TopLogprobs, ledger, plain_action, unmeasured
from ..state.cache import Cache, grant, note_surprisal
from ..state.decoder import Decoder
from ..state.row_subset import RowSubset, require_rows
from .batch import gather, scatter
from .forward import forward
from .start_check import (
    check_controller_and_cache,
    check_limits,
    check_parts,
    check_prompts,
    check_randomness_and_belief,
    check_speculator,
)

PREFILL_CHUNK = 512  # positions of a row that one prefill launch reads at most; always a power of two


Array = Any  # of NumPy on the host, of JAX in a program


class PrefillChunk(NamedTuple):
    """The next tokens of some prompts."""

    rows: Array  # int32 [p], the row of each prompt; past the last where there is none
    tokens: Array  # int32 [p, n + 1]: the chunk, and the token that follows it
    num_tokens: Array  # int32 [p], how many of the n belong to the chunk
    total: Array  # int32 [p], positions of the cache that the whole prompt takes


class PrefillOutput(NamedTuple):
    """The result of one prefill launch."""

    granted: jax.Array  # bool [p]: there were pages; a row without is left as it was
    table: jax.Array  # int32 [p, most pages of a row], the page table after the chunk
    scores: TopLogprobs | tuple[()]  # [p, n, …], of the token after each position, where asked for


def start(
    decoder: Decoder,
    params: Any,
    controller: Controller,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    *,
    key: jax.Array,
    max_tokens: int | Sequence[int],
    sample: sampling.Sampling | None = None,
    seeds: Sequence[int] | None = None,
    stop: Sequence[Sequence[int]] = (),
    belief_temperature: float = 1.0,
    page_policy: PagePolicy | None = None,
    hardware: Hardware | None = None,
    speculator: Any = None,
    expert_policy: Any = None,
    launch: Callable[..., tuple[State, PrefillOutput]] | None = None,
) -> State:
    """Prefills an empty cache with the prompts and returns the state before the first step.

    The last token of a prompt is left to the first step, which thereby emits the first new token.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        controller: the control law; `chain()` is plain sampling.
        cache: empty, with one row per prompt. It is consumed.
        prompts: token ids, at least one per row; a row with an empty prompt stays out of the batch.
        key: the run's random key.
        max_tokens: tokens to generate at most, for all rows or one number per row.
        sample: sampling parameters of the rows, by default those of `sampling.parameters`.
        seeds: one per row, by default the row's number.
        stop: token ids that end a row, one list per row, −1 where unused; () for none.
        belief_temperature: T_cal, at which the belief H₁ is measured.
        page_policy: the choice of pages that a step reads; None reads all. Not together with a speculator.
        hardware: the roofline by which the ledger counts seconds, by default that of the device.
        speculator: the `speculation.Speculator` that `generate` will be given; the state keeps the text for
            it.
        expert_policy: decides how many experts of a mixture a step reads (`expert_reader.ExpertPolicy`); None
            reads those that the routers choose, as prefill does. Not together with a speculator.
        launch: called in place of `launch_prefill` and like it, for a program that was compiled elsewhere.

    Returns:
        The state of the loop.

    Raises:
        ValueError: an argument has another type or number of rows, a token is outside the vocabulary, or a
            prompt does not fit.
    """
    check_controller_and_cache(controller, cache)
    check_prompts(prompts, cache, decoder.shape.vocabulary)
    check_limits(max_tokens, seeds, stop, sample, len(prompts), decoder.shape.vocabulary)
    check_randomness_and_belief(key, belief_temperature)
    check_parts(hardware, page_policy, expert_policy, decoder.shape)
    check_speculator(speculator)
    state = _empty_state(
        decoder,
        controller,
        cache,
        sampling.parameters(len(prompts)) if sample is None else sample,
        key=key,
        belief_temperature=belief_temperature,
        page_policy=page_policy,
        hardware=hardware,
    )
    state = state._replace(expert_policy=expert_policy)
    state, total = _place_prompts(state, prompts, max_tokens, seeds, stop)
    if speculator is not None:
        state = _with_speculator(state, speculator, prompts, decoder.shape.hidden)
    state = sharding.place(_with_own_buffers(state), getattr(decoder, "mesh", None))
    return _prefill_prompts(partial(launch or launch_prefill, decoder, params), state, prompts, total)


def _empty_state(
    decoder: Decoder,
    controller: Controller,
    cache: Cache,
    sample: sampling.Sampling,
    *,
    key: jax.Array,
    belief_temperature: float,
    page_policy: PagePolicy | None,
    hardware: Hardware | None,
) -> State:
    """The state of rows without a prompt: all have ended. Arguments as in `start`."""
    rows = cache.table.shape[0]
    hardware = hardware or ledger.default_hardware()
    state = _rows_without_prompt(
        decoder.shape.vocabulary, rows, controller, sample, key, belief_temperature, hardware
    )
    memory = () if page_policy is None else page_policy.memory(decoder.shape, cache)
    return state._replace(cache=cache, page_policy=page_policy, page_policy_state=memory)


@partial(jax.jit, static_argnums=(0, 1))
def _rows_without_prompt(
    vocabulary: int,
    rows: int,
    controller: Controller,
    sample: sampling.Sampling,
    key: jax.Array,
    belief_temperature: float,
    hardware: Hardware,
) -> State:
    """The state of `_empty_state` but for its cache and page policy, made by one program."""
    no_cache: Any = ()
    zeros = jnp.zeros(rows, jnp.int32)
    action = plain_action(sample.temperature)
    law_state = controller.init(action)
    require_rows("the state of the controller", law_state, rows)
    return State(
        key=key,
        seed=zeros,
        token=zeros,
        length=zeros,
        evicted=zeros,
        limit=zeros,
        status=jnp.full(rows, FULL, jnp.int32),
        stop=jnp.asarray(stop_table((), rows)),
        belief_temperature=jnp.asarray(belief_temperature, jnp.float32),
        sampling=sample,
        history=sampling.history(rows, vocabulary),
        measured=unmeasured(rows),
        action=action,
        control=law_state,
        page_policy=None,
        page_policy_state=(),
        ledger=ledger.new_ledger(rows),
        hardware=jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), hardware),
        cache=no_cache,
    )


def _place_prompts(
    state: State,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    seeds: Sequence[int] | None,
    stop: Sequence[Sequence[int]],
) -> tuple[State, np.ndarray]:
    """Gives every row of an empty state its prompt, of which nothing is in the cache yet.

    Args:
        state: from `_empty_state`.
        prompts: token ids of every row; a row with an empty prompt stays out of the batch.
        max_tokens: tokens to generate at most, for all rows or one number per row.
        seeds: one per row, by default the row's number.
        stop: token ids that end a row, one list per row.

    Returns:
        The state, and how many tokens of each prompt are to be prefilled, int32 `[rows]`.
    """
    rows, context = state.cache.table.shape[0], state.cache.table.shape[1] * state.cache.page_size
    limits = np.broadcast_to(np.asarray(max_tokens, np.int32), rows)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    alive = (lengths > 0) & (limits > 0)
    placed = {
        "seed": np.asarray(np.arange(rows) if seeds is None else seeds, np.int32),
        "token": np.asarray([prompt[-1] if len(prompt) else 0 for prompt in prompts], np.int32),
        "limit": np.minimum(lengths - 1 + np.minimum(limits, context), context).astype(np.int32),
        "status": np.where(alive, RUNNING, FULL).astype(np.int32),
        "stop": stop_table(stop, rows),
        "history": sampling.with_prompts(state.history, prompts),
    }
    state = state._replace(**jax.device_put(placed))
    return state, np.where(alive, lengths - 1, 0)


def _with_own_buffers(state: State) -> State:
    """A copy of the state, all but its cache, for launches that consume it.

    No two of its arrays share a buffer, nor does one with an array of the caller.
    """
    small = {name: value for name, value in state._asdict().items() if name != "cache"}
    return state._replace(**_copied(small))


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def stop_table(stop: Sequence[Sequence[int]], rows: int) -> np.ndarray:
    """Stop tokens as an array int32 `[rows, stops]`, −1 where unused."""
    stops = np.full((rows, max([1, *map(len, stop)])), -1, np.int32)
    for row, tokens in enumerate(stop):
        stops[row, : len(tokens)] = tokens
    return stops


def _with_speculator(state: State, speculator: Any, prompts: Sequence[Sequence[int]], hidden: int) -> State:
    """The state with what a speculator keeps, and with the prompts' tokens, from which it may draft.

    The text has one position more than the cache, for the last token of a full row.
    """
    text = np.zeros((len(prompts), state.cache.table.shape[1] * state.cache.page_size + 1), np.int32)
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = prompt
    return state._replace(
        text=jnp.asarray(text),
        speculation=speculator.init(len(prompts)),
        features=speculator.features(len(prompts), hidden),
    )


def _prefill_prompts(
    launch: Callable[..., Any], state: State, prompts: Sequence[Sequence[int]], total: np.ndarray
) -> State:
    """Prefills the first `total[row]` tokens of every prompt, in chunks whose lengths are powers of two."""
    chunk = getattr(state.page_policy, "segment", PREFILL_CHUNK)
    done = 0
    while done < total.max(initial=0):
        size = min(chunk, 1 << int(total.max() - done - 1).bit_length())
        num_tokens = np.clip(total - done, 0, size).astype(np.int32)
        tokens = np.zeros((len(prompts), size + 1), np.int32)
        for row, prompt in enumerate(prompts):
            piece = prompt[done : done + num_tokens[row] + 1] if num_tokens[row] else ()
            tokens[row, : len(piece)] = piece
        rows = np.arange(len(prompts), dtype=np.int32)
        state, output = launch(state, PrefillChunk(rows, tokens, num_tokens, total.astype(np.int32)))
        if not np.all(output.granted):
            row = int(np.argmin(output.granted))
            raise ValueError(
                f"prompts must fit together into {state.cache.pages} pages of {state.cache.page_size} "
                f"positions; prompts[{row}] of {len(prompts[row])} tokens does not fit"
            )
        done += size
    return state


def prefill(
    decoder: Decoder, params: Any, state: State, chunk: PrefillChunk, *, scored: bool = False
) -> tuple[State, PrefillOutput]:
    """Appends a chunk of some prompts to the cache. A row whose prompt is complete starts to decode.

    Where the cache keeps surprisals, the tokens are scored on the way, and so is the one that follows them.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        state: the loop's state.
        chunk: the tokens, and the rows that they belong to.
        scored: also return the log-probability of the token that follows each position. Static.

    Returns:
        The new state, and the output, which has one entry for each prompt of the chunk.
    """
    total = state.length.shape[0]
    rows = RowSubset.at(jnp.asarray(chunk.rows), total)
    length = rows.gather(state.length)
    needed = jnp.where(chunk.num_tokens > 0, length + chunk.num_tokens, 0)
    cache, granted = grant(state.cache, rows.scatter(needed, jnp.int32(0)))
    granted = rows.gather(granted, False)
    state = state._replace(cache=cache)
    before, num_tokens = gather(state, rows), jnp.where(granted, chunk.num_tokens, 0)
    tokens, following = jnp.asarray(chunk.tokens[:, :-1]), jnp.asarray(chunk.tokens[:, 1:])
    hidden, after = append(decoder, params, before, tokens, num_tokens, chunk.total)
    complete = (before.status == PREFILLING) & granted & (after.length >= chunk.total)
    after = after._replace(status=jnp.where(complete, RUNNING, before.status))
    scores: TopLogprobs | tuple[()] = ()
    if scored:
        scores = score_tokens(gather_last_axis(decoder.logits(params, hidden)), following)
    if cache.surprisal is not None:
        logits = gather_last_axis(decoder.logits(params, hidden))
        after = _keep_surprisal(after, logits, following, length, num_tokens)
    table = after.cache.table
    return scatter(state, rows, before, after), PrefillOutput(granted, table, scores)


def append(
    decoder: Decoder,
    params: Any,
    state: State,
    tokens: jax.Array,
    num_tokens: jax.Array,
    total: jax.Array,
) -> tuple[jax.Array, State]:
    """Appends prompt tokens to the cache of every row, reading the pages that the page policy chooses.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        state: the state of the rows.
        tokens: int32 `[rows, n]`.
        num_tokens: int32 `[rows]`, how many of the n are real.
        total: int32 `[rows]`, positions that the whole prompt takes.

    Returns:
        Hidden states `[rows, n, hidden]`, and the state with the longer rows.
    """
    policy, memory, reader = state.page_policy, state.page_policy_state, None
    if policy is not None:
        reader = policy.prompt_reader(state.cache, memory, TokenSpan(state.length, num_tokens), total)
    hidden, after = forward(decoder, params, state, tokens, num_tokens, reader, total=total + 1)
    return hidden, after._replace(
        length=state.length + num_tokens,
        page_policy_state=memory if reader is None else reader.memory(),
    )


@partial(jax.jit, static_argnames=("decoder", "scored"), donate_argnames="state")
def launch_prefill(
    decoder: Decoder, params: Any, state: State, chunk: PrefillChunk, *, scored: bool = False
) -> tuple[State, PrefillOutput]:
    """`prefill` as a program, on the decoder's mesh if it has one.

    Args:
        decoder: the model's pure functions. Static.
        params: its parameters.
        state: the loop's state; it is consumed.
        chunk: the tokens, and the rows that they belong to.
        scored: as in `prefill`. Static.
    """

    def program(params, state, chunk):
        return prefill(decoder, params, state, chunk, scored=scored)

    return sharding.launch(decoder, program, params, state, chunk)


def score_tokens(logits: jax.Array, following: jax.Array) -> TopLogprobs:
    """Log-probabilities of the tokens `[p, n]` that follow logits `[p, n, vocabulary]`; `[p, n, …]`."""
    flat = top_logprobs(
        logits.reshape(-1, logits.shape[-1]), following.reshape(-1), jnp.ones(following.size, bool)
    )
    return jax.tree.map(lambda x: x.reshape(*following.shape, *x.shape[1:]), flat)


def _keep_surprisal(
    view: State, logits: jax.Array, following: jax.Array, start: jax.Array, num_tokens: jax.Array
) -> State:
    """Adds the surprisals of a chunk's tokens to their pages; the first is known from the chunk before."""
    scores = entropy.surprisal(logits, following, entropy.entropy_statistics(logits).log_normaliser)
    of_chunk = jnp.concatenate([view.measured.surprisal[:, None], scores[:, :-1]], 1)
    last = jnp.take_along_axis(scores, jnp.maximum(num_tokens - 1, 0)[:, None], 1)[:, 0]
    surprisal = jnp.where(num_tokens > 0, last, view.measured.surprisal)
    return view._replace(
        cache=note_surprisal(view.cache, start, num_tokens, of_chunk),
        measured=view.measured._replace(surprisal=surprisal),
    )
