"""Decoder: the functions of a model (hidden states, logits), built from its `Config`, and the model families.

The flax module is built once without allocating and split into its static structure and a tree of arrays. It
is merged again while a function is traced, so at run time there are only raw arrays.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from entropic_jax.cache import ModelShape

from . import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, sharding
from .config import Config, Family, ModelError
from .layers import Attend, CausalLM

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY for module in (llama, mistral, qwen2, qwen3, mixtral, qwen3_moe)
}

Params = dict[str, Any]
"""{"embed_tokens": …, "layers": (…,), "norm": …, "lm_head": …}: nested dicts and tuples of raw arrays."""


def family(raw: Mapping[str, Any]) -> Family:
    """The model family named by a parsed config.json. Raises ModelError for an unknown one."""
    stated = raw.get("architectures") or []
    names = stated if isinstance(stated, list) else [stated]
    types = {f.model_type: f for f in FAMILIES.values()}
    if not names and raw.get("model_type") in types:
        return types[raw["model_type"]]
    if len(names) != 1 or names[0] not in FAMILIES:
        stated_names = names or raw.get("model_type")
        raise ModelError(f"architectures must be one of {', '.join(sorted(FAMILIES))}; got {stated_names!r}")
    return FAMILIES[names[0]]


@functools.lru_cache(maxsize=64)
def structure(config: Config) -> tuple[nnx.GraphDef[CausalLM], Params]:
    """The module's static structure and its tree of ShapeDtypeStructs; allocates nothing."""
    if config.architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"architecture must be one of {known}; got {config.architecture!r}")
    layer = FAMILIES[config.architecture].layer
    graph, state = nnx.split(nnx.eval_shape(lambda: CausalLM(config, layer)))
    return graph, as_tuples(nnx.to_pure_dict(state))


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
    """The functions of a model: static and hashable, to close over or to pass to jit as a static argument."""

    config: Config
    mesh: Mesh | None = None  # None: of one device

    @property
    def partition_specs(self) -> Params:
        """The PartitionSpec of every parameter on the mesh."""
        return sharding.partition_specs(structure(self.config)[1])

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        c = self.config
        return ModelShape(
            c.num_hidden_layers,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.vocab_size,
            c.hidden_size,
            *weight_counts(c),
        )

    def module(self, params: Params) -> CausalLM:
        """The flax module with these arrays; costs nothing inside jit, where it exists only while tracing."""
        return nnx.merge(structure(self.config)[0], as_dicts(params))

    def hidden(
        self, params: Params, tokens: jax.Array, positions: jax.Array, layers: tuple[Any, ...], attend: Attend
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Hidden states after the last norm.

        Args:
            params: the model's parameters.
            tokens: int32 `[rows, n]`.
            positions: int32 `[rows, n]`.
            layers: one cache per layer, passed to `attend`.
            attend: attention and cache update.

        Returns:
            Hidden states, `[rows, n, hidden]`, and the caches as `attend` returned them.
        """
        return self.module(params)(tokens, positions, layers, attend)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Logits, float32 `[..., vocabulary]`, of hidden states `[..., hidden]`."""
        return self.module(params).logits(hidden)
