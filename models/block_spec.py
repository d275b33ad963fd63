"""Specification of a decoder, layer by layer, as data: norms, attention, feed-forward block, multipliers.

A family of models is a function from a `Config` and a layer's number to a `BlockSpec` (see `families`).
`layers` builds the one decoder that computes any of them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .config import Config
from .rope import RopeSpec


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """x / rms(x) · weight, or for kind "layer" (x − mean) / std · weight + bias."""

    epsilon: float
    kind: str = "rms"  # or "layer"
    offset: float = 0.0  # added to the stored weight
    bias: bool = False
    weight: bool = True  # whether there is one


class PositionScale(NamedTuple):
    """Growth of queries with their position: q · (1 + slope · ln(1 + ⌊(position + offset) / length⌋))."""

    slope: float
    length: int
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False  # of the projections of q, k and v
    output_bias: bool = False
    head_norm: NormSpec | None = None  # of queries and keys, before they are rotated
    norm_span: str = "head"  # or "all": over all heads at once; or "each": per head, with a weight per head
    norm_rotated: bool = False  # whether queries and keys are normalised after they are rotated instead
    rope: RopeSpec | None = None  # None: no rotation
    scale: float | None = None  # of the scores; None for 1/√head_dim
    position_scale: PositionScale | None = None
    soft_cap: float | None = None  # c: scores become c · tanh(score / c)
    sinks: bool = False  # whether each head has a logit that takes attention and gives nothing
    window: int | None = None  # positions that a query sees at most, its own included
    chunk: int | None = None  # positions are cut into chunks of so many; a query sees its own chunk

    @property
    def most_visible(self) -> int | None:
        """Positions that a query sees at most, its own included; None for all before it."""
        return min(filter(None, (self.window, self.chunk)), default=None)

    @property
    def cache_heads(self) -> int:
        """KV heads that the cache holds."""
        return self.kv_heads

    @property
    def cache_dim(self) -> int:
        """The head dimension that the cache holds."""
        return self.head_dim


@dataclasses.dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (MLA, DeepSeek-V2): keys and values of all heads from one latent vector."""

    heads: int
    latent: int  # width of the vector that keys and values are made of
    key_dim: int  # numbers of a head's key that are not rotated
    value_dim: int
    rope: RopeSpec  # of the rotated part of a key, which all heads share
    norm: NormSpec
    query_latent: int | None = None  # width of the vector that queries are made of; None: of x itself
    bias: bool = False
    scale: float = 1.0
    window: int | None = None

    @property
    def most_visible(self) -> int | None:
        """Positions that a query sees at most, its own included; None for all before it."""
        return self.window

    @property
    def cache_heads(self) -> int:
        """KV heads that the cache holds."""
        return 1

    @property
    def cache_dim(self) -> int:
        """The head dimension that the cache holds."""
        return self.latent + self.rope.dim


@dataclasses.dataclass(frozen=True)
class MLPSpec:
    """down(act(gate(x)) · up(x)), or without a gate down(act(up(x)))."""

    inner: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """How a token's experts are chosen and weighted."""

    scores: str = "softmax"  # or "sigmoid"
    bias: bool = False  # of the router's projection
    correction: bool = False  # whether a bias per expert is added to the scores to choose, not to weight
    normalise: bool = False  # whether the weights of a token's experts sum to 1
    scale: float = 1.0  # of the weights
    groups: int = 1  # of experts; only those of the best groups are eligible
    groups_per_token: int = 1
    group_score: int = 1  # number of best scores that are summed to a group's score
    by_logit: bool = False  # whether experts are chosen by logit, and scored among those chosen


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """A router and experts in the place of one feed-forward block."""

    experts: int
    per_token: int
    inner: int
    router: RouterSpec = RouterSpec()
    activation: str = "silu"
    bias: bool = False  # of the experts' projections
    clamp: tuple[float, float] | None = None  # (α, limit) of the clamped SwiGLU of gpt-oss
    weighted_inputs: bool = False  # whether weights multiply what experts read instead of what they return
    shared: MLPSpec | None = None  # an expert that every token passes through
    shared_gate: bool = False  # whether its output is multiplied by sigmoid(w · x)


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """A decoder layer.

    `placement` of the norms: "pre" normalises the input of attention and of the feed-forward block, "post"
    their outputs, "sandwich" both, "parallel" gives both blocks the same normalised input, and
    "parallel_pre" gives each its own.
    """

    attention: AttentionSpec | LatentAttentionSpec
    mlp: MLPSpec | ExpertsSpec
    norm: NormSpec
    placement: str = "pre"
    residual_multiplier: float = 1.0  # of what a block adds to the residual stream


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """The model around its layers: multipliers of the embedding and of the logits, and the last norm."""

    norm: NormSpec
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_soft_cap: float | None = None
    head_bias: bool = False


