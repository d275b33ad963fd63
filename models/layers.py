"""Building blocks of decoder models as flax nnx modules: attention, MLP, embedding, decoder layer, decoder.

Each is built from its part of a `block_spec.BlockSpec`. Attribute names are those of Hugging Face's Llama, so
that one rule maps weights to tensors (see `tensor_names`). A matrix is a `kernel` of shape [in, out]: in the
other order, a matrix–vector product on XLA's CPU backend reaches only a small part of the memory bandwidth.
Norms, softmax and rotary embedding compute in float32, everything else in the dtype of the embedding, or in
float32 where the model states an `OperandDtype`; a narrower kernel is widened as it is multiplied.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from entropic_jax.mesh import PageShards, sum_over_shards
from entropic_jax.mesh.devices import default_device
from entropic_jax.pallas.silu_and_mul import silu_and_mul
from entropic_jax.pallas.skinny_matmul import skinny_matmul
from entropic_jax.state.layer_stacks import LayerPattern, LayerStacks

from .activations import FUNCTIONS, XIELU
from .block_spec import AttentionSpec, BlockSpec, MLPSpec, OutputSpec
from .config import Config
from .embedding import Embedding
from .layer_stack import run_layers
from .norms import LayerNorm, RMSNorm, WideRMSNorm, norm
from .rope import RopeSpec, Rotation, apply_rope, rotation_of

OperandDtype = Literal["float32", "bfloat16", "int8"]
"""The dtype of the operands of products between activations of float32: as they are, or rounded."""


class Attend(Protocol):
    """Writes keys and values to a layer's cache and attends to everything that it then holds."""

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, cache: Any, /, *, window: int | None
    ) -> tuple[jax.Array, Any]:
        """Attention of one layer. Layers with a soft cap, sinks or chunks pass `soft_cap`, `sink` or `chunk`.

        Args:
            query: rotated queries, `[rows, n, heads, head_dim]`. This function applies the scale 1/√head_dim.
            key: rotated keys, `[rows, n, kv_heads, head_dim]`.
            value: `[rows, n, kv_heads, head_dim]`.
            cache: the layer's cache, a pytree.
            window: positions that a query sees, its own included; None for all up to its own.

        Returns:
            The output, `[rows, n, heads, head_dim]`, and the new cache.
        """


class LowRankUpdate(Protocol):
    """Addends of the rows' adapters to the outputs of linear layers with the same input; see `lora`."""

    def added(self, outputs: tuple[jax.Array, ...], x: jax.Array) -> tuple[jax.Array, ...]:
        """The outputs `[rows, n, outputs]` of x `[rows, n, inputs]` under each row's adapter."""


class TokenContext(NamedTuple):
    """Positions of a pass's tokens, which its layers share."""

    positions: jax.Array  # int32 [rows, n]
    rotations: Mapping[RopeSpec, Rotation]


class Linear(nnx.Module):
    """x @ kernel + bias; a quantised kernel has a `scale`, see `quantisation`.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        bias: whether there is one.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        self.kernel = nnx.Param(jnp.zeros((inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None
        self.scale: nnx.Param | None = nnx.data(None)
        self.operand_dtype: OperandDtype = "float32"
        self.low_rank: LowRankUpdate | None = nnx.data(
            None
        )  # of this layer and those that are multiplied with it

    def __call__(self, x: jax.Array) -> jax.Array:
        return fused_linear(x, self)[0]


class RowParallelLinear(Linear):
    """x @ kernel + bias; devices of a mesh hold x and the kernel by inputs, and their products are summed.

    On one device it is a `Linear`.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        product = sum_over_shards(multiply(x, self)[0])
        product = product if self.bias is None else product + self.bias[...]
        return product if self.low_rank is None else self.low_rank.added((product,), x)[0]


def multiply(x: jax.Array, *layers: Linear) -> tuple[jax.Array, ...]:
    """The products of x with the kernels of linear layers, of which all are quantised or none."""
    scales = tuple(layer.scale[...] for layer in layers if layer.scale is not None)
    kernels = tuple(layer.kernel[...] for layer in layers)
    operand_dtype = layers[0].operand_dtype
    # Numbers of 4 bits with scales per group are not numbers of bfloat16.
    rounded = operand_dtype != "float32" and kernels[0].dtype != jnp.uint8
    return skinny_matmul(x, *kernels, scales=scales, operand_dtype=operand_dtype if rounded else None)


def fused_linear(x: jax.Array, *layers: Linear) -> tuple[jax.Array, ...]:
    """The outputs of several linear layers for the same x; one pass over x where it has few rows."""
    products = multiply(x, *layers)
    outputs = tuple(
        y if layer.bias is None else y + layer.bias[...] for y, layer in zip(products, layers, strict=True)
    )
    update = layers[0].low_rank
    return outputs if update is None else update.added(outputs, x)


