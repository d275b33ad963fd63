"""Headed decoder: a model with a draft head, which reads its hidden states and a layer of its cache.

Passes are those of the model alone; only a drafter runs the head.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ..state.cache import ModelShape
from ..state.decoder import Decoder
from .drafting_decoder import DraftingParams


class DraftHead(Protocol):
    """The functions of a draft head: static and hashable."""

    @property
    def layer(self) -> int | None:
        """The layer of the model whose keys and values it reads; None for a head without attention."""

    @property
    def window(self) -> int | None:
        """Positions of that layer that it sees at most, the latest ones; None for all."""

    @property
    def acceptance(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """How often drafts are accepted: edges of their entropy in nats, P between them, and its mean."""

    @property
    def shape(self) -> ModelShape:
        """Sizes of a draft step: the head, and the output projection of the model."""

    def hidden(
        self,
        params: Any,
        draft: Any,
        features: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        read: Any,
    ) -> jax.Array:
        """The features of the next tokens, `[rows, n, hidden]`.

        Args:
            params: the parameters of the model.
            draft: the parameters of the head.
            features: `[rows, n, hidden]`, that each token was drawn from.
            tokens: int32 `[rows, n]`.
            positions: int32 `[rows, n]`, of the tokens in their texts.
            read: attention of queries `[rows, n, heads, head_dim]` to the keys and values of the layer.
        """

    def logits(self, params: Any, draft: Any, features: jax.Array) -> jax.Array:
        """Logits, float32 `[..., drafted tokens]`, of features.

        Args:
            params: the parameters of the model.
            draft: the parameters of the head.
            features: `[..., hidden]`.
        """

    def drafted_tokens(self, draft: Any) -> jax.Array | None:
        """The tokens that the head drafts, int32 `[drafted tokens]`, ascending; None for all.

        Args:
            draft: the parameters of the head.
        """


@dataclasses.dataclass(frozen=True)
class HeadedDecoder:
    """The functions of a model, and of the head that drafts for it, whose parameters are `draft`."""

    target: Decoder
    head: DraftHead

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.target.shape

    def hidden(
        self,
        params: DraftingParams,
        tokens: jax.Array,
        positions: jax.Array,
        layers: tuple[Any, ...],
        attend: Any,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """See `Decoder`; of the model."""
        return self.target.hidden(params.target, tokens, positions, layers, attend, lengths)

    def logits(self, params: DraftingParams, hidden: jax.Array) -> jax.Array:
        """See `Decoder`; of hidden states of the model."""
        return self.target.logits(params.target, hidden)

    def context_key(self, length: int) -> tuple[int, ...]:
        """See `Decoder`."""
        return self.target.context_key(length)

    @property
    def draft_model(self) -> "HeadSteps":
        """Steps of the head as those of a model with one layer, whose cost is measured like one."""
        return HeadSteps(self)


@dataclasses.dataclass(frozen=True)
class HeadSteps:
    """Steps of a head without features, as a `Decoder` of one layer; its parameters are those of both."""

    headed: HeadedDecoder

    @property
    def shape(self) -> ModelShape:
        """Sizes of a draft step."""
        return self.headed.head.shape

    def hidden(
        self,
        params: DraftingParams,
        tokens: jax.Array,
        positions: jax.Array,
        layers: tuple[Any, ...],
        attend: Any,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """See `Decoder`; keys and values of zeros are written."""
        head, shape, written = self.headed.head, self.shape, list(layers)

        def read(query: jax.Array) -> jax.Array:
            none = jnp.zeros((*query.shape[:2], shape.kv_heads, shape.head_dim), query.dtype)
            out, written[0] = attend(query, none, none, layers[0], window=head.window)
            return out

        features = jnp.zeros((*tokens.shape, shape.hidden))
        hidden = head.hidden(params.target, params.draft, features, tokens, positions, read)
        return hidden, tuple(written)

    def logits(self, params: DraftingParams, hidden: jax.Array) -> jax.Array:
        """See `Decoder`; of the head's drafts."""
        return self.headed.head.logits(params.target, params.draft, hidden)

    def context_key(self, length: int) -> tuple[int, ...]:
        """See `Decoder`."""
        return self.headed.context_key(length)