def rms_norm_of(config: Config) -> NormSpec:
    """The RMS norm of a Config."""
    return NormSpec(config.rms_norm_eps)


def plain_output(config: Config) -> OutputSpec:
    """Neither multipliers nor caps."""
    return OutputSpec(rms_norm_of(config))


class Family(NamedTuple):
    """Declaration of a family of models; adding one is an entry in a file of `families`."""

    architecture: str  # as in config.json, "LlamaForCausalLM"
    model_type: str
    defaults: Mapping[str, Any]  # of optional keys of config.json; a key that is not here is not read
    block: Callable[[Config, int], BlockSpec]  # layer i
    output: Callable[[Config], OutputSpec] = plain_output
    aliases: Mapping[str, str] = {}  # fields of `Config` that config.json names otherwise: ours to theirs
    renames: tuple[tuple[str, str], ...] = ()  # parts of tensor names, replaced in order: (ours, on disk)
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()  # tensors that hold several of ours in a row
    rows: tuple[str, ...] = ()  # vectors that are matrices of one row on disk
    fused_in_experts: bool = False  # whether only the tensors of experts are fused
    stacked_experts: bool = False  # whether a tensor on disk holds all experts
    experts_as_multiplied: bool = False  # whether stacked experts are [experts, in, out]
    interleaved_experts: bool = False  # whether fused columns of experts take turns
    required: Mapping[str, Any] = {}  # keys that must have this value, or be absent
    first_layers_slide: bool = False  # every second layer before `max_window_layers`; else those from it on
    default_rope: Mapping[str, Any] = {}  # `rope_parameters` of files without them and `rope_scaling`
    unwritten: tuple[str, ...] = ()  # keys that transformers takes for another field
    stretched_base: bool = (
        False  # whether "dynamic" scaling with `alpha` is a larger base, whatever else it states
    )
    activations: Mapping[str, str] = {}  # spellings of `hidden_act` that mean another here


def rope_of(config: Config, layer: int, *, interleaved: bool = False, local: bool = False) -> RopeSpec | None:
    """The rotation that the configuration states for a layer; None if the layer has none.

    Args:
        config: the model's configuration.
        layer: its number.
        interleaved: whether pairs are neighbours.
        local: whether layers with a window have a base of their own and no scaling.
    """
    if not config.rotates(layer):
        return None
    if local and config.window(layer) is not None:
        theta = config.rope_local_base_freq or config.rope_theta
        return RopeSpec(config.rotary_dim, theta, None, interleaved)
    return RopeSpec(config.rotary_dim, config.rope_theta, config.rope_scaling, interleaved)


def attention_of(config: Config, layer: int, **changes: Any) -> AttentionSpec:
    """The attention of a Llama, with a window where the configuration states one.

    Args:
        config: the model's configuration.
        layer: its number.
        **changes: fields of the specification that differ.
    """
    plain: dict[str, Any] = {"rope": rope_of(config, layer), "window": config.window(layer), **changes}
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return AttentionSpec(*sizes, **plain)


def mlp_of(config: Config, **changes: Any) -> MLPSpec:
    """The feed-forward block of a Llama, with these changes."""
    plain: dict[str, Any] = {"inner": config.intermediate_size, "activation": config.hidden_act}
    return MLPSpec(**{**plain, **changes})


def experts_of(config: Config, router: RouterSpec, **changes: Any) -> ExpertsSpec:
    """Experts of the sizes that the configuration states.

    Args:
        config: the model's configuration.
        router: the router of the layer.
        **changes: fields of the specification that differ.
    """
    plain: dict[str, Any] = {"inner": config.moe_intermediate_size, "activation": config.hidden_act}
    sizes = (config.num_local_experts, config.num_experts_per_tok)
    return ExpertsSpec(*sizes, router=router, **{**plain, **changes})


def block_of(
    config: Config,
    layer: int,
    mlp: MLPSpec | ExpertsSpec | None = None,
    norm: NormSpec | None = None,
    *,
    placement: str = "pre",
    **attention: Any,
) -> BlockSpec:
    """The layer of a Llama with changes.

    Args:
        config: the model's configuration.
        layer: its number.
        mlp: the feed-forward block; None for that of a Llama.
        norm: the norm of the layer; None for RMS norms.
        placement: the placement of the norms.
        **attention: changes of the attention.
    """
    return BlockSpec(
        attention_of(config, layer, **attention),
        mlp_of(config) if mlp is None else mlp,
        rms_norm_of(config) if norm is None else norm,
        placement,
        config.residual_multiplier,
    )