class MLP(nnx.Module):
    """The feed-forward block, down(act(gate(x)) · up(x)) (arXiv 2002.05202), or without a gate.

    Args:
        hidden: width of input and output.
        spec: inner width, activation, gate, biases.
    """

    def __init__(self, hidden: int, spec: MLPSpec) -> None:
        self.gate_proj = Linear(hidden, spec.inner, spec.bias) if spec.gated else None
        self.up_proj = Linear(hidden, spec.inner, spec.bias)
        self.down_proj = RowParallelLinear(spec.inner, hidden, spec.bias)
        self.act_fn = XIELU() if spec.activation == "xielu" else FUNCTIONS[spec.activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(x)))
        gate, up = fused_linear(x, self.gate_proj, self.up_proj)
        gated = silu_and_mul(gate, up) if self.act_fn is jax.nn.silu else self.act_fn(gate) * up
        return self.down_proj(gated)


class Attention(nnx.Module):
    """Projections, head norms and rotary embedding around an `Attend`, which owns the KV cache.

    Args:
        hidden: width of input and output.
        spec: sizes and switches.
    """

    def __init__(self, hidden: int, spec: AttentionSpec) -> None:
        self.spec = spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = Linear(hidden, queries, spec.bias)
        self.k_proj = Linear(hidden, keys, spec.bias)
        self.v_proj = Linear(hidden, keys, spec.bias)
        self.o_proj = RowParallelLinear(queries, hidden, spec.output_bias)
        self.q_norm, self.k_norm = (head_norm(spec, heads) for heads in (spec.heads, spec.kv_heads))
        self.sinks = nnx.Param(jnp.zeros(spec.heads)) if spec.sinks else None

    def __call__(
        self, x: jax.Array, context: TokenContext, cache: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        spec, (rows, length, _) = self.spec, x.shape
        query, key, value = fused_linear(x, self.q_proj, self.k_proj, self.v_proj)
        if default_device().platform == "tpu":
            # Else XLA lays products out as attention takes them, and to that end copies the matrices of all
            # layers of a stack in each launch that verifies drafts.
            query, key, value = jax.lax.optimization_barrier((query, key, value))
        if spec.norm_span == "all":
            query, key = self.head_normalised(query, key)
        if key.shape[-1] < spec.head_dim:  # of a KV head that devices divide
            group = PageShards(spec.head_dim // key.shape[-1])
            query, key, value = group.gather_columns(query, key, value)
        query, key, value = (y.reshape(rows, length, -1, spec.head_dim) for y in (query, key, value))
        if spec.norm_span != "all" and not spec.norm_rotated:
            query, key = self.head_normalised(query, key)
        if spec.rope is not None:
            rotation = context.rotations[spec.rope]
            query, key = (apply_rope(y, rotation, spec.rope.interleaved) for y in (query, key))
        if spec.norm_span != "all" and spec.norm_rotated:
            query, key = self.head_normalised(query, key)
        query = self.scaled(query, context.positions)
        extras: dict[str, Any] = {}
        if spec.soft_cap is not None:
            extras["soft_cap"] = spec.soft_cap
        if spec.chunk is not None:
            extras["chunk"] = spec.chunk
        if self.sinks is not None:
            extras["sink"] = self.sinks[...]
        out, cache = attend(query, key, value, cache, window=spec.window, **extras)
        return self.o_proj(out.reshape(rows, length, -1)), cache

    def head_normalised(self, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries and keys after their norms, if they have any."""
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def scaled(self, query: jax.Array, positions: jax.Array) -> jax.Array:
        """Queries multiplied by what the family scales scores by, beyond the 1/√head_dim of `Attend`."""
        spec = self.spec
        if spec.scale is not None:
            factor = spec.scale * spec.head_dim**0.5
            query = (query.astype(jnp.float32) * factor).astype(query.dtype) if factor != 1.0 else query
        if spec.position_scale is not None:
            slope, length, offset = spec.position_scale
            growth = 1 + slope * jnp.log1p(((positions + offset) // length).astype(jnp.float32))
            query = (query.astype(jnp.float32) * growth[:, :, None, None]).astype(query.dtype)
        return query


def head_norm(spec: AttentionSpec, heads: int) -> RMSNorm | LayerNorm | None:
    """The norm of the queries or keys of `heads` heads; None if there is none."""
    if spec.head_norm is None:
        return None
    if spec.norm_span == "each":
        return LayerNorm((heads, spec.head_dim), spec.head_norm)
    if spec.norm_span == "all" and spec.head_norm.kind == "rms":
        return WideRMSNorm(heads * spec.head_dim, spec.head_norm)
    return norm(heads * spec.head_dim if spec.norm_span == "all" else spec.head_dim, spec.head_norm)


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the norms where the specification places them.

    `input_layernorm` and `post_attention_layernorm` normalise the inputs of the two blocks,
    `attention_output_norm` and `mlp_output_norm` their outputs.

    Args:
        hidden: width of the residual stream.
        spec: placement of the norms, multiplier.
        attention: the attention block: an `Attention` or a `LatentAttention`.
        mlp: the feed-forward block, or experts.
    """

    def __init__(self, hidden: int, spec: BlockSpec, attention: Any, mlp: nnx.Module) -> None:
        self.parallel, self.multiplier = spec.placement.startswith("parallel"), spec.residual_multiplier
        before, after = spec.placement != "post", spec.placement in ("post", "sandwich")
        self.input_layernorm = norm(hidden, spec.norm) if before else None
        self.self_attn = attention
        self.attention_output_norm = norm(hidden, spec.norm) if after else None
        self.post_attention_layernorm = (
            norm(hidden, spec.norm) if before and spec.placement != "parallel" else None
        )
        self.mlp = mlp
        self.mlp_output_norm = norm(hidden, spec.norm) if after else None

    def __call__(
        self, x: jax.Array, context: TokenContext, cache: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        inputs = normalised(x, self.input_layernorm)
        out, cache = self.self_attn(inputs, context, cache, attend)
        if self.parallel:
            if self.post_attention_layernorm is not None:
                inputs = self.post_attention_layernorm(x)
            return x + self.weighted(out + self.mlp(inputs)), cache
        x = x + self.weighted(normalised(out, self.attention_output_norm))
        out = self.mlp(normalised(x, self.post_attention_layernorm))
        return x + self.weighted(normalised(out, self.mlp_output_norm)), cache

    def weighted(self, x: jax.Array) -> jax.Array:
        """The block's addition to the residual stream."""
        return x if self.multiplier == 1.0 else x * jnp.asarray(self.multiplier, x.dtype)


def normalised(x: jax.Array, layer: RMSNorm | LayerNorm | None) -> jax.Array:
    """The vectors after the norm of a layer; as they are without one."""
    return x if layer is None else layer(x)


class CausalLM(nnx.Module):
    """Embedding, layers, norm and output projection.

    The output projection is always a [hidden, vocabulary] kernel, which keeps the largest product of a step
    in the fast order. With tied embeddings it is a transposed copy of the embedding, or, if that is large,
    serves as the embedding as well (see `embedding`).

    Args:
        config: the model's configuration.
        output: multipliers, caps and the last norm.
        layers: the decoder layers, in order.
        pattern: the pattern of those that stand for several, whose arrays are stacked; None without any.
    """

    def __init__(
        self,
        config: Config,
        output: OutputSpec,
        layers: list[DecoderLayer],
        pattern: LayerPattern | None = None,
    ) -> None:
        self.output, self.wide_activations, self.pattern = output, False, pattern
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List(layers)
        self.norm = norm(config.hidden_size, output.norm)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, output.head_bias)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        caches: Any,
        attend: Attend,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Hidden states after the last norm.

        Args:
            tokens: int32 `[rows, n]`.
            positions: int32 `[rows, n]`.
            caches: one cache per layer, passed to `attend`: a tuple, or `LayerStacks` for stacked arrays.
            attend: attention and cache update.
            lengths: int32 `[rows, n]`, tokens of the text that each token is read with; see
                `rope.rotation_of`.

        Returns:
            Hidden states, `[rows, n, hidden]`, and the new caches.
        """
        layers: Any = self.layers
        ropes = dict.fromkeys(layer.self_attn.spec.rope for layer in layers)
        rotations = {rope: rotation_of(rope, positions, lengths) for rope in ropes if rope is not None}
        context = TokenContext(positions, rotations)
        x, written = self.embedded(tokens), []
        if self.pattern is not None:
            x, stacks = run_layers(layers, self.pattern, x, context, caches, attend)
            return self.norm(x), stacks
        if isinstance(caches, LayerStacks) and len(caches.pools) < len(caches):
            raise ValueError("caches must be separate for a model whose layers are; got stacks")
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, context, cache, attend)
            written.append(cache)
        stacks = isinstance(caches, LayerStacks)
        return self.norm(x), LayerStacks(tuple(written), caches.places) if stacks else tuple(written)

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """The embeddings of tokens int32 `[...]` as the first layer reads them, `[..., hidden]`."""
        x = self.embed_tokens(tokens)
        x = x.astype(jnp.float32) if self.wide_activations else x
        if self.output.embedding_multiplier == 1.0:
            return x
        return x * jnp.asarray(self.output.embedding_multiplier, x.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits, float32 `[..., vocabulary]`, of hidden states `[..., hidden]`.

        On a mesh, those of this device's part of the vocabulary.
        """
        if hidden.dtype == jnp.float32:
            out = multiply(hidden, self.lm_head)[0]
        else:
            kernel = self.lm_head.kernel[...].astype(hidden.dtype)
            out = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
            if self.lm_head.scale is not None:
                out = out * self.lm_head.scale[...]
        if self.lm_head.bias is not None:
            out = out + self.lm_head.bias[...].astype(jnp.float32)
        if self.output.logit_multiplier != 1.0:
            out = out * self.output.logit_multiplier
        cap = self.output.logit_soft_cap
        return out if cap is None else cap * jnp.tanh(out / cap)
