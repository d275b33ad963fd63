"""Building blocks of decoder models as flax nnx modules: attention, MLP, norm, embedding, decoder layer.

Attribute names are those of Hugging Face, so that one rule maps weights to tensors (see `weights.py`). A
matrix is a `kernel` of shape [in, out]: in the other order, a matrix–vector product on XLA's CPU backend
reaches only a small part of the memory bandwidth. Norms, softmax and rotary embedding compute in float32,
everything else in the dtype of the embedding; a narrower kernel is widened as it is multiplied.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from entropic_jax.mesh import first_of_shard, gather_last_axis, sum_over_shards, tensor_shards
from entropic_jax.pallas.rms_norm import rms_norm
from entropic_jax.pallas.skinny_matmul import skinny_matmul

from .config import Config
from .rope import Rotation, apply_rope, rope_frequencies, rope_rotation


class Attend(Protocol):
    """Writes keys and values to a layer's cache and attends to everything that it then holds."""

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, cache: Any, /, *, window: int | None
    ) -> tuple[jax.Array, Any]:
        """Attention of one layer.

        Args:
            query: rotated queries, `[rows, n, heads, head_dim]`. This function applies the scale 1/√head_dim.
            key: rotated keys, `[rows, n, kv_heads, head_dim]`.
            value: `[rows, n, kv_heads, head_dim]`.
            cache: the layer's cache, a pytree.
            window: positions that a query sees, its own included; None for all up to its own.

        Returns:
            The output, `[rows, n, heads, head_dim]`, and the new cache.
        """


class Linear(nnx.Module):
    """x @ kernel + bias.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        bias: whether there is one.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        self.kernel = nnx.Param(jnp.zeros((inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return fused_linear(x, self)[0]


class RowParallelLinear(Linear):
    """x @ kernel + bias; devices of a mesh hold x and the kernel by inputs, and their products are summed.

    On one device it is a `Linear`.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        product = sum_over_shards(skinny_matmul(x, self.kernel[...])[0])
        return product if self.bias is None else product + self.bias[...]


def fused_linear(x: jax.Array, *layers: Linear) -> tuple[jax.Array, ...]:
    """The outputs of several linear layers for the same x; one pass over x where it has few rows."""
    products = skinny_matmul(x, *(layer.kernel[...] for layer in layers))
    return tuple(
        y if layer.bias is None else y + layer.bias[...] for y, layer in zip(products, layers, strict=True)
    )


class Embedding(nnx.Module):
    """Token embedding, `weight` [vocabulary, hidden], which the devices of a mesh hold by vocabulary."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        self.weight = nnx.Param(jnp.zeros((vocabulary, hidden)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        weight = self.weight[...]
        if tensor_shards() == 1:
            return jnp.take(weight, tokens, axis=0, mode="clip")
        rows = weight.shape[0]
        last = rows * tensor_shards() - 1
        local = jnp.clip(tokens, 0, last) - first_of_shard(rows)
        held = (local >= 0) & (local < rows)
        vectors = jnp.take(weight, local, axis=0, mode="clip")
        return sum_over_shards(jnp.where(held[..., None], vectors, jnp.zeros((), weight.dtype)))


class RMSNorm(nnx.Module):
    """x / rms(x) · weight over the last axis, the mean square taken in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.weight = nnx.Param(jnp.ones(size))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.epsilon)


class MLP(nnx.Module):
    """The gated feed-forward block, down(silu(gate(x)) · up(x)) (arXiv 2002.05202).

    Args:
        hidden: width of input and output.
        inner: width between the two products.
        bias: whether the projections have one.
    """

    def __init__(self, hidden: int, inner: int, bias: bool = False) -> None:
        self.gate_proj = Linear(hidden, inner, bias)
        self.up_proj = Linear(hidden, inner, bias)
        self.down_proj = RowParallelLinear(inner, hidden, bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = fused_linear(x, self.gate_proj, self.up_proj)
        return self.down_proj(jax.nn.silu(gate) * up)


class Attention(nnx.Module):
    """Projections, head norms and rotary embedding around an `Attend`, which owns the KV cache.

    Args:
        config: of the model.
        bias: whether the projections of q, k and v have one.
        output_bias: whether the output projection has one.
        head_norm: whether queries and keys are normalised per head.
        window: positions that a query sees at most, its own included; None for all.
    """

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
        self.o_proj = RowParallelLinear(queries, config.hidden_size, output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if head_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if head_norm else None

    def __call__(self, x: jax.Array, rotation: Rotation, cache: Any, attend: Attend) -> tuple[jax.Array, Any]:
        rows, length, _ = x.shape
        query, key, value = (
            projected.reshape(rows, length, -1, self.head_dim)
            for projected in fused_linear(x, self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        out, cache = attend(
            apply_rope(query, rotation), apply_rope(key, rotation), value, cache, window=self.window
        )
        return self.o_proj(out.reshape(rows, length, -1)), cache


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        config: of the model.
        attention: an `Attention`.
        mlp: an `MLP`, or a `SparseMLP`.
    """

    def __init__(self, config: Config, attention: nnx.Module, mlp: nnx.Module) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def __call__(self, x: jax.Array, rotation: Rotation, cache: Any, attend: Attend) -> tuple[jax.Array, Any]:
        out, cache = self.self_attn(self.input_layernorm(x), rotation, cache, attend)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class CausalLM(nnx.Module):
    """Embedding, layers, norm and output projection.

    The output projection is always a separate [hidden, vocabulary] kernel. With tied embeddings it is a
    transposed copy of the embedding: it costs vocab_size · hidden_size weights of memory and keeps the
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
        """Hidden states after the last norm.

        Args:
            tokens: int32 `[rows, n]`.
            positions: int32 `[rows, n]`.
            caches: one cache per layer, passed to `attend`.
            attend: attention and cache update.

        Returns:
            Hidden states, `[rows, n, hidden]`, and the new caches.
        """
        rotation = rope_rotation(positions, self.rope_frequencies())
        x, written = self.embed_tokens(tokens), []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, rotation, cache, attend)
            written.append(cache)
        return self.norm(x), tuple(written)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits, float32 `[..., vocabulary]`, of hidden states `[..., hidden]`."""
        kernel = self.lm_head.kernel[...]
        if hidden.dtype == jnp.float32:
            return gather_last_axis(skinny_matmul(hidden, kernel)[0])
        return gather_last_axis(jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32))

    def rope_frequencies(self) -> np.ndarray:
        """The rotation angle per position of each pair, radians, float32 `[head_dim / 2]`."""
        return rope_frequencies(self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)
