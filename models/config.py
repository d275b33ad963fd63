"""What a model is: its configuration, in the names of Hugging Face's `config.json`, and its family.

Both spellings of `config.json` are read: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and
transformers 5 (`rope_parameters`, `dtype`). The older one is written, which both of them read.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from .rope import RopeScaling


class ModelError(ValueError):
    """A model that cannot be used: the message names the file or field, what it must be, and its value."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and switches of a decoder: hashable, so it can be static under jit.

    Whoever writes one by hand states the sizes; the rest has defaults. `num_key_value_heads` 0 stands for as
    many as query heads, `head_dim` 0 for `hidden_size // num_attention_heads`. Raises ModelError for values
    that do not fit together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None  # positions a query sees, its own included
    layer_types: tuple[str, ...] | None = None  # None: every layer slides if there is a window
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        unset = ("num_key_value_heads", "head_dim")
        for name in POSITIVE_INTEGERS:
            low = 0 if name in unset else 1
            value = getattr(self, name)
            _require(is_integer(value) and value >= low, self, name, f"an integer of at least {low}")
        heads = self.num_attention_heads
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // heads)
        for name in ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size"):
            value = getattr(self, name)
            _require(is_integer(value) and value >= 0, self, name, "an integer of at least 0")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            _require(is_number(value) and 0 < value < float("inf"), self, name, "a positive number")
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"):
            _require(isinstance(getattr(self, name), bool), self, name, "true or false")
        groups = heads % self.num_key_value_heads == 0
        _require(groups, self, "num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        _require(self.head_dim % 2 == 0, self, "head_dim", "an even number (positions rotate pairs)")
        _require(self.hidden_act == "silu", self, "hidden_act", "'silu'")
        window = self.sliding_window
        valid = window is None or (is_integer(window) and window > 0)
        _require(valid, self, "sliding_window", "null or an integer of at least 1")
        kinds, layers = self.layer_types, self.num_hidden_layers
        known = kinds is None or (len(kinds) == layers and {*kinds} <= {FULL, SLIDING})
        _require(known, self, "layer_types", f"{layers} entries, each {FULL!r} or {SLIDING!r}")
        experts = self.num_local_experts
        limit = f"at most num_local_experts, {experts}"
        _require(self.num_experts_per_tok <= experts, self, "num_experts_per_tok", limit)
        scaling = self.rope_scaling
        known = scaling is None or (scaling.rope_type in ("linear", "llama3") and scaling.factor > 0)
        _require(known, self, "rope_scaling", "None, or a RopeScaling of type 'linear' or 'llama3'")
        tokens = (*self.eos_token_id, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        _require(all(map(is_integer, tokens)), self, "eos_token_id", "integers, as for bos_token_id")

    def window(self, layer: int) -> int | None:
        """How many positions a query of this layer sees, its own included; None for all before it."""
        sliding = self.layer_types is None or self.layer_types[layer] == SLIDING
        return self.sliding_window if sliding else None


POSITIVE_INTEGERS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim max_position_embeddings decoder_sparse_step"
).split()
REQUIRED = tuple(f.name for f in dataclasses.fields(Config)[1:] if f.default is dataclasses.MISSING)
COMMON = (  # keys that every family reads
    *REQUIRED,
    *"num_key_value_heads head_dim max_position_embeddings".split(),
    *"rms_norm_eps tie_word_embeddings hidden_act".split(),
)
FULL, SLIDING = "full_attention", "sliding_attention"


class Family(NamedTuple):
    """What a family file declares. Adding a family is writing one and listing it in `decoder.py`."""

    architecture: str  # as in config.json, "LlamaForCausalLM"
    model_type: str
    defaults: Mapping[str, Any]  # of optional keys of config.json; a key that is not here is not read
    layer: Callable[[Config, int], Any]  # the nnx module of layer i
    renames: tuple[tuple[str, str], ...] = ()  # parts of tensor names: (ours, on disk)


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require(condition: bool, config: Config, name: str, requirement: str) -> None:
    if not condition:
        raise ModelError(f"{name} must be {requirement}; got {getattr(config, name)!r}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError if the file is missing, malformed or holds no object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: every model directory has one") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; got {type(value).__name__}")
    return value


def from_json(raw: Mapping[str, Any], family: Family) -> Config:
    """The Config of a family that a parsed config.json describes. Raises ModelError."""
    if raw.get("quantization_config"):
        raise ModelError(
            "quantization_config must be absent: weights are read in float32, float16 or bfloat16 only"
        )
    for name in REQUIRED:
        if raw.get(name) is None:
            raise ModelError(f"{name} must be a positive integer; it is missing")
    merged = {**family.defaults, **raw}
    names = {f.name for f in dataclasses.fields(Config)} & {*COMMON, *family.defaults} - {"sliding_window"}
    values = {name: merged[name] for name in names if merged.get(name) is not None}
    for name in POSITIVE_INTEGERS:
        if name in values and values[name] == 0:  # our "unset", not theirs
            raise ModelError(f"{name} must be a positive integer; got 0")
    for name in {"mlp_only_layers", "layer_types"} & values.keys():
        if not isinstance(values[name], (list, tuple)):
            raise ModelError(f"{name} must be a list; got {values[name]!r}")
        values[name] = tuple(values[name])
    if "num_local_experts" in family.defaults and raw.get("num_experts") is not None:
        values["num_local_experts"] = raw["num_experts"]  # Qwen's name of it
    optional = "use_sliding_window" in family.defaults
    if "sliding_window" in family.defaults and (merged["use_sliding_window"] if optional else True):
        values["sliding_window"] = merged["sliding_window"]
        if "layer_types" not in values and "max_window_layers" in family.defaults:
            first, layers = merged["max_window_layers"], merged["num_hidden_layers"]
            if not is_integer(first) or not is_integer(layers):
                raise ModelError(f"max_window_layers must be an integer; got {first!r}")
            values["layer_types"] = tuple(SLIDING if i >= first else FULL for i in range(layers))
    stops = raw.get("eos_token_id")
    values["eos_token_id"] = () if stops is None else tuple(stops) if isinstance(stops, list) else (stops,)
    theta, scaling = rope_parameters(merged)
    values |= {"rope_theta": theta, "rope_scaling": scaling, "bos_token_id": raw.get("bos_token_id")}
    return Config(family.architecture, **values)


def rope_parameters(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, from either spelling of config.json."""
    stated = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(stated, Mapping) or any(isinstance(v, Mapping) for v in stated.values()):
        raise ModelError(f"rope_scaling must be null or one object for all layers; got {stated!r}")
    theta = stated.get("rope_theta") or raw.get("rope_theta") or 10000.0
    share = stated.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise ModelError(f"partial_rotary_factor must be 1; got {share}")
    kind = stated.get("rope_type") or stated.get("type") or "default"
    required_fields = {"default": (), "linear": ("factor",), "llama3": RopeScaling._fields[1:]}
    if kind not in required_fields:
        kinds = ", ".join(map(repr, required_fields))
        raise ModelError(f"rope_scaling.rope_type must be one of {kinds}; got {kind!r}")
    if kind == "default":
        return theta, None
    values: dict[str, Any] = {
        "original_max_position_embeddings": raw.get("max_position_embeddings"),
        **stated,
    }
    for name in required_fields[kind]:
        value = values.get(name)
        if not is_number(value) or value <= 0:
            raise ModelError(f"rope_scaling.{name} must be a positive number with {kind!r}; got {value!r}")
    return theta, RopeScaling(kind, **{name: values[name] for name in required_fields[kind]})


def to_json(config: Config, family: Family, dtype: str) -> dict[str, Any]:
    """The config.json that describes a Config, for transformers 4 and 5 alike.

    Args:
        config: of the model.
        family: its family, which names the architecture.
        dtype: of the weights on disk.
    """
    known = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config)}
    stops = config.eos_token_id
    extra = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else config.rope_scaling.to_json(),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": stops[0] if len(stops) == 1 else list(stops) or None,
    }
    if "num_experts_per_tok" in family.defaults:
        extra["num_experts"] = config.num_local_experts
    if "use_sliding_window" in family.defaults:
        extra["use_sliding_window"] = config.sliding_window is not None
    if config.layer_types is not None:
        kinds = list(config.layer_types)
        extra["layer_types"] = kinds
        extra["max_window_layers"] = kinds.index(SLIDING) if SLIDING in kinds else len(kinds)
    return {**{name: known[name] for name in known if name in {*COMMON, *family.defaults}}, **extra}
