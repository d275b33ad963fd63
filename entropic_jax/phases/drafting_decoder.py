"""Drafting decoder: a model and a smaller one that drafts for it, over the same tokens and the same pages.

Both models run over the tokens of every pass: of prefill, of plain decoding, of verification. The keys and
values of the smaller one are further layers of the cache, in the same pages. A page that a row holds, shares
with others or finds in the prefix cache therefore has both, and a drafted token that was refused is
overwritten in both alike. Of the smaller model's last layer, only keys and values are computed in these
passes: nothing reads its hidden states.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..state.cache import ModelShape
from ..state.decoder import Decoder

IMPOSSIBLE = -1e9  # logit of a token that the draft model does not have; finite, so that its entropy is


class DraftingParams(NamedTuple):
    """The parameters of the two models."""

    target: Any
    draft: Any


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A model with the tokens of another, whose vocabulary may have another padding; see `Decoder`."""

    decoder: Decoder
    vocabulary: int  # of the other model

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.decoder.shape

    def hidden(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        layers: tuple[Any, ...],
        attend: Any,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """See `Decoder`. Tokens that the model does not have are read as its last one."""
        if self.shape.vocabulary < self.vocabulary:
            tokens = jnp.minimum(tokens, self.shape.vocabulary - 1)
        return self.decoder.hidden(params, tokens, positions, layers, attend, lengths)

    def context_key(self, length: int) -> tuple[int, ...]:
        """See `Decoder`."""
        return self.decoder.context_key(length)

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocabulary]`, in the vocabulary of the other model."""
        logits = self.decoder.logits(params, hidden)[..., : self.vocabulary]
        missing = self.vocabulary - logits.shape[-1]
        if missing == 0:
            return logits
        return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=IMPOSSIBLE)


@dataclasses.dataclass(frozen=True)
class DraftingDecoder:
    """The functions of a model, which also write the keys and values of the model that drafts for it."""

    target: Decoder  # whose tokens are generated
    draft: Decoder  # with the same tokens; its vocabulary may have another padding
    draft_context: int | None = None  # positions that the draft model is made for; None: any number

    @property
    def shape(self) -> ModelShape:
        """Sizes of the target, with the weights that a pass of both reads."""
        shape, draft = self.target.shape, self.draft.shape
        return shape._replace(weights=shape.weights + draft.weights, drafters=(draft,))

    def hidden(
        self,
        params: DraftingParams,
        tokens: jax.Array,
        positions: jax.Array,
        layers: tuple[Any, ...],
        attend: Any,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """The last hidden states of the target `[rows, n, hidden]`, and the layers of both as written.

        Args:
            params: the parameters of both models.
            tokens: int32 `[rows, n]`.
            positions: int32 `[rows, n]`, of the tokens in their texts.
            layers: cached keys and values, those of the target first.
            attend: without a choice of pages, which would be that of the target's layers.
            lengths: as in `Decoder.hidden`.
        """
        of_target, of_draft = layers[: self.target_layers], layers[self.target_layers :]
        hidden, written = self.target.hidden(params.target, tokens, positions, of_target, attend, lengths)
        _, drafted = self.draft_model.hidden(params.draft, tokens, positions, of_draft, attend, lengths)
        return hidden, written + drafted

    def logits(self, params: DraftingParams, hidden: jax.Array) -> jax.Array:
        """Logits of the target model, float32 `[..., vocabulary]`."""
        return self.target.logits(params.target, hidden)

    def context_key(self, length: int) -> tuple[int, ...]:
        """See `Decoder`; of both models."""
        return (*self.target.context_key(length), *self.draft.context_key(length))

    @property
    def draft_model(self) -> DraftModel:
        """The draft model, with the vocabulary of the target."""
        return DraftModel(self.draft, self.target.shape.vocabulary)

    @property
    def target_layers(self) -> int:
        """How many of the cached layers are the target's."""
        return self.target.shape.layers
