"""Forward pass: the model over some tokens of every row of a batch, through the paged KV cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..attention.attend import TokenSpan, attend_to
from ..attention.page_reader import ReadStats, dense_step_stats
from ..attention.statistics import Observer
from ..mesh import max_over_shards, num_shards, sum_over_shards
from ..state import Focus, State, ledger
from ..state.cache import note_surprisal
from ..state.decoder import Decoder
from ..state.row_subset import where_rows
from .batch import Batch
from .expert_reader import ExpertReader, ExpertsRead
from .packing import Packing


class Forward(NamedTuple):
    """The results of a step's forward pass, the cache excepted."""

    logits: jax.Array  # float32 [rows, vocabulary]; on a mesh, of this device's part of the vocabulary
    read: ReadStats  # what was read of the cache
    focus: Focus | None  # statistics of attention, where the controller observes it
    experts: ExpertsRead | None = None  # what was read of the experts, where a policy decides it


def forward(
    decoder: Decoder,
    params: Any,
    state: State,
    tokens: jax.Array,
    num_tokens: jax.Array,
    reader: Any = None,
    observer: Observer | None = None,
    total: jax.Array | None = None,
    packing: Packing | None = None,
    expert_reader: ExpertReader | None = None,
) -> tuple[jax.Array, State]:
    """Runs the model over n tokens of every row: writes their keys and values, attends, mixes.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        state: the state of the rows; their next position is `length`.
        tokens: int32 `[rows, n]`.
        num_tokens: int32 `[rows]`, how many of the n are real; the others write nothing.
        reader: chooses the pages that are read; None reads all.
        observer: takes statistics of the attention.
        total: int32 `[rows]`, tokens of the prompt that the tokens belong to; None for tokens that are
            decoded.
        packing: where each token stands, if the model runs over the real tokens only.
        expert_reader: decides how many experts one token per row reads; None reads all that are chosen.

    Returns:
        Hidden states `[rows, n, hidden]`, or `[packed tokens, 1, hidden]` with `packing`, and the state with
        the cache as written.
    """
    positions = (state.length + state.evicted)[:, None] + jnp.arange(tokens.shape[1])
    attend = attend_to(state.cache, TokenSpan(state.length, num_tokens), reader, observer)
    if packing is not None:
        tokens, positions, attend = packing.pack(tokens), packing.pack(positions), packing.attention(attend)
    lengths = () if total is None else (jnp.maximum(positions + 1, (total + state.evicted)[:, None]),)
    extras = _adapters(state, num_tokens, packing) | _routing(expert_reader)
    hidden, layers = decoder.hidden(params, tokens, positions, state.cache.layers, attend, *lengths, **extras)
    features = _last_hidden(hidden, num_tokens, packing, state.features)
    return hidden, state._replace(cache=state.cache._replace(layers=layers), features=features)


def _last_hidden(
    hidden: jax.Array, num_tokens: jax.Array, packing: Packing | None, before: jax.Array | None
) -> jax.Array | None:
    """The hidden state of the last token of every row, float32 `[rows, hidden]`; None if none is kept.

    Args:
        hidden: as `forward` returns it.
        num_tokens: int32 `[rows]`, the real tokens of each.
        packing: places of the tokens; None for passes without.
        before: for rows without a token; None where no draft head reads hidden states.
    """
    if before is None:
        return None
    row, last = jnp.arange(num_tokens.shape[0]), jnp.maximum(num_tokens - 1, 0)
    of_rows = hidden[row, last] if packing is None else hidden[packing.packed_index[row, last], 0]
    return jnp.where(num_tokens[:, None] > 0, of_rows.astype(jnp.float32), before)


def _adapters(state: State, num_tokens: jax.Array, packing: Packing | None) -> dict[str, Any]:
    """The LoRA adapter of each row that a pass has, 0 for rows without a token.

    Only a model with adapters has a state that names those of the rows, and takes them.

    Args:
        state: the state of the rows.
        num_tokens: int32 `[rows]`, the real tokens of each.
        packing: places of the tokens, each of which is a row of the pass; None for passes without.
    """
    if state.adapter is None:
        return {}
    of_rows = jnp.where(num_tokens > 0, state.adapter, 0)
    return {"adapter": of_rows if packing is None else packing.pack(of_rows[:, None])[:, 0]}


def _routing(expert_reader: ExpertReader | None) -> dict[str, Any]:
    """The expert reader, which only models with experts take."""
    return {} if expert_reader is None else {"expert_reader": expert_reader}


def decode(decoder: Decoder, params: Any, batch: Batch, observes: Any) -> tuple[Batch, Forward]:
    """Runs the model over the last token of every active row: attention, then logits.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        batch: the rows of the step.
        observes: the attention that is observed (`attention.statistics.Observation`); None observes nothing.

    Returns:
        The batch with the cache as written, and the logits with what was read.
    """
    state, count = batch.state, batch.active.astype(jnp.int32)
    cache = note_surprisal(state.cache, state.length, count, state.measured.surprisal[:, None])
    reader = None
    if state.page_policy is not None:
        limit, memory, age = state.action.dropped_mass_limit, state.page_policy_state, state.ledger.steps
        reader = state.page_policy.reader(cache, limit, memory, age)
    observer = Observer(observes, cache) if observes else None
    experts = None if state.expert_policy is None else ExpertReader(state.expert_policy, state)
    state, tokens = state._replace(cache=cache), state.token[:, None]
    hidden, state = forward(decoder, params, state, tokens, count, reader, observer, expert_reader=experts)
    if reader is None:
        read = dense_step_stats(decoder.shape, TokenSpan(state.length, count))
    else:
        shards = state.cache.layers[0].page_shards
        read = over_shards(reader.total(), 1 if shards is None else shards.size)
        memory = where_rows(batch.active, reader.memory(), state.page_policy_state)
        state = state._replace(page_policy_state=memory)
    logits = decoder.logits(params, hidden[:, 0])
    focus = observer.total() if observer else None
    return batch._replace(state=state), Forward(logits, read, focus, experts.total() if experts else None)


def over_shards(read: ReadStats, sharers: int = 1) -> ReadStats:
    """Read statistics over the KV heads of all shards, from those of this shard.

    Args:
        read: the statistics of this shard's KV heads.
        sharers: shards that divide the pages of a KV head, each of which counts all of them.
    """
    shards = num_shards()
    if shards == 1:
        return read
    summed = sum_over_shards(read._replace(certificate=jnp.zeros_like(read.certificate)))
    counted = {name: getattr(summed, name) / sharers for name in ("positions", "held", "summaries")}
    return summed._replace(
        **(counted if sharers > 1 else {}),
        dropped_mass=summed.dropped_mass / shards,
        certificate=max_over_shards(read.certificate),
    )


def decode_cost(decoder: Decoder, params: Any, batch: Batch, output: Forward) -> ledger.Cost:
    """The cost that the ledger charges every active row for a token decoded by `decode`.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        batch: the rows, before their tokens count as cached.
        output: the output of the forward pass.
    """
    state, read = batch.state, output.read
    return ledger.step_cost(
        decoder.shape,
        active=batch.active,
        positions_read=read.positions + read.summaries,
        length=state.length + batch.active.astype(jnp.int32),
        bytes_per_weight=narrowest(params),
        bytes_per_cache=state.cache.bytes_per_number,
        hardware=state.hardware,
        expert_fraction=None if output.experts is None else output.experts.fraction,
    )


def narrowest(params: Any) -> int:
    """Bytes per number of the narrowest parameters, those that the ledger counts as read."""
    return min(x.dtype.itemsize for x in jax.tree.leaves(params))
