"""Draft head: a small network that drafts a model's next tokens from its last hidden state.

    x = fc([norm(f), norm(embedding of the token)])
    x = x + o_proj(attention(q_proj(norm(x))))
    x = x + mlp(norm(x)),  f' = norm(x)

f is the hidden state that the token was drawn from: that of the model at first, then the head's own f' (as
in EAGLE, Li et al. 2024, arXiv 2401.15077). Logits are those of the model's output projection, to all tokens
or to a list of common ones, beside which the head drafts none (as FR-Spec, Zhao et al. 2025, arXiv
2502.14856). Differs from EAGLE: the head has no keys and values. It attends to those that a layer of the
model has in the cache (as GLIDE, Du et al. 2024, arXiv 2402.02082), so prefill, prefix cache and passes do
not know of it. A head without the second line attends to nothing, which is cheaper (as Hydra, Ankner et al.
2024, arXiv 2402.05109).

`draft_head_files` reads and writes one.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from entropic_jax.pallas import skinny_matmul
from entropic_jax.state.cache import ModelShape

from .block_spec import AttentionSpec, MLPSpec, NormSpec
from .config import Config, ModelError
from .decoder import Decoder, Params, as_dicts, as_tuples, blocks
from .families import FAMILIES
from .kernel_layout import block_kernels
from .layers import MLP, Linear, OperandDtype
from .norms import RMSNorm
from .quantisation import quantise, quantise_kernel, quantise_module
from .rope import apply_rope, rotation_of

LISTED = "tokens"  # the tensor that names the tokens it drafts
EPSILON = 1e-6

LayerAttention = Callable[[jax.Array], jax.Array]
"""Attention of queries `[rows, 1, heads, head_dim]` to a layer of the cache, in the shape of the queries."""


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Sizes of a draft head, and how often its drafts were accepted when it was made."""

    hidden_size: int  # of the model
    vocab_size: int  # of the model
    num_hidden_layers: int  # of the model
    layer: int | None  # of the model, from 0, whose keys and values the head reads; None: it reads none
    intermediate_size: int  # of the head's feed-forward block
    window: int | None = None  # positions of that layer that it sees at most, the latest ones; None: all
    drafted_tokens: int | None = None  # how many tokens of the vocabulary it may draft; None: all
    entropy_edges: tuple[float, ...] = (0.3, 1.5, 2.7)  # nats, ascending
    acceptance: tuple[float, ...] = (0.95, 0.8, 0.6, 0.45)  # P(accepted) of drafts between the edges
    mean_acceptance: float = 0.7  # P(accepted) of a draft whose entropy is not known


class HeadModule(nnx.Module):
    """The layers of a draft head.

    Args:
        config: the sizes of the head.
        attention: the attention of the layer whose keys and values it reads; None without attention.
    """

    def __init__(self, config: HeadConfig, attention: AttentionSpec | None) -> None:
        hidden = config.hidden_size
        spec, inner = NormSpec(EPSILON), MLPSpec(config.intermediate_size)
        self.attention = attention
        self.feature_norm, self.token_norm = RMSNorm(hidden, spec), RMSNorm(hidden, spec)
        self.fc = Linear(2 * hidden, hidden)
        self.post_attention_layernorm = RMSNorm(hidden, spec)
        if attention is not None:
            queries = attention.heads * attention.head_dim
            self.input_layernorm = RMSNorm(hidden, spec)
            self.q_proj, self.o_proj = Linear(hidden, queries), Linear(queries, hidden)
        self.mlp = MLP(hidden, inner)
        self.norm = RMSNorm(hidden, spec)
        if config.drafted_tokens is not None:
            self.tokens = nnx.Param(jnp.zeros(config.drafted_tokens, jnp.int32))

    def __call__(
        self, features: jax.Array, embedded: jax.Array, positions: jax.Array, read: LayerAttention
    ) -> jax.Array:
        """The features of the next tokens, `[rows, n, hidden]`.

        Args:
            features: `[rows, n, hidden]`, that each token was drawn from.
            embedded: `[rows, n, hidden]`, the embeddings of the tokens.
            positions: int32 `[rows, n]`, of the tokens in their texts.
            read: attends to keys and values of the model.
        """
        spec = self.attention
        x = self.fc(jnp.concatenate([self.feature_norm(features), self.token_norm(embedded)], -1))
        if spec is not None:
            query = self.q_proj(self.input_layernorm(x)).reshape(*x.shape[:2], spec.heads, spec.head_dim)
            if spec.rope is not None:
                query = apply_rope(query, rotation_of(spec.rope, positions), spec.rope.interleaved)
            x = x + self.o_proj(read(query).reshape(*x.shape[:2], -1))
        return self.norm(x + self.mlp(self.post_attention_layernorm(x)))


class HeadParams(NamedTuple):
    """The parameters of a head that runs."""

    weights: Params  # as on disk, or int8 with scales
    output: Params | None = None  # the model's output projection to the tokens of a list; None: to all


