"""The forward pass of a Llama-shaped decoder for training and scoring, fast on a CPU too, with its loss.

Its feed-forward blocks may be mixtures of experts. Every expert is then computed for every token, and those
that a token is not routed to have weight 0: the products are those of one wide block, and need no sorting.

The mathematics is that of `models.decoder`; what differs is the order of the work. Matrix products run in
bfloat16 with float32 accumulation where the processor has matrix units for it (AMX), and in float32
elsewhere, where XLA's CPU backend takes 1.1 to 1.7 times as long for a product in bfloat16. Its fast path for
bfloat16 needs both operands in memory as `[m, k] @ [k, n]`, so every transpose is made explicit there.
Attention is a flash attention, one KV head after another in tiles that stay in the processor's cache, whose
backward pass works on transposed scores. The cross-entropy computes its own gradient chunk by chunk, so that
`[tokens, vocabulary]` never exists.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import experts
from .shape import Shape

Params = dict[str, Any]
TILE = 128  # queries and keys of a tile of attention


def product_dtype(processor: str) -> Any:
    """The dtype in which products are fastest.

    Args:
        processor: the text of /proc/cpuinfo.
    """
    return jnp.bfloat16 if "amx_bf16" in processor else jnp.float32


_CPUINFO = Path("/proc/cpuinfo")
PRODUCT_DTYPE = product_dtype(_CPUINFO.read_text() if _CPUINFO.exists() else "")


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x @ y` over the last two axes in the dtype of products, float32 out."""
    return jnp.matmul(x.astype(PRODUCT_DTYPE), y.astype(PRODUCT_DTYPE), preferred_element_type=jnp.float32)


def flip(x: jax.Array) -> jax.Array:
    """Swap the last two axes, in bfloat16 *in memory*: a barrier keeps XLA from folding it into a product."""
    swapped = jnp.swapaxes(x.astype(PRODUCT_DTYPE), -1, -2)
    if jnp.float32 == PRODUCT_DTYPE:
        return swapped
    return jax.lax.optimization_barrier(swapped.reshape(-1)).reshape(swapped.shape)


