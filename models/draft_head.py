"""Draft head: a small network that drafts a model's next tokens from its last hidden state.

    x = fc([norm(f), norm(embedding of the token)])
    x = x + o_proj(attention(q_proj(norm(x))))
    x = x + mlp(norm(x)),  f' = norm(x)

f is the hidden state that the token was drawn from: that of the model at first, then the head's own f' (as in
EAGLE, Li et al. 2024, arXiv 2401.15077). Logits are those of the model's output projection. Differs from
EAGLE: the head has no keys and values. It attends to those that a layer of the model has in the cache (as
GLIDE, Du et al. 2024, arXiv 2402.02082), so prefill, prefix cache and passes do not know of it.

A directory holds `config.json` and `draft_head.safetensors`; `python -m entropic_jax.models.train.draft_head`
writes it.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from entropic_jax.state.cache import ModelShape

from .block_spec import AttentionSpec, MLPSpec, NormSpec
from .config import Config, ModelError, abbreviate, is_integer, read_json
from .decoder import Decoder, Params, as_dicts, as_tuples, blocks
from .layers import MLP, Linear
from .norms import RMSNorm
from .rope import apply_rope, rotation_of

MODEL_TYPE, TENSORS, FOLDER = "draft_head", "draft_head.safetensors", "draft_head"
SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "layer", "intermediate_size")
TABLES = ("entropy_edges", "acceptance")
EPSILON = 1e-6

LayerAttention = Callable[[jax.Array], jax.Array]
"""Attention of queries `[rows, 1, heads, head_dim]` to a layer of the cache, in the shape of the queries."""


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Sizes of a draft head, and how often its drafts were accepted when it was made."""

    hidden_size: int  # of the model
    vocab_size: int  # of the model
    num_hidden_layers: int  # of the model
    layer: int  # of the model, whose keys and values the head reads; from 0
    intermediate_size: int  # of the head's feed-forward block
    entropy_edges: tuple[float, ...] = (0.3, 1.5, 2.7)  # nats, ascending
    acceptance: tuple[float, ...] = (0.95, 0.8, 0.6, 0.45)  # P(accepted) of drafts between the edges
    mean_acceptance: float = 0.7  # P(accepted) of a draft whose entropy is not known


class HeadModule(nnx.Module):
    """The layers of a draft head.

    Args:
        config: the sizes of the head.
        attention: the attention of the layer whose keys and values it reads.
    """

    def __init__(self, config: HeadConfig, attention: AttentionSpec) -> None:
        hidden, queries = config.hidden_size, attention.heads * attention.head_dim
        spec, inner = NormSpec(EPSILON), MLPSpec(config.intermediate_size)
        self.attention = attention
        self.feature_norm, self.token_norm = RMSNorm(hidden, spec), RMSNorm(hidden, spec)
        self.fc = Linear(2 * hidden, hidden)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, spec), RMSNorm(hidden, spec)
        self.q_proj, self.o_proj = Linear(hidden, queries), Linear(queries, hidden)
        self.mlp = MLP(hidden, inner)
        self.norm = RMSNorm(hidden, spec)

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
        query = self.q_proj(self.input_layernorm(x)).reshape(*x.shape[:2], spec.heads, spec.head_dim)
        if spec.rope is not None:
            query = apply_rope(query, rotation_of(spec.rope, positions), spec.rope.interleaved)
        x = x + self.o_proj(read(query).reshape(*x.shape[:2], -1))
        return self.norm(x + self.mlp(self.post_attention_layernorm(x)))


