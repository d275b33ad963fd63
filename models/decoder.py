"""Decoder: the functions of a model (hidden states, logits), built from its `Config`, and the model families.

The flax module is built once without allocating and split into its static structure and a tree of arrays. It
is merged again while a function is traced, so at run time there are only raw arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from entropic_jax.state.cache import ModelShape
from entropic_jax.state.layer_stacks import LayerPattern

from . import sharding
from .block_spec import BlockSpec, ExpertsSpec, Family, LatentAttentionSpec
from .config import Config, ModelError, abbreviate
from .experts import SparseMLP
from .families import FAMILIES, REFUSED
from .latent_attention import LatentAttention
from .layer_stack import layer_pattern, outside_loops, traced_layers
from .layers import MLP, Attend, Attention, CausalLM, DecoderLayer, Linear, OperandDtype
from .quantisation import quantise_module
from .rope import context_key, rope_problem
from .router import ExpertReader, Router

Params = dict[str, Any]
"""{"embed_tokens": …, "layers": (…,), "norm": …, "lm_head": …}: nested dicts and tuples of raw arrays."""


PUBLISHED_AS = {"kimi_k2": "deepseek_v3"}  # values of model_type that stand for one of a family


def family(raw: Mapping[str, Any]) -> Family:
    """The model family named by a parsed config.json. Raises ModelError for an unknown one."""
    stated = raw.get("architectures")
    names = stated if isinstance(stated, list) else [] if stated is None else [stated]
    types = {f.model_type: f for f in FAMILIES.values()}
    model_type = raw.get("model_type")
    if isinstance(model_type, str):
        model_type = PUBLISHED_AS.get(model_type, model_type)
        if not names and model_type in types:
            return types[model_type]
    name = names[0] if len(names) == 1 and isinstance(names[0], str) else None
    if name in REFUSED:
        raise ModelError(f"architectures must not be {name}: {REFUSED[name]} cannot be computed")
    if name is None or name not in FAMILIES:
        stated = abbreviate(names or model_type)
        raise ModelError(f"architectures must be one of those that `entropic models` lists; got {stated}")
    if model_type not in (None, FAMILIES[name].model_type):
        expected = FAMILIES[name].model_type
        raise ModelError(f"model_type must be {expected!r} for {name}; got {abbreviate(model_type)}")
    return FAMILIES[name]


@functools.lru_cache(maxsize=64)
def blocks(config: Config) -> tuple[BlockSpec, ...]:
    """The specification of every layer. Raises ModelError for an unknown architecture."""
    if config.architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"architecture must be one of {known}; got {config.architecture!r}")
    result = tuple(FAMILIES[config.architecture].block(config, i) for i in range(config.num_hidden_layers))
    for rope in dict.fromkeys(block.attention.rope for block in result):
        if problem := rope and rope_problem(rope):
            raise ModelError(problem)
    return result


def decoder_layer(hidden: int, spec: BlockSpec) -> DecoderLayer:
    """The module of a layer; `hidden` is the width of the residual stream."""
    attention, mlp = spec.attention, spec.mlp
    latent = isinstance(attention, LatentAttentionSpec)
    attend = LatentAttention(hidden, attention) if latent else Attention(hidden, attention)
    feed_forward = SparseMLP(hidden, mlp) if isinstance(mlp, ExpertsSpec) else MLP(hidden, mlp)
    return DecoderLayer(hidden, spec, attend, feed_forward)


def causal_lm(config: Config, pattern: LayerPattern | None = None) -> CausalLM:
    """The module of a model.

    Args:
        config: the model's configuration.
        pattern: the pattern of the layers that are stacked; None without any.
    """
    output = FAMILIES[config.architecture].output(config)
    specs = traced_layers(blocks(config), pattern)
    return CausalLM(config, output, [decoder_layer(config.hidden_size, spec) for spec in specs], pattern)


@functools.lru_cache(maxsize=64)
def structure(
    config: Config,
    quantization: str | None = None,
    operand_dtype: OperandDtype | None = None,
    stacked: bool = False,
) -> tuple[nnx.GraphDef[CausalLM], Params]:
    """The module's static structure and its tree of ShapeDtypeStructs; allocates nothing.

    Args:
        config: the model's configuration.
        quantization: the quantization of the weights, see `quantisation`.
        operand_dtype: the dtype of the operands of products, see `Decoder`.
        stacked: whether layers that repeat are stacked, see `layer_stack`.
    """
    pattern = layer_pattern(blocks(config)) if stacked else None  # an unknown architecture is an error

    def module() -> CausalLM:
        built = causal_lm(config, pattern)
        built = built if quantization is None else quantise_module(built, quantization)
        return built if operand_dtype is None else with_wide_activations(built, operand_dtype)

    graph, state = nnx.split(nnx.eval_shape(module))
    params = as_tuples(nnx.to_pure_dict(state))
    return graph, params if pattern is None else with_repeats(params, pattern)


def num_parameters(config: Config) -> int:
    """The parameters of a model before quantization; tied embeddings, in memory twice or not, count once."""
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(structure(config)[1]))
    return parameters - config.vocab_size * config.hidden_size * config.tie_word_embeddings


def with_repeats(params: Params, pattern: LayerPattern) -> Params:
    """The shapes of parameters of which those of layers that repeat are stacked.

    Args:
        params: shapes, of one repeat.
        pattern: the pattern of the layers.
    """
    begin, end = pattern.prefix, pattern.prefix + pattern.period
    stack = lambda x: jax.ShapeDtypeStruct((pattern.repeats, *x.shape), x.dtype)
    layers = params["layers"]
    stacked = jax.tree.map(stack, layers[begin:end])
    return {**params, "layers": (*layers[:begin], *stacked, *layers[end:])}


def with_wide_activations(module: CausalLM, operand_dtype: OperandDtype) -> CausalLM:
    """The module with activations of float32, and operands of a dtype in products but those of routers."""
    module.wide_activations = True
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Linear) and not isinstance(part, Router):
            part.operand_dtype = operand_dtype
    return module


def as_tuples(tree: Any) -> Any:
    """Converts flax's dicts keyed by number, which stand for lists, to tuples as in `Params`."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return tuple(as_tuples(tree[i]) for i in range(len(tree)))
    return {key: as_tuples(value) for key, value in tree.items()}