@jax.custom_vjp
def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight` for x `[tokens, in]` and weight `[in, out]`; float32 out."""
    return dot(x, weight)


def _linear_forward(x: jax.Array, weight: jax.Array):
    x, weight = x.astype(PRODUCT_DTYPE), weight.astype(PRODUCT_DTYPE)
    return dot(x, weight), (x, weight)


def _linear_backward(saved, gradient):
    x, weight = saved
    gradient = gradient.astype(PRODUCT_DTYPE)
    return dot(gradient, flip(weight)), dot(flip(x), gradient)


linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, `[n, group, time, dim]`.

    Args:
        q: `[n, group, time, dim]`, unscaled, where n = batch × KV heads.
        k: `[n, time, dim]`.
        v: `[n, time, dim]`.
    """
    return _attention_forward(q, k, v)[0]


def _tiles(length: int) -> tuple[int, jax.Array]:
    """Queries and keys of a tile, and the start of every tile on or below the diagonal."""
    tile = min(length, TILE)
    starts = [(i, j) for i in range(0, length, tile) for j in range(0, i + 1, tile)]
    return tile, jnp.array(starts, jnp.int32)


def _scores(k, q, key_start, query_start, group):
    """Masked, transposed scores `[keys, group * queries]`: reductions over keys then vectorise."""
    keys = key_start + jnp.arange(k.shape[0])[:, None]
    queries = jnp.tile(query_start + jnp.arange(q.shape[0] // group), group)[None, :]
    return jnp.where(keys <= queries, dot(k, flip(q)), -1e30)


def _attention_forward(q, k, v):
    out, normaliser = jax.lax.map(lambda head: _head_forward(*head), (q, k, v))
    return out, (q, k, v, out, normaliser)


def _attention_backward(saved, gradient):
    return jax.lax.map(lambda head: _head_backward(*head), (*saved, gradient))


def _head_forward(q, k, v):
    """Output `[group, time, dim]` and log-normalisers `[chunk, 1, group * queries]` of one KV head."""
    group, length, dim = q.shape
    size, starts = _tiles(length)
    columns = group * size
    k, v = k.astype(PRODUCT_DTYPE), v.astype(PRODUCT_DTYPE)
    q = _chunks((q * dim**-0.5).astype(PRODUCT_DTYPE), size)

    def tile(carry, start):
        total, top, out = carry
        chunk = start[0] // size
        k_tile, v_tile = (jax.lax.dynamic_slice_in_dim(x, start[1], size, 0) for x in (k, v))
        scores = _scores(k_tile, q[chunk], start[1], start[0], group)
        old = top[chunk]
        new = jnp.maximum(old, scores.max(0, keepdims=True))
        weights, scale = jnp.exp(scores - new), jnp.exp(old - new)
        part = jax.lax.optimization_barrier(dot(flip(v_tile), weights))
        total = total.at[chunk].set(total[chunk] * scale + weights.sum(0, keepdims=True))
        out = out.at[chunk].set(out[chunk] * scale + part)
        return (total, top.at[chunk].set(new), out), None

    row = jnp.zeros((len(q), 1, columns))
    (total, top, out), _ = jax.lax.scan(tile, (row, row - 1e30, jnp.zeros((len(q), dim, columns))), starts)
    out = (out / total).reshape(-1, dim, group, size).transpose(2, 0, 3, 1).reshape(group, length, dim)
    return out, top + jnp.log(total)


def _chunks(x, size):
    """`[group, time, dim]` as chunks of queries, `[chunk, group * size, dim]`."""
    group, _, dim = x.shape
    return x.reshape(group, -1, size, dim).transpose(1, 0, 2, 3).reshape(-1, group * size, dim)


def _head_backward(q, k, v, out, normaliser, gradient):
    """Gradients of the queries, keys and values of one KV head."""
    group, length, dim = out.shape
    size, starts = _tiles(length)
    delta = _chunks((gradient * out).sum(-1, keepdims=True), size).swapaxes(1, 2)
    q, gradient = (_chunks(x.astype(PRODUCT_DTYPE), size) for x in (q * dim**-0.5, gradient))
    k, v = k.astype(PRODUCT_DTYPE), v.astype(PRODUCT_DTYPE)

    def tile(carry, start):
        dq, dk, dv = carry
        chunk, j = start[0] // size, start[1]
        k_tile, v_tile = (jax.lax.dynamic_slice_in_dim(x, j, size, 0) for x in (k, v))
        weights = jnp.exp(_scores(k_tile, q[chunk], j, start[0], group) - normaliser[chunk])
        slope = (weights * (dot(v_tile, flip(gradient[chunk])) - delta[chunk])).astype(PRODUCT_DTYPE)
        dv_tile, dk_tile = (jax.lax.dynamic_slice_in_dim(x, j, size, 0) for x in (dv, dk))
        dv_tile, dk_tile = dv_tile + dot(weights, gradient[chunk]), dk_tile + dot(slope, q[chunk])
        dv, dk = (jax.lax.dynamic_update_slice_in_dim(x, y, j, 0) for x, y in ((dv, dv_tile), (dk, dk_tile)))
        part = jax.lax.optimization_barrier(dot(flip(k_tile), slope))
        return (dq.at[chunk].add(part), dk, dv), None

    zeros = jnp.zeros(k.shape, jnp.float32)
    start = (jnp.zeros((len(q), dim, group * size)), zeros, zeros)
    (dq, dk, dv), _ = jax.lax.scan(tile, start, starts)
    dq = dq.reshape(-1, dim, group, size).transpose(2, 0, 3, 1).reshape(group, length, dim)
    return dq * dim**-0.5, dk, dv


causal_attention.defvjp(_attention_forward, _attention_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    hidden: jax.Array, embedding: jax.Array, targets_weights: tuple[jax.Array, jax.Array], chunk: int = 1024
) -> tuple[jax.Array, jax.Array]:
    """Weighted sums of −log p(target): `(Σ w·nll, Σ nll)`; the gradient flows through the first only.

    Args:
        hidden: `[tokens, hidden]`.
        embedding: `[vocabulary, hidden]`.
        targets_weights: int32 `[tokens]` and float32 `[tokens]`.
        chunk: tokens whose logits exist at a time; static.
    """
    return _cross_entropy_forward(hidden, embedding, targets_weights, chunk)[0]


def _cross_entropy_forward(hidden, embedding, targets_weights, chunk):
    targets, weights = targets_weights
    embedding = embedding.astype(PRODUCT_DTYPE)
    head = flip(embedding)
    count = hidden.shape[0] // chunk

    def chunk_loss(carry, xs):
        d_embedding, loss, plain = carry
        h, target, weight = xs
        h = h.astype(PRODUCT_DTYPE)
        logits = dot(h, head)
        top = logits.max(-1, keepdims=True)
        p = jnp.exp(logits - top)
        total = p.sum(-1, keepdims=True)
        hit = jnp.arange(logits.shape[-1])[None, :] == target[:, None]
        nll = (top + jnp.log(total))[:, 0] - jnp.take_along_axis(logits, target[:, None], -1)[:, 0]
        slope = ((p / total - hit) * weight[:, None]).astype(PRODUCT_DTYPE)
        d_hidden = dot(slope, embedding).astype(PRODUCT_DTYPE)
        d_embedding = d_embedding + dot(flip(slope), h)
        return (d_embedding, loss + (nll * weight).sum(), plain + nll.sum()), d_hidden

    split = lambda x: x.reshape(count, chunk, *x.shape[1:])
    start = (jnp.zeros(embedding.shape, jnp.float32), jnp.zeros(()), jnp.zeros(()))
    (d_embedding, loss, plain), d_hidden = jax.lax.scan(
        chunk_loss, start, (split(hidden), split(targets), split(weights))
    )
    return (loss, plain), (d_hidden.reshape(hidden.shape), d_embedding)


def _cross_entropy_backward(chunk, saved, gradients):
    d_hidden, d_embedding = saved
    return d_hidden.astype(jnp.float32) * gradients[0], d_embedding * gradients[0], None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square normalisation of the last axis.

    Args:
        x: `[..., hidden]`.
        scale: `[hidden]`.
        epsilon: added to the mean square.
    """
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding; the pairs are the two halves of the last axis.

    Args:
        x: `[..., time, dim]`.
        cos: `[time, dim / 2]`.
        sin: `[time, dim / 2]`.
    """
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def feed_forward(
    w: Params, y: jax.Array, shape: Shape, counts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The output of a layer's feed-forward block `[tokens, hidden]`, and its load-balancing loss.

    Args:
        w: weights of the layer; with experts `router` `[hidden, experts]` and matrices `[experts, in, out]`.
        y: normalised activations, float32 `[tokens, hidden]`.
        shape: the model's shape.
        counts: experts of each token, as in `experts.gates`.
    """
    if not shape.num_local_experts:
        y = y.astype(PRODUCT_DTYPE)
        inner_product = jax.nn.silu(linear(y, w["gate_proj"])) * linear(y, w["up_proj"])
        return linear(inner_product, w["down_proj"]), jnp.zeros(())
    number, width, inner = w["gate_proj"].shape
    probability = jax.nn.softmax(y @ w["router"], -1)
    weight, balance = experts.gates(probability, shape.num_experts_per_tok, counts)
    wide = lambda kernel: kernel.transpose(1, 0, 2).reshape(width, number * inner)
    y = y.astype(PRODUCT_DTYPE)
    product = jax.nn.silu(linear(y, wide(w["gate_proj"]))) * linear(y, wide(w["up_proj"]))
    weighted = product.reshape(-1, number, inner) * weight[:, :, None]
    down = w["down_proj"].reshape(number * inner, width)
    return linear(weighted.reshape(-1, number * inner), down), balance


def hidden(
    params: Params, tokens: jax.Array, shape: Shape, counts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The input of the output projection, `[batch * time, hidden]`, and the mean load-balancing loss.

    Args:
        params: weights.
        tokens: `[batch, time]`.
        shape: the model's shape.
        counts: experts of each token in each layer, int32 `[layers, batch * time]`; None for as many as the
            shape has.
    """
    batch, length = tokens.shape
    heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    frequency = shape.rope_theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def per_head(z, count):
        return z.reshape(batch, length, count, dim).transpose(0, 2, 1, 3)

    flat = lambda z: z.reshape(batch * kv_heads, length, dim)
    x, balance = params["embed_tokens"][tokens.reshape(-1)], jnp.zeros(())
    for number, w in enumerate(params["layers"]):
        y = rms_norm(x, w["input_layernorm"], shape.rms_norm_eps).astype(PRODUCT_DTYPE)
        q = rotate(per_head(linear(y, w["q_proj"]), heads), cos, sin)
        k = rotate(per_head(linear(y, w["k_proj"]), kv_heads), cos, sin)
        v = per_head(linear(y, w["v_proj"]), kv_heads)
        grouped = q.reshape(batch * kv_heads, heads // kv_heads, length, dim)
        out = causal_attention(grouped, flat(k), flat(v)).reshape(batch, heads, length, dim)
        x = x + linear(out.transpose(0, 2, 1, 3).reshape(batch * length, heads * dim), w["o_proj"])
        y = rms_norm(x, w["post_attention_layernorm"], shape.rms_norm_eps)
        out, of_layer = feed_forward(w, y, shape, None if counts is None else counts[number])
        x, balance = x + out, balance + of_layer / shape.num_hidden_layers
    return rms_norm(x, params["norm"], shape.rms_norm_eps), balance


def loss(params: Params, tokens: jax.Array, weights: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Summed weighted and plain loss of next-token prediction, in nats.

    With experts, the first also has their load-balancing loss, and each token reads a number of them that is
    drawn for it.

    Args:
        params: weights.
        tokens: `[batch, time + 1]`.
        weights: `[batch, time]`, of each target.
        shape: the model's shape.
    """
    x, balance = hidden(params, tokens[:, :-1], shape, experts.drawn_counts(tokens[:, :-1], shape))
    chunk = min(1024, weights.size)
    targets = (tokens[:, 1:].reshape(-1), weights.reshape(-1))
    nats, plain = cross_entropy(x, params["embed_tokens"], targets, chunk)
    return nats + experts.BALANCE * weights.sum() * balance, plain
