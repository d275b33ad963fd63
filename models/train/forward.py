"""The training loss of a Llama-shaped decoder, arranged so that a step is fast on a CPU too.

The mathematics is that of `models.decoder`; what differs is the order of the work. Matrix products run
in bfloat16 with float32 accumulation. XLA's CPU backend has a fast path (AMX, AVX-512) for these only
when both operands lie in memory as `[m, k] @ [k, n]`, so every transpose is made explicit here.
Attention is a flash attention in chunks of queries whose backward pass works on transposed scores, and
the cross-entropy computes its own gradient chunk by chunk, so that `[tokens, vocabulary]` never exists.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
HALF = jnp.bfloat16


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x @ y` over the last two axes, bfloat16 in, float32 out."""
    return jnp.matmul(x.astype(HALF), y.astype(HALF), preferred_element_type=jnp.float32)


def flip(x: jax.Array) -> jax.Array:
    """Swap the last two axes *in memory*: the barrier keeps XLA from folding the transpose into a product."""
    swapped = jnp.swapaxes(x.astype(HALF), -1, -2)
    return jax.lax.optimization_barrier(swapped.reshape(-1)).reshape(swapped.shape)


@jax.custom_vjp
def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight` for x `[tokens, in]` and weight `[in, out]`; float32 out."""
    return dot(x, weight)


def _linear_forward(x: jax.Array, weight: jax.Array):
    x, weight = x.astype(HALF), weight.astype(HALF)
    return dot(x, weight), (x, weight)


def _linear_backward(saved, gradient):
    x, weight = saved
    gradient = gradient.astype(HALF)
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


def _tiles(length: int) -> tuple[int, int, jax.Array]:
    """Sizes of a tile in queries and keys, and the start of every tile on or below the diagonal."""
    queries, keys = min(length, 256), min(length, 512)
    starts = [(i, j) for i in range(0, length, queries) for j in range(0, i + queries, keys)]
    return queries, keys, jnp.array(starts, jnp.int32)


def _scores(k, q, key_start, query_start, group):
    """Masked, transposed scores `[n, keys, group * queries]`: reductions over keys then vectorise."""
    keys = key_start + jnp.arange(k.shape[1])[:, None]
    queries = jnp.tile(query_start + jnp.arange(q.shape[1] // group), group)[None, :]
    return jnp.where(keys <= queries, dot(k, flip(q)), -1e30)


def _attention_forward(q, k, v):
    n, group, length, dim = q.shape
    queries, keys, starts = _tiles(length)
    columns = group * queries
    q, k, v = (q * dim**-0.5).astype(HALF), k.astype(HALF), v.astype(HALF)
    # one row of query chunks: [chunk, n, group * queries, dim]
    q = q.reshape(n, group, -1, queries, dim).transpose(2, 0, 1, 3, 4).reshape(-1, n, columns, dim)

    def tile(carry, start):
        total, top, out = carry
        i, chunk = start[0], start[0] // queries
        k_tile, v_tile = (jax.lax.dynamic_slice_in_dim(x, start[1], keys, 1) for x in (k, v))
        scores = _scores(k_tile, q[chunk], start[1], i, group)
        old = top[chunk]
        new = jnp.maximum(old, scores.max(-2, keepdims=True))
        weights, scale = jnp.exp(scores - new), jnp.exp(old - new)
        part = jax.lax.optimization_barrier(dot(flip(v_tile), weights))
        total = total.at[chunk].set(total[chunk] * scale + weights.sum(-2, keepdims=True))
        out = out.at[chunk].set(out[chunk] * scale + part)
        return (total, top.at[chunk].set(new), out), None

    row = jnp.zeros((len(q), n, 1, columns))
    start = (row, row - 1e30, jnp.zeros((len(q), n, dim, columns)))
    (total, top, out), _ = jax.lax.scan(tile, start, starts)
    normaliser = top + jnp.log(total)
    out = (out / total).reshape(-1, n, dim, group, queries).transpose(1, 3, 0, 4, 2)
    out = out.reshape(n, group, length, dim)
    return out, (q, k, v, out, normaliser)


def _attention_backward(saved, gradient):
    q, k, v, out, normaliser = saved
    n, group, length, dim = out.shape
    queries, keys, starts = _tiles(length)
    delta = (gradient * out).sum(-1).reshape(n, group, -1, queries)
    delta = delta.transpose(2, 0, 1, 3).reshape(normaliser.shape)
    gradient = gradient.astype(HALF).reshape(n, group, -1, queries, dim)
    gradient = gradient.transpose(2, 0, 1, 3, 4).reshape(q.shape)

    def tile(carry, start):
        dq, dk, dv = carry
        chunk, j = start[0] // queries, start[1]
        k_tile, v_tile = (jax.lax.dynamic_slice_in_dim(x, j, keys, 1) for x in (k, v))
        weights = jnp.exp(_scores(k_tile, q[chunk], j, start[0], group) - normaliser[chunk])
        slope = (weights * (dot(v_tile, flip(gradient[chunk])) - delta[chunk])).astype(HALF)
        dv_tile, dk_tile = (jax.lax.dynamic_slice_in_dim(x, j, keys, 1) for x in (dv, dk))
        dv_tile, dk_tile = dv_tile + dot(weights, gradient[chunk]), dk_tile + dot(slope, q[chunk])
        dv, dk = (jax.lax.dynamic_update_slice_in_dim(x, y, j, 1) for x, y in ((dv, dv_tile), (dk, dk_tile)))
        part = jax.lax.optimization_barrier(dot(flip(k_tile), slope))
        return (dq.at[chunk].add(part), dk, dv), None

    zeros = jnp.zeros(k.shape, jnp.float32)
    start = (jnp.zeros((len(q), n, dim, group * queries)), zeros, zeros)
    (dq, dk, dv), _ = jax.lax.scan(tile, start, starts)
    dq = dq.reshape(-1, n, dim, group, queries).transpose(1, 3, 0, 4, 2)
    return dq.reshape(n, group, length, dim) * dim**-0.5, dk, dv


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
    embedding = embedding.astype(HALF)
    head = flip(embedding)
    count = hidden.shape[0] // chunk

    def chunk_loss(carry, xs):
        d_embedding, loss, plain = carry
        h, target, weight = xs
        h = h.astype(HALF)
        logits = dot(h, head)
        top = logits.max(-1, keepdims=True)
        p = jnp.exp(logits - top)
        total = p.sum(-1, keepdims=True)
        hit = jnp.arange(logits.shape[-1])[None, :] == target[:, None]
        nll = (top + jnp.log(total))[:, 0] - jnp.take_along_axis(logits, target[:, None], -1)[:, 0]
        slope = ((p / total - hit) * weight[:, None]).astype(HALF)
        d_hidden = dot(slope, embedding).astype(HALF)
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


def loss(params: Params, tokens: jax.Array, weights: jax.Array, config: Any) -> tuple[jax.Array, jax.Array]:
    """Summed weighted and plain loss of next-token prediction, in nats.

    Args:
        params: weights.
        tokens: `[batch, time + 1]`.
        weights: `[batch, time]`, of each target.
        config: shape of the model.
    """
    batch, length = weights.shape
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    group = heads // kv_heads
    frequency = config.rope_theta ** (-jnp.arange(0, dim, 2) / dim)
    angle = jnp.arange(length)[:, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x = params["embed_tokens"][tokens[:, :-1].reshape(-1)]
    for w in params["layers"]:
        y = rms_norm(x, w["input_layernorm"], config.rms_norm_eps).astype(HALF)
        split = lambda z, h: z.reshape(batch, length, h, dim).transpose(0, 2, 1, 3)
        q, k, v = (
            split(linear(y, w["q_proj"]), heads),
            split(linear(y, w["k_proj"]), kv_heads),
            split(linear(y, w["v_proj"]), kv_heads),
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        flat = lambda z: z.reshape(batch * kv_heads, length, dim)
        out = causal_attention(q.reshape(batch * kv_heads, group, length, dim), flat(k), flat(v))
        out = (
            out.reshape(batch, heads, length, dim).transpose(0, 2, 1, 3).reshape(batch * length, heads * dim)
        )
        x = x + linear(out, w["o_proj"])
        y = rms_norm(x, w["post_attention_layernorm"], config.rms_norm_eps).astype(HALF)
        x = x + linear(jax.nn.silu(linear(y, w["gate_proj"])) * linear(y, w["up_proj"]), w["down_proj"])
    x = rms_norm(x, params["norm"], config.rms_norm_eps)
    return cross_entropy(x, params["embed_tokens"], (tokens[:, 1:].reshape(-1), weights.reshape(-1)), 1024)