def as_dicts(tree: Any) -> Any:
    """The inverse of `as_tuples`."""
    if isinstance(tree, (tuple, list)):
        return {i: as_dicts(value) for i, value in enumerate(tree)}
    return {key: as_dicts(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


@functools.lru_cache(maxsize=64)
def weight_counts(config: Config) -> tuple[int, int, float]:
    """Weights used for one token, weights of all experts, and the fraction of experts that a token uses."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(structure(config)[1])
    kernels = [leaf for path, leaf in leaves if path[-1].key == "kernel"]
    experts = sum(kernel.size for kernel in kernels if kernel.ndim == 3)
    experts_per_token, num_experts = config.num_experts_per_tok, max(config.num_local_experts, 1)
    dense = sum(kernel.size for kernel in kernels if kernel.ndim == 2)
    fraction = experts_per_token / num_experts if experts else 0.0
    return dense + experts * experts_per_token // num_experts, experts, fraction


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The functions of a model: static and hashable, to close over or to pass to jit as a static argument.

    Args:
        config: the model's configuration.
        mesh: the mesh of the devices that hold the parameters; None for one device.
        quantization: the quantization of the weights, see `quantisation`.
        operand_dtype: the dtype of the operands of products, if activations are float32 whatever the dtype of
            the weights is; None for activations in the dtype of the embedding.
        stacked: whether the parameters of layers that repeat are stacked, and their pages, and programs scan
            over them, see `layer_stack`.
        page_shards: devices of the mesh that divide a KV head and its pages.
    """

    config: Config
    mesh: Mesh | None = None
    quantization: str | None = None
    operand_dtype: OperandDtype | None = None
    stacked: bool = False
    page_shards: int = 1

    @property
    def pattern(self) -> LayerPattern | None:
        """The layers that programs scan over; None for programs that are unrolled."""
        return layer_pattern(blocks(self.config)) if self.stacked else None

    @property
    def structure(self) -> tuple[nnx.GraphDef[CausalLM], Params]:
        """The module's static structure, and its parameters as ShapeDtypeStructs."""
        return structure(self.config, self.quantization, self.operand_dtype, self.stacked)

    @property
    def partition_specs(self) -> Params:
        """The PartitionSpec of every parameter on the mesh."""
        devices = sharding.model_devices(self.mesh)
        return sharding.partition_specs(self.structure[1], devices, self.pattern)

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        c, attention = self.config, blocks(self.config)[0].attention
        return ModelShape(
            c.num_hidden_layers,
            attention.heads,
            attention.cache_heads,
            attention.cache_dim,
            c.vocab_size,
            c.hidden_size,
            *weight_counts(c),
            pattern=self.pattern,
            page_shards=self.page_shards,
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Positions that a query of each layer sees, its own included; None for all before it."""
        return tuple(block.attention.most_visible for block in blocks(self.config))

    def context_key(self, length: int) -> tuple[int, ...]:
        """A key that is equal for texts that may share cached keys of a common prefix.

        Some scalings of the rotation depend on the length of the text (see `rope.context_key`). () where none
        does.

        Args:
            length: tokens of the text.
        """
        ropes = dict.fromkeys(block.attention.rope for block in blocks(self.config))
        return tuple(n for rope in ropes if rope is not None for n in context_key(rope, length))

    def module(self, params: Params) -> CausalLM:
        """The flax module with these arrays; costs nothing inside jit, where it exists only while tracing."""
        return nnx.merge(self.structure[0], as_dicts(params))

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        layers: Any,
        attend: Attend,
        lengths: jax.Array | None = None,
        expert_reader: ExpertReader | None = None,
    ) -> tuple[jax.Array, Any]:
        """Hidden states after the last norm.

        Args:
            params: the model's parameters.
            tokens: int32 `[rows, n]`.
            positions: int32 `[rows, n]`.
            layers: one cache per layer, passed to `attend`: a tuple, or `LayerStacks` for stacked layers.
            attend: attention and cache update.
            lengths: int32 `[rows, n]`, tokens of the text that each token is read with; see
                `rope.rotation_of`.
            expert_reader: decides how many experts each token reads in each layer that has them; None reads
                as many as the configuration says.

        Returns:
            Hidden states, `[rows, n, hidden]`, and the caches as `attend` returned them.
        """
        module: Any = self.module(params)
        if expert_reader is not None:
            for layer in module.layers:
                if isinstance(layer.mlp, SparseMLP):
                    layer.mlp.expert_reader = expert_reader
            attend = outside_loops(attend)  # the reader counts layers while they are traced
        return module(tokens, positions, layers, attend, lengths)

    def embedded(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Embeds tokens int32 `[...]` as the first layer reads them, `[..., hidden]`."""
        return self.module(params).embedded(tokens)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Logits, float32 `[..., vocabulary]`, of hidden states `[..., hidden]`.

        In a program on a mesh, those of this device's part of the vocabulary.
        """
        return self.module(params).logits(hidden)
