"""Head drafter: a small network on the model's last hidden state, which shares a layer of the KV cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..attention import attend
from ..attention.attend import TokenSpan
from ..attention.page_reader import dense_step_stats
from ..entropy import entropy_statistics
from ..phases.batch import Batch
from ..phases.emission import advance
from ..phases.forward import Forward, decode_cost
from ..phases.headed_decoder import HeadedDecoder
from ..sampling import adjusts, penalise, record, sample
from ..sampling.randomness import THREEFRY, typed
from ..state import State
from ..state.ledger import add_cost
from ..state.pytree import pytree
from .autoregressive import AutoregressiveDrafter, DraftedToken
from .draft_length import DraftLength
from .drafter import ControlledModel


@pytree
class HeadDrafter(AutoregressiveDrafter):
    """Drafts with the head of a `HeadedDecoder`; costs a layer and the output projection per token.

    The head reads the hidden state that the row's last token was drawn from (`State.features`) and the
    positions that the model had cached when the draft began, the latest ones if it has a window.
    """

    def step(self, model: ControlledModel, batch: Batch, began: Batch) -> DraftedToken:
        """See `AutoregressiveDrafter`."""
        decoder, params = _headed(model), model.params
        state, cached = batch.state, began.state.length
        reads = batch.active & (cached > 0) & (decoder.head.layer is not None)
        span = TokenSpan(jnp.maximum(cached - 1, 0), reads.astype(jnp.int32))
        layer, table = began.state.cache.layers[decoder.head.layer or 0], began.state.cache.table

        def read(query: jax.Array) -> jax.Array:
            return attend.read(layer, table, span, query, decoder.head.window)

        assert state.features is not None, "`start` makes room for them"
        position = (state.length + state.evicted)[:, None]
        features = decoder.head.hidden(
            params.target, params.draft, state.features[:, None], state.token[:, None], position, read
        )[:, 0]
        logits = decoder.head.logits(params.target, params.draft, features)
        if decoder.head.window is not None:
            span = span._replace(start=jnp.minimum(span.start, decoder.head.window - 1))
        output = Forward(logits, dense_step_stats(decoder.head.shape, span), None)
        charged = batch._replace(state=state._replace(cache=began.state.cache))
        cost = decode_cost(decoder.draft_model, params.draft, charged, output)
        drafted = draw(batch, logits, decoder.head.drafted_tokens(params.draft))
        after = drafted.state._replace(features=features.astype(jnp.float32))
        spent = add_cost(after.ledger, cost)
        return drafted._replace(state=after._replace(ledger=spent))

    def calibrated(self, model: ControlledModel) -> "HeadDrafter":
        """See `AutoregressiveDrafter`: a head states how often its drafts were accepted."""
        edges, table, mean = _headed(model).head.acceptance
        numbers = (jnp.asarray(x, jnp.float32) for x in (table, edges, mean))
        acceptance, entropy_edges, mean_acceptance = numbers
        return dataclasses.replace(
            self, acceptance=acceptance, entropy_edges=entropy_edges, mean_acceptance=mean_acceptance
        )

    def drafting(self, model: ControlledModel) -> tuple[ControlledModel, slice]:
        """See `AutoregressiveDrafter`. No layer of the cache is written."""
        return model, slice(0, 0)


def draw(batch: Batch, logits: jax.Array, tokens: jax.Array | None = None) -> DraftedToken:
    """A token from the logits of a draft, with the noise and the penalties of its position.

    Cheaper than emission: the control law does not act, and of the measurements only the entropy is made. So
    a draft is drawn at the temperature in force when it began.

    Args:
        batch: the rows before the token.
        logits: float32 `[rows, n]`.
        tokens: int32 `[n]`, ascending: the tokens whose logits these are; None for the vocabulary.
    """
    state = batch.state
    entropy = entropy_statistics(logits / state.belief_temperature, batch.active).entropy
    drawn = batch.active & jnp.isfinite(entropy)
    if tokens is not None and jax.random.key_impl(typed(state.key)) != THREEFRY:
        logits, tokens = _scattered(logits, tokens, state), None  # other noise is made of all tokens at once
    sampled = sample(
        _penalised(logits, tokens, state),
        state.sampling,
        state.action.temperature,
        state.key,
        state.seed,
        state.length + state.evicted + 1,
        surprisal_limit=state.action.surprisal_limit,
        active=batch.active,
        numbers=tokens,
    )
    token = jnp.where(drawn, sampled, state.token)
    after = advance(batch, state._replace(token=token), drawn, None)
    history = record(after.history, token, drawn)
    return DraftedToken(after._replace(history=history), token, entropy, drawn)


def _penalised(logits: jax.Array, tokens: jax.Array | None, state: State) -> jax.Array:
    """The logits after penalties and bias, of the same tokens.

    Args:
        logits: float32 `[rows, n]`.
        tokens: int32 `[n]`; None for the vocabulary.
        state: the state of the rows.
    """
    if tokens is None:
        return penalise(logits, state.sampling, state.history)

    def apply() -> jax.Array:
        return penalise(_scattered(logits, tokens, state), state.sampling, state.history)[:, tokens]

    return jax.lax.cond(adjusts(state.sampling), apply, lambda: logits)


def _scattered(logits: jax.Array, tokens: jax.Array, state: State) -> jax.Array:
    """Logits of some tokens as those of the vocabulary, float32 `[rows, vocabulary]`, −inf for others."""
    rows, vocabulary = logits.shape[0], state.history.generated.shape[1]
    return jnp.full((rows, vocabulary), -jnp.inf).at[:, tokens].set(logits)


def head_drafter(
    most_tokens: int = 7, law: DraftLength | None = None, step_costs: tuple[float, float] = (0.25, 0.0)
) -> HeadDrafter:
    """A head drafter.

    Args:
        most_tokens: k, the tokens drafted at most.
        law: what passes cost; None drafts as if they cost nothing.
        step_costs: the costs of a draft step of the batch, in the law's unit of time: without context, and
            what each cached position of a row adds.
    """
    unknown, costs = jnp.zeros(1, jnp.float32), jnp.asarray(step_costs, jnp.float32)
    return HeadDrafter(unknown, unknown[:0], law=law, step_costs=costs, most_tokens=most_tokens)


def reads_features(drafter: Any) -> bool:
    """Whether a drafter, or one of a cascade, reads `State.features`."""
    return any(isinstance(part, HeadDrafter) for part in getattr(drafter, "drafters", (drafter,)))


def _headed(model: ControlledModel) -> HeadedDecoder:
    if not isinstance(model.decoder, HeadedDecoder):
        raise ValueError(f"decoder must be a HeadedDecoder for a head to draft; got {model.decoder}")
    return model.decoder