@dataclasses.dataclass(frozen=True)
class DraftHead:
    """The functions of a draft head: static and hashable, as those of a `Decoder`."""

    target: Decoder  # the model that it drafts for
    config: HeadConfig

    @property
    def layer(self) -> int | None:
        """The layer of the model whose keys and values the head reads; None reads none."""
        return self.config.layer

    @property
    def window(self) -> int | None:
        """Positions of the layer that the head sees at most, the latest ones; None for all."""
        return self.config.window

    @property
    def acceptance(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """How often drafts are accepted: edges of their entropy in nats, P between them, and its mean."""
        return self.config.entropy_edges, self.config.acceptance, self.config.mean_acceptance

    @property
    def shape(self) -> ModelShape:
        """Sizes of a draft step: the head and the output projection."""
        attention, shape = attention_of(self.target.config, self.layer), self.target.shape
        kernels = sum(x.size for x in jax.tree.leaves(head_structure(self)[1]) if x.ndim == 2)
        output = self.config.hidden_size * (self.config.drafted_tokens or self.config.vocab_size)
        sizes = shape.heads, shape.kv_heads, shape.head_dim
        if attention is not None:
            sizes = attention.heads, attention.cache_heads, attention.cache_dim
        return ModelShape(1, *sizes, self.config.vocab_size, self.config.hidden_size, kernels + output)

    def hidden(
        self,
        params: Params,
        draft: HeadParams,
        features: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        read: LayerAttention,
    ) -> jax.Array:
        """The features of the next tokens, `[rows, n, hidden]`.

        Args:
            params: the parameters of the model.
            draft: the parameters of the head.
            features: `[rows, n, hidden]`, that each token was drawn from.
            tokens: int32 `[rows, n]`.
            positions: int32 `[rows, n]`, of the tokens in their texts.
            read: attends to the keys and values of the layer.
        """
        graph, _ = head_structure(self, is_quantised(draft.weights), operand_dtype(draft.weights["fc"]))
        module = nnx.merge(graph, as_dicts(draft.weights))
        embedded = self.target.embedded(params, tokens)
        return module(features.astype(embedded.dtype), embedded, positions, read)

    def logits(self, params: Params, draft: HeadParams, features: jax.Array) -> jax.Array:
        """Logits, float32 `[..., drafted tokens]`, of features.

        Args:
            params: the parameters of the model.
            draft: the parameters of the head.
            features: `[..., hidden]`.
        """
        if draft.output is None:
            return self.target.logits(params, features)
        part, spec = draft.output, FAMILIES[self.target.config.architecture].output(self.target.config)
        scales = (part["scale"],) if "scale" in part else ()
        rounded = operand_dtype(part) if operand_dtype(part) != "float32" else None
        (logits,) = skinny_matmul.skinny_matmul(
            features, part["kernel"], scales=scales, operand_dtype=rounded
        )
        logits = logits.astype(jnp.float32)
        logits = (logits + part["bias"] if "bias" in part else logits) * spec.logit_multiplier
        if (cap := spec.logit_soft_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return logits

    def drafted_tokens(self, draft: HeadParams) -> jax.Array | None:
        """The tokens that the head drafts, int32 `[drafted tokens]`, ascending; None for all.

        Args:
            draft: the parameters of the head.
        """
        return draft.weights.get(LISTED)


def with_list(head: DraftHead, weights: Params, tokens: Any) -> tuple[DraftHead, Params]:
    """The head that drafts the tokens of a list only.

    Args:
        head: the functions of the head.
        weights: the parameters of the head.
        tokens: int32 `[n]`; None for all tokens of the vocabulary.
    """
    rest = {name: part for name, part in weights.items() if name != LISTED}
    number = None if tokens is None else len(tokens)
    listed = {} if tokens is None else {LISTED: jnp.asarray(tokens, jnp.int32)}
    config = dataclasses.replace(head.config, drafted_tokens=number)
    return dataclasses.replace(head, config=config), rest | listed


def runnable(head: DraftHead, params: Params, weights: Params) -> HeadParams:
    """The parameters with which a head runs: int8 where products widen that at no cost, else as they are.

    Where the processor multiplies numbers of 8 bits, and all matrices have sizes for it, they lie in quads:
    products then round their rows to 8 bits, which changes drafts, not what is accepted of them.

    Args:
        head: the functions of the head.
        params: the parameters of the model.
        weights: those of the head.
    """
    tokens, output = weights.get(LISTED), None
    if tokens is not None:
        projection = {**params["lm_head"], "kernel": skinny_matmul.by_columns(params["lm_head"]["kernel"])}
        output = jax.tree.map(lambda x: x[..., tokens], projection)
    if skinny_matmul.reads_as_stored("int8"):
        weights = quantise(weights, head_structure(head, True)[1])
        if output is not None and "scale" not in output:
            kernel, scale = quantise_kernel(output["kernel"])
            output = {**output, "kernel": kernel, "scale": scale}
    weights = jax.tree.map(lambda x: x, weights)  # new dicts, in which matrices are replaced
    parts = [weights] if output is None else [weights, {"lm_head": output}]
    matrices = [x for x in jax.tree.leaves(parts) if x.ndim == 2]
    in_quads = all(skinny_matmul.reads_quads(x) for x in matrices)
    for part in parts:
        block_kernels(part, in_quads)
    return HeadParams(weights, output)


def attention_of(config: Config, layer: int | None) -> AttentionSpec | None:
    """The attention of a layer that a head may read; None for no layer.

    Args:
        config: the configuration of the model.
        layer: from 0.

    Raises:
        ModelError: there is no such layer, or its keys and values are not those of plain attention to all
            positions.
    """
    if layer is None:
        return None
    layers = blocks(config)
    if not 0 <= layer < len(layers):
        raise ModelError(f"layer must be in [0, {len(layers) - 1}]; got {layer}")
    spec = layers[layer].attention
    if not isinstance(spec, AttentionSpec) or spec.most_visible is not None:
        raise ModelError(f"layer must attend to all positions with keys and values per head; got {layer}")
    return spec


def last_full_layer(config: Config) -> int:
    """The last layer of a model that attends to all positions. Raises ModelError where there is none."""
    layers = blocks(config)
    for number in reversed(range(len(layers))):
        spec = layers[number].attention
        if isinstance(spec, AttentionSpec) and spec.most_visible is None:
            return number
    raise ModelError(
        f"a draft head reads a layer that attends to all positions; {config.architecture} has none"
    )


@functools.lru_cache(maxsize=16)
def head_structure(
    head: DraftHead, quantised: bool = False, operand_dtype: OperandDtype = "float32"
) -> tuple[nnx.GraphDef[HeadModule], Params]:
    """The module's static structure and its tree of ShapeDtypeStructs; allocates nothing.

    Args:
        head: the functions of the head.
        quantised: whether its matrices are int8 with scales.
        operand_dtype: the dtype of the operands of its products.
    """
    attention = attention_of(head.target.config, head.layer)

    def module():
        plain = HeadModule(head.config, attention)
        built = quantise_module(plain, "int8") if quantised else plain
        for _, part in nnx.iter_modules(built):
            if isinstance(part, Linear):
                part.operand_dtype = operand_dtype
        return built

    graph, state = nnx.split(nnx.eval_shape(module))
    return graph, as_tuples(nnx.to_pure_dict(state))


def is_quantised(weights: Params) -> bool:
    """Whether the matrices of a head are int8 with scales."""
    return "scale" in weights["fc"]


def operand_dtype(part: Params) -> OperandDtype:
    """The dtype of the operands of a linear layer of a head that runs: int8 for a kernel in quads."""
    return "int8" if skinny_matmul.is_in_quads(part["kernel"]) else "float32"


def named(weights: Params) -> dict[str, Any]:
    """The parameters of a head by their names on disk."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def initialise(head: DraftHead, params: Params, seed: int) -> Params:
    """Weights to train from: the features pass through, and the projections begin small.

    Args:
        head: the head whose weights they are.
        params: the parameters of the model. Where the layer's blocks have the shapes of the head's, the head
            begins as a copy of them.
        seed: the seed of what is random.

    Raises:
        ModelError: the layers of the model are stacked.
    """
    if head.target.stacked:
        raise ModelError("model must be loaded without `stacked` to train a draft head")
    hidden = head.config.hidden_size
    layer = params["layers"][-1 if head.layer is None else head.layer]
    copies = {"q_proj": layer["self_attn"].get("q_proj"), "o_proj": layer["self_attn"].get("o_proj")}
    copies |= {f"mlp.{name}": part for name, part in layer.get("mlp", {}).items()}
    leaves = []
    for number, (name, leaf) in enumerate(named(head_structure(head)[1]).items()):
        source = copies.get(name.removesuffix(".kernel"))
        kernel = source.get("kernel") if isinstance(source, Mapping) else None
        if name == LISTED:
            raise ValueError("drafted_tokens must be None for a head to train; tokens are chosen afterwards")
        if leaf.ndim == 1:
            value = np.ones(leaf.shape, np.float32)
        elif name == "fc.kernel":
            random = np.random.default_rng((seed, number)).standard_normal((hidden, hidden))
            value = np.concatenate([np.eye(hidden), random * 0.3 / np.sqrt(hidden)]).astype(np.float32)
        elif kernel is not None and kernel.shape == leaf.shape and jnp.issubdtype(kernel.dtype, jnp.floating):
            value = np.asarray(kernel, np.float32)
        else:
            random = np.random.default_rng((seed, number)).standard_normal(leaf.shape)
            value = (random / np.sqrt(leaf.shape[0])).astype(np.float32)
        leaves.append(jnp.asarray(value))
    return jax.tree.unflatten(jax.tree.structure(head_structure(head)[1]), leaves)