@dataclasses.dataclass(frozen=True)
class DraftHead:
    """The functions of a draft head: static and hashable, as those of a `Decoder`."""

    target: Decoder  # the model that it drafts for
    config: HeadConfig

    @property
    def layer(self) -> int:
        """The layer of the model whose keys and values the head reads."""
        return self.config.layer

    @property
    def acceptance(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """How often drafts are accepted: edges of their entropy in nats, P between them, and its mean."""
        return self.config.entropy_edges, self.config.acceptance, self.config.mean_acceptance

    @property
    def shape(self) -> ModelShape:
        """Sizes of a draft step: the head and the output projection."""
        attention, weights = attention_of(self.target.config, self.layer), head_structure(self)[1]
        kernels = sum(x.size for x in jax.tree.leaves(weights) if x.ndim == 2)
        output = self.config.hidden_size * self.config.vocab_size
        sizes = attention.heads, attention.cache_heads, attention.cache_dim
        return ModelShape(1, *sizes, self.config.vocab_size, self.config.hidden_size, kernels + output)

    def hidden(
        self,
        params: Params,
        weights: Params,
        features: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        read: LayerAttention,
    ) -> jax.Array:
        """The features of the next tokens, `[rows, n, hidden]`, as `Decoder.logits` takes them.

        Args:
            params: the parameters of the model.
            weights: the parameters of the head.
            features: `[rows, n, hidden]`, that each token was drawn from.
            tokens: int32 `[rows, n]`.
            positions: int32 `[rows, n]`, of the tokens in their texts.
            read: attends to the keys and values of the layer.
        """
        module = nnx.merge(head_structure(self)[0], as_dicts(weights))
        embedded = self.target.embedded(params, tokens)
        return module(features.astype(embedded.dtype), embedded, positions, read)


def attention_of(config: Config, layer: int) -> AttentionSpec:
    """The attention of a layer that a head may read.

    Args:
        config: the configuration of the model.
        layer: from 0.

    Raises:
        ModelError: there is no such layer, or its keys and values are not those of plain attention to all
            positions.
    """
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
def head_structure(head: DraftHead) -> tuple[nnx.GraphDef[HeadModule], Params]:
    """The module's static structure and its tree of ShapeDtypeStructs; allocates nothing."""
    attention = attention_of(head.target.config, head.layer)
    graph, state = nnx.split(nnx.eval_shape(lambda: HeadModule(head.config, attention)))
    return graph, as_tuples(nnx.to_pure_dict(state))


def is_draft_head(directory: Path) -> bool:
    """Whether a directory holds a draft head, by its config.json."""
    try:
        raw = json.loads((directory / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and raw.get("model_type") == MODEL_TYPE


def load(directory: Path, target: Decoder, dtype: Any = "float32") -> tuple[DraftHead, Params]:
    """Read the draft head of a model.

    Args:
        directory: as `save` writes it.
        target: the functions of the model that it drafts for.
        dtype: the dtype that the head computes in, that of the model.

    Raises:
        ModelError: the directory holds no draft head, or that of another model.
    """
    if not is_draft_head(directory):
        raise ModelError(f"{directory} holds no draft head (a config.json of model_type {MODEL_TYPE!r})")
    file = directory / "config.json"
    try:
        config = _checked(read_json(file), target.config)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    head = DraftHead(target, config)
    expected = _named(head_structure(head)[1])
    tensors = directory / TENSORS
    try:
        stored = load_file(tensors)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{tensors} cannot be read: {error}") from None
    for name, leaf in expected.items():
        shape = stored[name].shape if name in stored else None
        if shape != leaf.shape:
            raise ModelError(f"{tensors}: {name} must have the shape {leaf.shape}; got {shape}")
        if not np.isfinite(stored[name].astype(np.float32)).all():
            raise ModelError(f"{tensors}: {name} must be finite")
    leaves = [jnp.asarray(stored[name].astype(np.float32), dtype) for name in expected]
    return head, jax.tree.unflatten(jax.tree.structure(head_structure(head)[1]), leaves)


def save(directory: Path, head: DraftHead, weights: Params, dtype: Any = jnp.bfloat16) -> None:
    """Write a draft head to a directory, which is made.

    Args:
        directory: its path.
        head: whose configuration is written.
        weights: the parameters of the head.
        dtype: the dtype of the tensors on disk.
    """
    directory.mkdir(parents=True, exist_ok=True)
    described = {"model_type": MODEL_TYPE, **dataclasses.asdict(head.config)}
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n", "utf-8")
    tensors = {name: np.asarray(leaf).astype(dtype) for name, leaf in _named(weights).items()}
    save_file(tensors, directory / TENSORS)


def _named(weights: Params) -> dict[str, Any]:
    """The parameters of a head by their names on disk."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def _checked(raw: Mapping[str, Any], config: Config) -> HeadConfig:
    """The configuration in a config.json, of a head for a model. Raises ModelError for any other.

    Args:
        raw: the parsed file.
        config: the configuration of the model.
    """
    for name in SIZES:
        if not is_integer(raw.get(name)) or not 0 <= raw[name] < 2**20:
            raise ModelError(f"{name} must be a whole number below 2**20; got {abbreviate(raw.get(name))}")
    for name in ("hidden_size", "vocab_size", "num_hidden_layers"):
        if raw[name] != (expected := getattr(config, name)):
            raise ModelError(f"{name} must be that of the model, {expected}; got {raw[name]}")
    if raw["intermediate_size"] < 1:
        raise ModelError("intermediate_size must be at least 1; got 0")
    attention_of(config, raw["layer"])
    tables: dict[str, Any] = {name: raw.get(name) for name in TABLES}
    for name, values in tables.items():
        if not isinstance(values, list) or not all(_is_number(value) for value in values):
            raise ModelError(f"{name} must be a list of numbers; got {abbreviate(values)}")
    edges: Any = tables["entropy_edges"]
    acceptance: list[Any] = [*tables["acceptance"], raw.get("mean_acceptance")]
    if edges != sorted(edges) or len(acceptance) != len(edges) + 2:
        raise ModelError("entropy_edges must ascend, with one acceptance more than edges; got others")
    if not all(_is_number(value) and 0 < value < 1 for value in acceptance):
        raise ModelError(f"acceptance and mean_acceptance must lie in (0, 1); got {abbreviate(acceptance)}")
    sizes = {name: raw[name] for name in SIZES}
    return HeadConfig(
        **sizes,
        entropy_edges=tuple(map(float, edges)),
        acceptance=tuple(map(float, tables["acceptance"])),
        mean_acceptance=float(raw["mean_acceptance"]),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def initialise(head: DraftHead, params: Params, seed: int) -> Params:
    """Weights to train from: the features pass through, and the projections begin small.

    Args:
        head: the head whose weights they are.
        params: the parameters of the model. Where the layer's blocks have the shapes of the head's, the head
            begins as a copy of them.
        seed: the seed of what is random.
    """
    hidden = head.config.hidden_size
    layer = params["layers"][head.layer]
    copies = {"q_proj": layer["self_attn"].get("q_proj"), "o_proj": layer["self_attn"].get("o_proj")}
    copies |= {f"mlp.{name}": part for name, part in layer.get("mlp", {}).items()}
    leaves = []
    for number, (name, leaf) in enumerate(_named(head_structure(head)[1]).items()):
        source = copies.get(name.removesuffix(".kernel"))
        kernel = source.get("kernel") if isinstance(source, Mapping) else None
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
