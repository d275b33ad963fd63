"""`config.json` of a Hugging Face model directory, read into a `Config` and written from one.

Both spellings are read: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and transformers 5
(`rope_parameters`, `dtype`). The older one is written, which both of them read, with the newer next to it
where layers differ in their rotation.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from .block_spec import Family
from .config import (
    CHUNKED,
    FULL,
    SLIDING,
    SPELLINGS,
    Config,
    ModelError,
    abbreviate,
    is_integer,
)
from .formats import weight_format
from .rope import RopeScaling
from .rope_json import rotation

FIELD_NAMES = tuple(f.name for f in dataclasses.fields(Config))
REQUIRED = tuple(f.name for f in dataclasses.fields(Config)[1:] if f.default is dataclasses.MISSING)
COMMON = (  # keys that every family reads
    *REQUIRED,
    *"num_key_value_heads head_dim max_position_embeddings".split(),
    *"rms_norm_eps tie_word_embeddings hidden_act".split(),
)
LISTS = ("mlp_only_layers", "layer_types", "no_rope_layers", "moe_layers", "mlp_layer_types")
MAY_BE_NULL = (  # keys whose null says something else than the family's default
    "num_key_value_heads",
    "head_dim",
    *(f.name for f in dataclasses.fields(Config)[1:] if f.metadata["check"].accepts(None)),
)
SWITCHES = ("use_sliding_window",)  # of config.json alone
ZERO_MEANS_UNSET = (
    "num_key_value_heads",
    "head_dim",
    "intermediate_size_mlp",
    "rotary_width",
)  # in a Config, but not in config.json
DERIVES_LAYER_TYPES = {  # keys of families that make layer_types of something else where it is absent
    *("sliding_window_pattern", "attention_chunk_size", "max_window_layers", "no_rope_layer_interval"),
}
# Names of Config that transformers knows of the families that spell them in another way.
BOTH_SPELLINGS = {"num_local_experts"}
CAUSAL = {"is_causal": True, "use_bidirectional_attention": False}  # of every family


def from_json(raw: Mapping[str, Any], family: Family) -> Config:
    """The Config of a family that a parsed config.json describes. Raises ModelError."""
    weight_format(raw)
    merged = with_our_names(raw, family)
    for name in REQUIRED:
        if merged.get(name) is None:
            raise ModelError(f"{family.aliases.get(name, name)} must be a positive integer; it is missing")
    for name in SWITCHES:
        if not isinstance(raw.get(name), bool | None):
            raise ModelError(f"{name} must be true or false; got {abbreviate(raw[name])}")
    for name, value in {**CAUSAL, **family.required}.items():
        if raw.get(name, value) not in (value, None):
            raise ModelError(f"{name} must be {value!r}; got {abbreviate(raw[name])}")
    names = {f.name for f in dataclasses.fields(Config)} & {*COMMON, *family.defaults} - {"sliding_window"}
    values = {name: merged[name] for name in names if merged.get(name) is not None}
    for name in ZERO_MEANS_UNSET:
        if values.get(name) == 0:
            stated = family.aliases.get(name, name)
            raise ModelError(f"{stated} must be a positive integer; got {abbreviate(values[name])}")
    for name in LISTS:
        if name in values:
            values[name] = as_tuple(name, values[name])
    activation = values.get("hidden_act")
    if isinstance(activation, str):
        activation = SPELLINGS.get(activation, activation)
        values["hidden_act"] = family.activations.get(activation, activation)
    if is_integer(values.get("attn_temperature_tuning")):  # in older files
        values["attn_temperature_tuning"] = bool(values["attn_temperature_tuning"])
    values |= windows(merged, values, family) | rotation(merged, family)
    stops = raw.get("eos_token_id")
    values["eos_token_id"] = () if stops is None else tuple(stops) if isinstance(stops, list) else (stops,)
    values["bos_token_id"] = raw.get("bos_token_id")
    try:
        return Config(family.architecture, **values)
    except ModelError as error:
        raise ModelError(with_their_names(str(error), family)) from None


def with_our_names(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The keys of config.json over the family's defaults, under the names of `Config`.

    A key that is spelt as in `Config`, where the family spells it in another way, has no meaning.
    """
    theirs = {ours: raw[name] for ours, name in family.aliases.items() if raw.get(name) is not None}
    null = {
        name for name, value in raw.items() if value is None and name not in MAY_BE_NULL
    } & family.defaults.keys()
    unread = null | (family.aliases.keys() - BOTH_SPELLINGS)
    return {**family.defaults, **{name: raw[name] for name in raw if name not in unread}, **theirs}


