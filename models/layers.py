"""The blocks that decoder families are put together from, as flax nnx modules.

Attribute names are those of Hugging Face, so one rule finds the tensor of a weight (see `weights.py`). A
matrix is a `kernel` of shape [in, out]: with the other order, a matrix–vector product on XLA's CPU backend
runs at a small part of the memory's speed. Norms, softmax and rotation compute in float32, the rest in the
dtype of the embedding; a kernel may be narrower, and is widened as it is multiplied.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from entropic_jax.pallas.skinny_matmul import skinny_matmul

from .config import Config
from .rope import Rotation, frequencies, rotate, rotation


class Attend(Protocol):
    """Write keys and values to the layer's cache, and attend to what it then holds."""

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, cache: Any, /, *, window: int | None
    ) -> tuple[jax.Array, Any]:
        """Query and output `[rows, n, heads, head_dim]`, key and value `[rows, n, kv_heads, head_dim]`.

        Query and key are rotated; the scale 1/√head_dim is for this function to apply. `window` is how many
        positions a query sees, its own included, None for all before it.
        """


class Linear(nnx.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        self.kernel = nnx.Param(jnp.zeros((inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return together(x, self)[0]


def together(x: jax.Array, *layers: Linear) -> tuple[jax.Array, ...]:
    """What each of the layers makes of x: one pass where x has few rows."""
    products = skinny_matmul(x, *(layer.kernel[...] for layer in layers))
    return tuple(
        y if layer.bias is None else y + layer.bias[...] for y, layer in zip(products, layers, strict=True)
    )


class Embedding(nnx.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        self.weight = nnx.Param(jnp.zeros((vocabulary, hidden)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """x / rms(x) · weight over the last axis, the mean square taken in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.weight = nnx.Param(jnp.ones(size))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale).astype(x.dtype) * self.weight[...]


class MLP(nnx.Module):
    """The gated feed-forward block, down(silu(gate(x)) · up(x)) (arXiv 2002.05202)."""

    def __init__(self, hidden: int, inner: int, bias: bool = False) -> None:
        self.gate_proj = Linear(hidden, inner, bias)
        self.up_proj = Linear(hidden, inner, bias)
        self.down_proj = Linear(inner, hidden, bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = together(x, self.gate_proj, self.up_proj)
        return self.down_proj(jax.nn.silu(gate) * up)


class Attention(nnx.Module):
    """Projections, head norms and rotation around an `Attend`; how keys are stored is not known here."""

    def __init__(
        self,
        config: Config,
        *,
        bias: bool = False,
        output_bias: bool = False,
        head_norm: bool = False,
        window: int | None = None,
    ) -> None:
        self.head_dim, self.window = config.head_dim, window
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, queries, bias)
        self.k_proj = Linear(config.hidden_size, keys, bias)
        self.v_proj = Linear(config.hidden_size, keys, bias)
        self.o_proj = Linear(queries, config.hidden_size, output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if head_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if head_norm else None

    def __call__(self, x: jax.Array, turn: Rotation, cache: Any, attend: Attend) -> tuple[jax.Array, Any]:
        rows, length, _ = x.shape
        query, key, value = (
            projected.reshape(rows, length, -1, self.head_dim)
            for projected in together(x, self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        out, cache = attend(rotate(query, turn), rotate(key, turn), value, cache, window=self.window)
        return self.o_proj(out.reshape(rows, length, -1)), cache


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, attention: nnx.Module, mlp: nnx.Module) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def __call__(self, x: jax.Array, turn: Rotation, cache: Any, attend: Attend) -> tuple[jax.Array, Any]:
        out, cache = self.self_attn(self.input_layernorm(x), turn, cache, attend)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class CausalLM(nnx.Module):
    """Embedding, layers, norm and output projection.

    The projection is always a [hidden, vocabulary] kernel of its own. With tied embeddings that is a second
    copy of the embedding, transposed: it costs vocab_size · hidden_size weights of memory and keeps the
    largest product of a step in the fast order.
    """

    def __init__(self, config: Config, layer: Callable[[Config, int], nnx.Module]) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([layer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, caches: tuple[Any, ...], attend: Attend
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Hidden states `[rows, n, hidden]` after the last norm, of int32 tokens at positions `[rows, n]`."""
        turn = rotation(positions, self.frequencies())
        x, written = self.embed_tokens(tokens), []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, turn, cache, attend)
            written.append(cache)
        return self.norm(x), tuple(written)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocabulary]` of hidden states `[..., hidden]`."""
        kernel = self.lm_head.kernel[...]
        if hidden.dtype == jnp.float32:
            return skinny_matmul(hidden, kernel)[0]
        return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)

    def frequencies(self) -> np.ndarray:
        return frequencies(self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)
