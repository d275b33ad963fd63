"""A draft head's passes for training, in the products of `models.train.forward`.

The mathematics is that of `models.draft_head`. A head's drafts are computed for all positions of a window at
once, and their cost beside the model's distributions chunk by chunk, so that `[tokens, vocabulary]` never
exists.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import draft_head
from ..decoder import Decoder, Params
from ..rope import apply_rope, rotation_of
from .forward import PRODUCT_DTYPE, TILE, causal_attention, linear, rms_norm

CHUNK = 1024  # tokens whose logits exist at a time


class Target(NamedTuple):
    """A model whose head is trained."""

    decoder: Decoder
    params: Params


class Taught(NamedTuple):
    """Results of the model for a window, which the head reads and learns."""

    hidden: jax.Array  # [rows, n, hidden]
    keys: jax.Array | None = None  # [rows, n, kv_heads, head_dim], of the layer that the head reads
    values: jax.Array | None = None


def in_product_dtype(params: Params) -> Params:
    """The parameters of a model in the dtype of products."""

    def narrowed(leaf: Any) -> Any:
        wide = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1
        return leaf.astype(PRODUCT_DTYPE) if wide else leaf

    return jax.tree.map(narrowed, params)


def dense_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, **options: Any
) -> jax.Array:
    """Attention of q `[rows, m, heads, head_dim]` to k and v `[rows, n, kv_heads, head_dim]`, as q.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        visible: bool `[m, n]`, the keys that each query sees.
        options: `soft_cap` and `sink` as in `attention.attend.read`.
    """
    rows, m, heads, size = q.shape
    grouped = q.reshape(rows, m, k.shape[2], -1, size)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(size)
    if (cap := options.get("soft_cap")) is not None:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(visible, scores, -1e30)
    if (sink := options.get("sink")) is not None:
        wide = sink.astype(jnp.float32).reshape(1, k.shape[2], -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(wide, (*scores.shape[:-1], 1))], -1)
    weights = jax.nn.softmax(scores, -1)[..., : k.shape[1]].astype(v.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(rows, m, heads, -1)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`dense_attention` of queries that see the keys up to their own position, which are as many as they.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
    """
    rows, n, heads, size = q.shape
    groups = k.shape[2]
    if n % min(n, TILE) or v.shape != k.shape:
        return dense_attention(q, k, v, jnp.arange(n)[:, None] >= jnp.arange(n))
    query = q.transpose(0, 2, 1, 3).reshape(rows * groups, heads // groups, n, size)
    key, value = (x.transpose(0, 2, 1, 3).reshape(rows * groups, n, size) for x in (k, v))
    out = causal_attention(query.astype(jnp.float32), key, value).reshape(rows, heads, n, size)
    return out.transpose(0, 2, 1, 3)


def before(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`dense_attention` of queries at 0, 1, … that see the keys before them, the first one the first key.

    Args:
        q: the queries, no more than keys.
        k: the keys.
        v: the values.
    """
    later = jnp.pad(q[:, 1:], ((0, 0), (0, k.shape[1] - q.shape[1] + 1), (0, 0), (0, 0)))
    first = dense_attention(q[:, :1], k[:, :1], v[:, :1], jnp.ones((1, 1), bool))
    return jnp.concatenate([first, causal(later, k, v)[:, : q.shape[1] - 1]], 1)


def teach(target: Target, layer: int | None, tokens: jax.Array) -> Taught:
    """Runs the model over windows of text, without a cache.

    Args:
        target: the model.
        layer: whose keys and values the head reads; None for a head without attention.
        tokens: int32 `[rows, n]`.
    """
    positions = jnp.arange(tokens.shape[1])

    def attend(q, k, v, _, *, window=None, chunk=None, **options):
        if window is None and chunk is None and not any(x is not None for x in options.values()):
            return causal(q, k, v).astype(q.dtype), (k, v)
        visible = positions[:, None] >= positions
        if window is not None:
            visible &= positions > positions[:, None] - window
        if chunk is not None:
            visible &= positions // chunk == positions[:, None] // chunk
        return dense_attention(q, k, v, visible, **options), (k, v)

    (decoder, params), layers = target, (None,) * target.decoder.shape.layers
    everywhere = jnp.broadcast_to(positions, tokens.shape)
    hidden, written = decoder.hidden(params, tokens, everywhere, layers, attend)
    if layer is None:
        return Taught(hidden)
    return Taught(hidden, *(x.astype(jnp.float32) for x in written[layer]))


def drafted_features(
    head: draft_head.DraftHead, target: Target, weights: Params, tokens: jax.Array, taught: Taught, depth: int
) -> list[jax.Array]:
    """Features of the drafts of every position; the i-th array is of the i-th draft from each start.

    Args:
        head: the head's functions.
        target: the model.
        weights: the parameters of the head.
        tokens: int32 `[rows, n]`.
        taught: what the model computed for them.
        depth: drafts from every start.

    Returns:
        Arrays `[rows, n − i, hidden]`; entry `[r, s]` of the i-th is what `Decoder.logits` takes for the
        token after position s + i.
    """
    n, result = tokens.shape[1], []
    features = jnp.pad(taught.hidden[:, :-1].astype(jnp.float32), ((0, 0), (1, 0), (0, 0)))
    embedded = target.decoder.embedded(target.params, tokens).astype(jnp.float32)
    for number in range(depth):

        def read(q):
            # A round that starts with the token at s reads the keys of the positions before it.
            assert taught.keys is not None and taught.values is not None
            return before(q, taught.keys, taught.values)

        positions = jnp.broadcast_to(jnp.arange(n - number) + number, (len(tokens), n - number))
        features = hidden(head, weights, features[:, : n - number], embedded[:, number:], positions, read)
        result.append(features)
    return result


def hidden(
    head: draft_head.DraftHead,
    weights: Params,
    features: jax.Array,
    embedded: jax.Array,
    positions: jax.Array,
    read: Any,
) -> jax.Array:
    """Like `DraftHead.hidden`, of embedded tokens.

    Args:
        head: the head's functions.
        weights: the parameters of the head.
        features: `[rows, n, hidden]`, that each token was drawn from.
        embedded: `[rows, n, hidden]`, the embeddings of the tokens.
        positions: int32 `[rows, n]`, of the tokens in their texts.
        read: attends to keys and values of the model.
    """
    spec = draft_head.attention_of(head.target.config, head.layer)
    rows, n, width = features.shape

    def norm(name, x):
        return rms_norm(x, weights[name]["weight"], draft_head.EPSILON)

    def product(x, layer):
        return linear(x.reshape(rows * n, -1), layer["kernel"]).reshape(rows, n, -1)

    x = jnp.concatenate([norm("feature_norm", features), norm("token_norm", embedded)], -1)
    x = product(x, weights["fc"])
    if spec is not None:
        query = product(norm("input_layernorm", x), weights["q_proj"])
        query = query.reshape(rows, n, spec.heads, spec.head_dim)
        if spec.rope is not None:
            query = apply_rope(query, rotation_of(spec.rope, positions), spec.rope.interleaved)
        x = x + product(read(query).reshape(rows, n, -1), weights["o_proj"])
    y, mlp = norm("post_attention_layernorm", x), weights["mlp"]
    inner = jax.nn.silu(product(y, mlp["gate_proj"])) * product(y, mlp["up_proj"])
    return norm("norm", x + product(inner, mlp["down_proj"]))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def draft_cost(
    decoder: Decoder,
    objective: str,
    params: Params,
    drafted: jax.Array,
    taught: jax.Array,
    counted: jax.Array,
) -> jax.Array:
    """The cost of drafts, summed over the tokens that are counted; the gradient is that of `drafted`.

    For p of the model and q of the draft, "divergence" is KL(p ‖ q) in nats, and "rejection" is
    1 − Σ min(p, q), the total variation: of a drafted token, about the probability that it is rejected.

    Args:
        decoder: the functions of the model.
        objective: one of `OBJECTIVES`.
        params: the parameters of the model.
        drafted: `[tokens, hidden]`, features of the head.
        taught: `[tokens, hidden]`, hidden states of the model.
        counted: float32 `[tokens]`, 1 for tokens that are counted, else 0.
    """
    return _cost_forward(decoder, objective, params, drafted, taught, counted)[0]


def _cost_forward(decoder, objective, params, drafted, taught, counted):
    size = math.gcd(len(drafted), CHUNK)

    def chunk(total, xs):
        features, hidden, counted = xs

        def logits_of(x):
            return decoder.logits(params, x.astype(hidden.dtype)).astype(jnp.float32)

        logits, gradient_of = jax.vjp(logits_of, features)
        costs, slopes = OBJECTIVES[objective](jax.nn.log_softmax(logits_of(hidden)), logits)
        return total + (costs * counted).sum(), gradient_of(slopes * counted[:, None])[0]

    chunks = (x.reshape(-1, size, *x.shape[1:]) for x in (drafted, taught, counted))
    total, gradient = jax.lax.scan(chunk, jnp.float32(0), tuple(chunks))
    return total, gradient.reshape(drafted.shape)


def _cost_backward(decoder, objective, gradient, slope):
    return None, slope * gradient, None, None


draft_cost.defvjp(_cost_forward, _cost_backward)


def _divergence(logprobs: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """KL(p ‖ q) of each token, and its gradient to the logits of q."""
    probs, drafted = jnp.exp(logprobs), jax.nn.log_softmax(logits)
    return (probs * (logprobs - drafted)).sum(-1), jnp.exp(drafted) - probs


def _rejection(logprobs: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """1 − Σ min(p, q) of each token, and its gradient to the logits of q."""
    probs, drafted = jnp.exp(logprobs), jax.nn.softmax(logits)
    below = (drafted < probs).astype(jnp.float32)
    mass = (drafted * below).sum(-1, keepdims=True)
    return 1 - jnp.minimum(probs, drafted).sum(-1), drafted * (mass - below)


OBJECTIVES = {"divergence": _divergence, "rejection": _rejection}