def with_their_names(message: str, family: Family) -> str:
    """An error message about a field of `Config`, with the name that config.json has for it."""
    for ours, theirs in family.aliases.items():
        message = re.sub(rf"\b{ours}\b", theirs, message)
    return message


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """The entries of a list. Raises ModelError for anything else."""
    if not isinstance(value, (list, tuple)):
        raise ModelError(f"{name} must be a list; got {abbreviate(value)}")
    return tuple(value)


def windows(merged: Mapping[str, Any], values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Which layers see a window, and which do not rotate.

    Args:
        merged: config.json over the defaults.
        values: fields of the Config that are known so far.
        family: the family of the model.
    """
    result: dict[str, Any] = {}
    layers, keys = layer_count(merged), family.defaults
    if "no_rope_layer_interval" in keys and not values.get("no_rope_layers"):
        interval = positive("no_rope_layer_interval", merged)
        result["no_rope_layers"] = tuple(int((i + 1) % interval != 0) for i in range(layers))
    if "attention_chunk_size" in keys and "layer_types" not in values:
        rotated = result.get("no_rope_layers", values.get("no_rope_layers", ()))
        result["layer_types"] = tuple(CHUNKED if rotates else FULL for rotates in rotated)
    if "sliding_window" not in keys or ("use_sliding_window" in keys and not merged["use_sliding_window"]):
        return result
    result["sliding_window"] = merged["sliding_window"]
    if "layer_types" not in keys:
        only_sliding(merged)
    if "layer_types" in values:
        return result
    if "no_rope_layer_interval" in keys:
        rotated = result.get("no_rope_layers", values.get("no_rope_layers", ()))
        result["layer_types"] = tuple(FULL if rotates else SLIDING for rotates in rotated)
    elif "max_window_layers" in keys:
        border = merged["max_window_layers"]
        if not is_integer(border):
            raise ModelError(f"max_window_layers must be an integer; got {abbreviate(border)}")
        slides = (
            (lambda i: i % 2 == 0 and i < border) if family.first_layers_slide else (lambda i: i >= border)
        )
        result["layer_types"] = tuple(SLIDING if slides(i) else FULL for i in range(layers))
    elif "sliding_window_pattern" in keys:
        every = positive("sliding_window_pattern", merged)
        result["layer_types"] = tuple(FULL if (i + 1) % every == 0 else SLIDING for i in range(layers))
    return result


def only_sliding(merged: Mapping[str, Any]) -> None:
    """Raise ModelError for layers without the window where the family has it in all."""
    kinds = merged.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ModelError(f"layer_types must be a list; got {abbreviate(kinds)}")
    if merged["sliding_window"] is not None and kinds and kinds != [SLIDING] * len(kinds):
        raise ModelError(f"layer_types must be absent, or {SLIDING!r} in all layers; got {abbreviate(kinds)}")


def layer_count(merged: Mapping[str, Any]) -> int:
    """`num_hidden_layers`, as far as lists of that length can be made of it; `Config` checks the value."""
    value = merged["num_hidden_layers"]
    return value if is_integer(value) and 0 < value < 100_000 else 0


def positive(name: str, merged: Mapping[str, Any]) -> int:
    """The field if it is an integer of at least 1. Raises ModelError for anything else."""
    value = merged[name]
    if not is_integer(value) or value < 1:
        raise ModelError(f"{name} must be an integer of at least 1; got {abbreviate(value)}")
    return value


def to_json(config: Config, family: Family, dtype: str) -> dict[str, Any]:
    """The config.json that describes a Config, for transformers 4 and 5 alike.

    `from_json` reads it as the same model, and as an equal Config but for what can be said in several ways.
    These become their defaults: fields without a key in the family or that it leaves `unwritten`, fields
    of other kinds of scaling, and `intermediate_size_mlp` 0. `num_nextn_predict_layers` becomes 0: `save`
    writes no such layers. `layer_types` None becomes the list that it stands for where the family would
    derive another, `no_rope_layers` () a list of ones, and `rope_local_base_freq` None `rope_theta`.

    Args:
        config: the model's configuration.
        family: its family, which names the architecture.
        dtype: the dtype of the weights on disk.

    Raises:
        ModelError: a field has a value that matters and that the family's config.json cannot state.
    """
    result = described(config, family, dtype)
    reread = from_json(result, family)
    if specification(reread, family) == specification(config, family):
        return result
    changed = [name for name in FIELD_NAMES if getattr(config, name) != getattr(reread, name)]
    matters = [name for name in changed if changes_model(reread, name, getattr(config, name), family)]
    name = (matters or changed)[0]
    expected, value = getattr(reread, name), getattr(config, name)
    if isinstance(expected, RopeScaling) and isinstance(value, RopeScaling):
        part = next(part for part in value._fields if getattr(expected, part) != getattr(value, part))
        name, expected, value = f"{name}.{part}", getattr(expected, part), getattr(value, part)
    raise ModelError(
        f"{name} must be {abbreviate(expected)}, since config.json of {family.architecture} "
        f"cannot state another value for this model; got {abbreviate(value)}"
    )


def specification(config: Config, family: Family) -> tuple[Any, ...]:
    """All that a family's model computes, as a value that can be compared."""
    layers = (family.block(config, i) for i in range(config.num_hidden_layers))
    return (*layers, family.output(config), config.longest_context)


def changes_model(config: Config, name: str, value: Any, family: Family) -> bool:
    """Whether a model computes something else with another value of one field.

    Args:
        config: the model's configuration.
        name: the name of the field.
        value: the other value of the field.
        family: the family of the model.
    """
    try:
        other = specification(dataclasses.replace(config, **{name: value}), family)
    except ModelError:  # not by itself
        return False
    return other != specification(config, family)


def written_layer_types(config: Config, family: Family) -> tuple[str, ...] | None:
    """The kind of every layer as config.json must state it; None where it need not."""
    keys, windowed = family.defaults, config.sliding_window is not None
    if "layer_types" not in keys or config.layer_types is not None:
        return config.layer_types
    unread = "use_sliding_window" in keys and not windowed
    if unread or not DERIVES_LAYER_TYPES & keys.keys():
        return None
    slides = windowed and "sliding_window" in keys
    return (SLIDING if slides else FULL,) * config.num_hidden_layers


def described(config: Config, family: Family, dtype: str) -> dict[str, Any]:
    """The keys and values of config.json.

    Args:
        config: the model's configuration.
        family: its family, which names the architecture.
        dtype: the dtype of the weights on disk.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config)}
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    stops = config.eos_token_id
    scaling = None if config.rope_scaling is None else config.rope_scaling.to_json()
    if scaling is not None and "llama_4_scaling_beta" in family.defaults:
        scaling["llama_4_scaling_beta"] = config.llama_4_scaling_beta
    extra = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "default"} if scaling is None and family.default_rope else scaling,
        "bos_token_id": config.bos_token_id,
        "pad_token_id": None,  # some families have one beyond small vocabularies by default
        "eos_token_id": stops[0] if len(stops) == 1 else list(stops) or None,
    }
    if "use_sliding_window" in family.defaults:
        extra["use_sliding_window"] = config.sliding_window is not None
    if "num_nextn_predict_layers" in family.defaults:
        extra["num_nextn_predict_layers"] = 0
    stated = written_layer_types(config, family)
    if stated is not None and "layer_types" in family.defaults:
        extra["layer_types"] = kinds = list(stated)
        if "max_window_layers" in family.defaults:
            extra["max_window_layers"] = kinds.index(SLIDING) if SLIDING in kinds else len(kinds)
    if "no_rope_layers" in family.defaults and not config.no_rope_layers:
        extra["no_rope_layers"] = [1] * config.num_hidden_layers
    if "rope_local_base_freq" in family.defaults:
        extra["rope_local_base_freq"] = config.rope_local_base_freq or config.rope_theta
        local = {"rope_type": "default", "rope_theta": extra["rope_local_base_freq"]}
        plain = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
        extra["rope_parameters"] = {FULL: plain, SLIDING: local}
    original = (scaling or {}).get("original_max_position_embeddings")
    if original is not None and "original_max_position_embeddings" in family.defaults:
        extra["original_max_position_embeddings"] = original
    names = {*COMMON, *family.defaults} - {"sliding_window_pattern", "no_rope_layer_interval"}
    names -= {name for name in ZERO_MEANS_UNSET if known[name] == 0} | {*family.unwritten}
    result = {**{name: known[name] for name in known if name in names}, **extra}
    aliased = {theirs: result[ours] for ours, theirs in family.aliases.items() if ours in result}
    return {**family.required, **result, **aliased}
