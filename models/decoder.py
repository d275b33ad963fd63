"""From a Config to functions: the known families, and the static side of a model.

A module holds no numbers here. It is built once without allocating, split into its structure and a tree of
arrays, and put together again while a function is traced: at run time there are raw arrays only.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from entropic_jax.cache import ModelShape

from . import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from .config import Config, Family, ModelError
from .layers import Attend, CausalLM

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY for module in (llama, mistral, qwen2, qwen3, mixtral, qwen3_moe)
}

Params = dict[str, Any]
"""{"embed_tokens": …, "layers": (…,), "norm": …, "lm_head": …}: nested dicts and tuples of raw arrays."""


def family(raw: Mapping[str, Any]) -> Family:
    """The family that a parsed config.json names. ModelError for one that is not known."""
    stated = raw.get("architectures") or []
    names = stated if isinstance(stated, list) else [stated]
    types = {f.model_type: f for f in FAMILIES.values()}
    if not names and raw.get("model_type") in types:
        return types[raw["model_type"]]
    if len(names) != 1 or names[0] not in FAMILIES:
        found = names or raw.get("model_type")
        raise ModelError(f"architectures is {found!r}; accepted: one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[names[0]]


@functools.lru_cache(maxsize=64)
def structure(config: Config) -> tuple[nnx.GraphDef[CausalLM], Params]:
    """The module's static structure and its tree of ShapeDtypeStructs, nothing allocated."""
    if config.architecture not in FAMILIES:
        raise ModelError(f"architecture is {config.architecture!r}; accepted: {', '.join(sorted(FAMILIES))}")
    layer = FAMILIES[config.architecture].layer
    graph, state = nnx.split(nnx.eval_shape(lambda: CausalLM(config, layer)))
    return graph, as_tuples(nnx.to_pure_dict(state))


def as_tuples(tree: Any) -> Any:
    """Lists of a module come out of flax as dicts keyed by number; in Params they are tuples."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return tuple(as_tuples(tree[i]) for i in range(len(tree)))
    return {key: as_tuples(value) for key, value in tree.items()}


def as_dicts(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return {i: as_dicts(value) for i, value in enumerate(tree)}
    return {key: as_dicts(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def multiplied(config: Config) -> tuple[int, int, float]:
    """Weights that multiply in one token's step, weights of all experts, and the share a token chooses."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(structure(config)[1])
    kernels = [leaf for path, leaf in leaves if path[-1].key == "kernel"]
    experts = sum(kernel.size for kernel in kernels if kernel.ndim == 3)
    chosen, number = config.num_experts_per_tok, max(config.num_local_experts, 1)
    dense = sum(kernel.size for kernel in kernels if kernel.ndim == 2)
    return dense + experts * chosen // number, experts, chosen / number if experts else 0.0


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The functions of a model: static and hashable, to be closed over or passed to jit as static."""

    config: Config

    @property
    def shape(self) -> ModelShape:
        c = self.config
        return ModelShape(
            c.num_hidden_layers,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.vocab_size,
            c.hidden_size,
            *multiplied(c),
        )

    def module(self, params: Params) -> CausalLM:
        """The flax module that holds these arrays; free inside jit, where it exists only while tracing."""
        return nnx.merge(structure(self.config)[0], as_dicts(params))

    def hidden(
        self, params: Params, tokens: jax.Array, positions: jax.Array, layers: tuple[Any, ...], attend: Attend
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Hidden states `[rows, n, hidden]` of int32 tokens at int32 positions, both `[rows, n]`.

        `layers` holds one cache per layer, handed to `attend` and returned as `attend` leaves it.
        """
        return self.module(params)(tokens, positions, layers, attend)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocabulary]` of hidden states `[..., hidden]`."""
        return self.module(params).logits(hidden)
