"""A model whose answer is known: it runs in full, and its logits are raised at the token of the answer.

A model that cannot follow an instruction cannot show what an edit costs. So the answer is imposed. Every pass
computes the model over the text, the noise is drawn and the token sampled as always, but the logit of the
answer's token at each position is `RAISED` higher, so that it is the token drawn. The last column of a hidden
state carries the token from the position of a pass to its logits.

Drafters do not know the answer (`Unaware`): they draft with the model as it is, from its hidden states and
from the text so far. What they propose is accepted where it is the token of the answer.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import models
from entropic_jax.phases.batch import Batch
from entropic_jax.speculation import ControlledModel, Draft, Drafter, Speculator
from entropic_jax.state.cache import ModelShape
from entropic_jax.state.decoder import Decoder
from entropic_jax.state.pytree import pytree

RAISED = 1000.0  # added to the logit of the answer's token: beyond all logits and noise


class ImposedParams(NamedTuple):
    """The parameters of a model, and the text that it is to write."""

    target: Any
    answer: jax.Array  # int32 [positions], the token at each position; past the vocabulary where any may come


@dataclasses.dataclass(frozen=True)
class ImposedDecoder:
    """The functions of a model that writes a known answer; see `Decoder`."""

    target: Decoder

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model; its hidden states have one more number."""
        return self.target.shape._replace(hidden=self.target.shape.hidden + 1)

    def hidden(
        self,
        params: ImposedParams,
        tokens: jax.Array,
        positions: jax.Array,
        layers: tuple[Any, ...],
        attend: Any,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """See `Decoder`; the last number of a hidden state is the token that is to follow."""
        hidden, layers = self.target.hidden(params.target, tokens, positions, layers, attend, lengths)
        following = params.answer[jnp.minimum(positions + 1, params.answer.shape[0] - 1)]
        return jnp.concatenate([hidden, following[..., None].astype(hidden.dtype)], -1), layers

    def logits(self, params: ImposedParams, hidden: jax.Array) -> jax.Array:
        """See `Decoder`; raised at the token that is to follow."""
        logits = self.target.logits(params.target, hidden[..., :-1])
        token = hidden[..., -1].astype(jnp.int32).reshape(-1)
        flat = logits.reshape(token.shape[0], -1)
        flat = flat.at[jnp.arange(token.shape[0]), token].add(RAISED, mode="drop")
        return flat.reshape(logits.shape)

    def context_key(self, length: int) -> tuple[int, ...]:
        """See `Decoder`."""
        return self.target.context_key(length)


@dataclasses.dataclass(frozen=True, eq=False)
class ImposedModel(models.Model):
    """A model that writes a known answer; its `params` are `ImposedParams`."""

    target: models.Model | None = None  # the model as it is

    @property
    def decoder(self) -> Any:
        """The decoder of the model with its answer."""
        assert self.target is not None, "`impose` sets it"
        return ImposedDecoder(self.target.decoder)


def impose(model: models.Model, prompt: list[int], answer: list[int]) -> ImposedModel:
    """The model that answers this prompt with this answer.

    Args:
        model: in float32, so that a hidden state can hold the number of a token.
        prompt: token ids.
        answer: the token ids of what follows; any token may come after it.
    """
    positions, vocabulary = model.config.max_position_embeddings, model.decoder.shape.vocabulary
    text = np.full(positions, vocabulary, np.int32)
    text[len(prompt) : len(prompt) + len(answer)] = answer
    fields: dict[str, Any] = {f.name: getattr(model, f.name) for f in dataclasses.fields(models.Model)}
    fields["params"] = ImposedParams(model.params, jax.device_put(text))
    return ImposedModel(**fields, target=model)


@pytree
class Unaware:
    """A drafter of an `ImposedDecoder` that drafts as if there were no answer."""

    drafter: Any  # of the model as it is

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """See `Cascade`."""
        return getattr(self.drafter, "drafters", (self.drafter,))

    @property
    def most_tokens(self) -> int:
        """See `Drafter`."""
        return self.drafter.most_tokens

    def draft(self, model: ControlledModel, batch: Batch, max_drafts: jax.Array) -> tuple[Batch, Draft]:
        """See `Drafter`."""
        decoder, params = model.decoder, model.params
        assert isinstance(decoder, ImposedDecoder)
        features = batch.state.features
        narrow = None if features is None else features[:, :-1]
        before = batch._replace(state=batch.state._replace(features=narrow))
        plain = model._replace(decoder=decoder.target, params=params.target)
        after, draft = self.drafter.draft(plain, before, max_drafts)
        return after._replace(state=after.state._replace(features=features)), draft


def unaware(speculator: Speculator | None) -> Speculator | None:
    """The speculator of an imposed model, which does not know the answer; None stays None."""
    return None if speculator is None else Speculator(Unaware(speculator.drafter), speculator.law)
