"""Configuration of a decoder: its sizes and switches, each checked where it is declared.

Names are those of Hugging Face's `config.json`, which `config_json` reads and writes.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from .rope import RopeScaling

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
DENSE, SPARSE = "dense", "sparse"  # feed-forward blocks, and those with experts
LARGEST_INTEGER = 2**31 - 1
LARGEST_NUMBER = 1e30
MOST_EXPERTS, MOST_LAYERS = 16384, 16384
LARGEST_JSON = 64_000_000  # bytes
LARGEST_SETTINGS = 8_000_000  # bytes, of a file of settings: a second of parsing
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "xielu")
SPELLINGS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_tanh": "gelu_pytorch_tanh"}


class ModelError(ValueError):
    """A model that cannot be used: the message names the file or field, what it must be, and its value."""


class Check(NamedTuple):
    """The accepted values of a field, as a test and in words."""

    accepts: Callable[[Any], bool]
    requirement: str


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number and no boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def integer(low: int, high: int = LARGEST_INTEGER) -> Check:
    """Accepts integers from `low` to `high`."""
    text = f"an integer of at least {low}" if high == LARGEST_INTEGER else f"an integer from {low} to {high}"
    return Check(lambda value: is_integer(value) and low <= value <= high, text)


def optional(check: Check) -> Check:
    """Accepts null and all that `check` accepts."""
    return Check(lambda value: value is None or check.accepts(value), f"null or {check.requirement}")


def choice(*names: str) -> Check:
    """Accepts one of these strings."""
    text = ", ".join(map(repr, names))
    return Check(lambda value: isinstance(value, str) and value in names, f"one of {text}")


def items(check: Check) -> Check:
    """Accepts lists whose entries `check` accepts."""

    def accepts(value):
        return isinstance(value, tuple) and all(map(check.accepts, value))

    return Check(accepts, f"a list, each entry {check.requirement}")


POSITIVE, COUNT, SIZE = integer(1), integer(0), integer(0)
TOKEN = integer(0)
POSITIVE_NUMBER = Check(lambda value: is_number(value) and 0 < value < LARGEST_NUMBER, "a positive number")
SMALL_NUMBER = Check(lambda value: is_number(value) and 0 <= value < LARGEST_NUMBER, "a number of at least 0")
SHARE = Check(lambda value: is_number(value) and 0 < value <= 1, "a number above 0 and at most 1")
BOOLEAN = Check(lambda value: isinstance(value, bool), "true or false")
ROPE_SCALING = Check(lambda value: value is None or isinstance(value, RopeScaling), "None or a RopeScaling")


def option(default: Any, check: Check) -> Any:
    """A field of `Config` with its default and what it accepts."""
    return dataclasses.field(default=default, metadata={"check": check})


def size(check: Check = POSITIVE) -> Any:
    """A field of `Config` that has no default."""
    return dataclasses.field(metadata={"check": check})


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and switches of a decoder: hashable, so it can be static under jit.

    Sizes are required; other fields have defaults. A family reads the fields that it
    declares and ignores the others. `num_key_value_heads` 0 stands for as many as query heads, `head_dim` 0
    for `hidden_size // num_attention_heads`. Raises ModelError for values that do not fit together.
    """

    architecture: str
    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size(integer(1, MOST_LAYERS))
    num_attention_heads: int = size()
    num_key_value_heads: int = option(0, COUNT)
    head_dim: int = option(0, COUNT)
    max_position_embeddings: int = option(4096, POSITIVE)
    rms_norm_eps: float = option(1e-6, POSITIVE_NUMBER)
    rope_theta: float = option(10000.0, POSITIVE_NUMBER)
    rope_scaling: RopeScaling | None = option(None, ROPE_SCALING)  # noqa: RUF009
    tie_word_embeddings: bool = option(False, BOOLEAN)
    attention_bias: bool = option(False, BOOLEAN)
    mlp_bias: bool = option(False, BOOLEAN)
    hidden_act: str = option("silu", choice(*ACTIVATIONS))
    sliding_window: int | None = option(None, optional(POSITIVE))  # positions seen, the query's own included
    layer_types: tuple[str, ...] | None = option(None, optional(items(choice(FULL, SLIDING, CHUNKED))))
    num_local_experts: int = option(0, integer(0, MOST_EXPERTS))
    num_experts_per_tok: int = option(0, COUNT)
    moe_intermediate_size: int = option(0, COUNT)
    norm_topk_prob: bool = option(False, BOOLEAN)
    decoder_sparse_step: int = option(1, POSITIVE)
    mlp_only_layers: tuple[int, ...] = option((), items(COUNT))
    bos_token_id: int | None = option(None, optional(TOKEN))
    eos_token_id: tuple[int, ...] = option((), items(TOKEN))
    partial_rotary_factor: float = option(1.0, SHARE)  # of a head's width that is rotated
    rotary_width: int = option(0, COUNT)  # numbers of a head that are rotated; 0: by that factor
    rope_local_base_freq: float | None = option(None, optional(POSITIVE_NUMBER))  # θ of sliding layers
    no_rope_layers: tuple[int, ...] = option((), items(integer(0, 1)))  # 0: the layer has no rotation
    attention_out_bias: bool = option(False, BOOLEAN)
    qkv_bias: bool = option(True, BOOLEAN)
    use_bias: bool = option(False, BOOLEAN)
    use_qk_norm: bool = option(False, BOOLEAN)
    use_parallel_residual: bool = option(False, BOOLEAN)
    query_pre_attn_scalar: float = option(256, POSITIVE_NUMBER)
    attn_logit_softcapping: float | None = option(None, optional(POSITIVE_NUMBER))
    final_logit_softcapping: float | None = option(None, optional(POSITIVE_NUMBER))
    embedding_multiplier: float = option(1.0, POSITIVE_NUMBER)
    residual_multiplier: float = option(1.0, POSITIVE_NUMBER)
    attention_multiplier: float = option(1.0, POSITIVE_NUMBER)
    logits_scaling: float = option(1.0, POSITIVE_NUMBER)  # logits are divided by it
    logit_scale: float = option(1.0, POSITIVE_NUMBER)  # logits are multiplied by it
    shared_expert_intermediate_size: int = option(0, COUNT)
    n_shared_experts: int = option(0, integer(0, MOST_EXPERTS))
    first_k_dense_replace: int = option(0, COUNT)
    moe_layer_end_index: int = option(-1, integer(-1, MOST_LAYERS))  # last layer with experts; -1: of all
    mlp_layer_types: tuple[str, ...] | None = option(None, optional(items(choice(DENSE, SPARSE))))
    num_nextn_predict_layers: int = option(0, COUNT)  # layers on disk after the last; not computed
    n_group: int = option(1, POSITIVE)
    topk_group: int = option(1, POSITIVE)
    topk_method: str = option("greedy", choice("greedy", "group_limited_greedy", "noaux_tc"))
    routed_scaling_factor: float = option(1.0, POSITIVE_NUMBER)
    q_lora_rank: int | None = option(None, optional(POSITIVE))
    kv_lora_rank: int = option(512, POSITIVE)
    qk_nope_head_dim: int = option(128, POSITIVE)
    qk_rope_head_dim: int = option(64, POSITIVE)
    v_head_dim: int = option(128, POSITIVE)
    llama_4_scaling_beta: float = option(0.0, SMALL_NUMBER)  # growth of queries with the position
    attention_chunk_size: int | None = option(None, optional(POSITIVE))  # of layers of chunked attention
    attn_temperature_tuning: bool = option(False, BOOLEAN)  # growth of queries in layers without rotation
    floor_scale: int = option(8192, POSITIVE)
    attn_scale: float = option(0.1, SMALL_NUMBER)
    intermediate_size_mlp: int = option(0, COUNT)  # of layers without experts
    interleave_moe_layer_step: int = option(1, POSITIVE)
    moe_layers: tuple[int, ...] | None = option(None, optional(items(COUNT)))  # layers with experts
    swiglu_alpha: float = option(1.702, POSITIVE_NUMBER)
    swiglu_limit: float = option(7.0, POSITIVE_NUMBER)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            check: Check = field.metadata["check"]
            value = getattr(self, field.name)
            _require(check.accepts(value), self, field.name, check.requirement)
            if is_integer(value) and value > LARGEST_INTEGER:  # a number, which JAX takes for an int32
                object.__setattr__(self, field.name, float(value))
        heads, layers = self.num_attention_heads, self.num_hidden_layers
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // heads)
        groups = heads % self.num_key_value_heads == 0
        _require(groups, self, "num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        fits = self.rotary_width <= self.head_dim and self.rotary_width % 2 == 0
        _require(fits, self, "rotary_width", f"an even number of at most head_dim, {self.head_dim}")
        even = self.head_dim % 2 == 0 and self.head_dim > 0 and self.rotary_dim % 2 == 0
        _require(even, self, "head_dim", "an even number (positions rotate pairs)")
        for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
            value = getattr(self, name)
            unset = value is None or (value == () and name == "no_rope_layers")
            _require(unset or len(value) == layers, self, name, f"a list of {layers} entries, one a layer")
        chunked = CHUNKED in (self.layer_types or ())
        _require(
            not chunked or self.attention_chunk_size is not None,
            *(self, "attention_chunk_size", f"a positive integer where layer_types has {CHUNKED!r}"),
        )
        experts = self.num_local_experts
        limit = f"at most num_local_experts, {experts}"
        _require(self.num_experts_per_tok <= experts, self, "num_experts_per_tok", limit)
        divides = not experts or experts % self.n_group == 0
        _require(divides, self, "n_group", f"a divisor of the {experts} experts")
        _require(self.topk_group <= self.n_group, self, "topk_group", f"at most n_group, {self.n_group}")
        tokens = {"bos_token_id": (self.bos_token_id,), "eos_token_id": self.eos_token_id}
        for name, ids in tokens.items():
            known = all(token is None or token < self.vocab_size for token in ids)
            _require(known, self, name, f"below vocab_size, {self.vocab_size}")

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a head are rotated."""
        return self.rotary_width or int(self.head_dim * self.partial_rotary_factor)

    @property
    def longest_context(self) -> int:
        """Positions that the rotation is made for, which yarn and dynamic scaling extend by their factor."""
        scaling, stated = self.rope_scaling, self.max_position_embeddings
        if scaling is None or scaling.rope_type not in ("yarn", "dynamic"):
            return stated
        return max(
            stated, min(int(scaling.original_max_position_embeddings * scaling.factor), LARGEST_INTEGER)
        )

    def window(self, layer: int) -> int | None:
        """How many positions a query of this layer sees, its own included; None for all before it."""
        sliding = self.layer_types is None or self.layer_types[layer] == SLIDING
        return self.sliding_window if sliding else None

    def chunk(self, layer: int) -> int | None:
        """The size of the chunks of positions that queries of this layer see; None where there are none."""
        chunked = self.layer_types is not None and self.layer_types[layer] == CHUNKED
        return self.attention_chunk_size if chunked else None

    def rotates(self, layer: int) -> bool:
        """Whether this layer rotates queries and keys."""
        return not self.no_rope_layers or bool(self.no_rope_layers[layer])


def _require(condition: bool, config: Config, name: str, requirement: str) -> None:
    if not condition:
        raise ModelError(f"{name} must be {requirement}; got {abbreviate(getattr(config, name))}")


def abbreviate(value: object) -> str:
    """A value as an error message shows it, at most 200 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, a list that is too deep
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"


def require_file(path: Path) -> Path:
    """The path of a regular file. Raises ModelError for what is missing, a directory, a pipe or a device."""
    try:
        regular = path.is_file()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if not regular:
        known = path.exists() or path.is_symlink()
        raise ModelError(
            f"{path} must be a regular file; got something else"
            if known
            else f"{path} is missing: every model directory has one"
        )
    if path.stat().st_size == 0:  # as of files in /proc, some of which a reader waits for
        raise ModelError(f"{path} must not be empty; got 0 bytes")
    return path


def read_json(path: Path, max_bytes: int = LARGEST_JSON) -> dict[str, Any]:
    """The object in a JSON file of at most so many bytes.

    Raises ModelError if the file is missing, malformed or larger, or holds no object.
    """
    require_file(path)
    try:
        if path.stat().st_size > max_bytes:
            raise ModelError(f"{path} must be at most {max_bytes} bytes; got {path.stat().st_size}")
        value = json.loads(path.read_text("utf-8"))
    except ModelError:
        raise
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; got {type(value).__name__}")
    return value
