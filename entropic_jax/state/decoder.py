"""Decoder protocol: a language model as the loop sees it, as pure functions of its parameters."""

from collections.abc import Hashable
from typing import Any, Protocol

import jax

from .cache import ModelShape


class Decoder(Hashable, Protocol):
    """A decoder-only language model as the loop sees it: pure functions of `params`."""

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""

    def hidden(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        layers: Any,
        attend: Any,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """The last hidden states `[rows, n, hidden]`, and the layers as written.

        Args:
            params: the parameters of the model.
            tokens: int32 `[rows, n]`.
            positions: int32 `[rows, n]`, of the tokens in their texts.
            layers: the cached keys and values of each layer, a tuple or `layer_stacks.LayerStacks`.
            attend: writes a layer's keys and values and attends; see `attention.attend.attend_to`.
            lengths: int32 `[rows, n]`, tokens of the text that each token is read with, on which some
                rotary embeddings depend; None for its position and one.
        """

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocabulary]`; in a program on a mesh, of this device's part of the vocabulary."""

    def context_key(self, length: int) -> tuple[int, ...]:
        """Equal for texts that may share cached keys of a common prefix; `length` in tokens."""
