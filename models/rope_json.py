"""Rotation of queries and keys as `config.json` states it, in `rope_scaling` or `rope_parameters`.

A key of these objects that its kind of scaling does not read is refused, unless it changes nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from .block_spec import Family
from .config import (
    FULL,
    LARGEST_INTEGER,
    LARGEST_NUMBER,
    SLIDING,
    ModelError,
    abbreviate,
    is_integer,
    is_number,
)
from .rope import FIELDS, RopeScaling

KINDS = {"su": "longrope", "mrope": "default"}  # older names; mrope differs for images alone
MOST_PAIRS = 4096  # of a head, with a factor each
WITHOUT_EFFECT = {  # keys that change no token's rotation, whatever the kind
    *("rope_type", "type", "rope_theta"),  # read for every kind
    "original_max_position_embeddings",  # of kinds that read it; others have no use for it
    "max_position_embeddings",  # which transformers writes here for Ministral 3, too
    *("mrope_section", "mrope_interleaved"),  # how images are rotated
    "finetuned",  # how the model was made
}
NEUTRAL = {"factor": 1, "mscale_all_dim": 0, "llama_4_scaling_beta": 0, "partial_rotary_factor": 1}


def as_object(name: str, value: Any) -> Mapping[str, Any]:
    """The value if it is an object, {} for null. Raises ModelError for anything else."""
    if not isinstance(value, Mapping | None):
        raise ModelError(f"{name} must be null or an object; got {abbreviate(value)}")
    return value or {}


def rotation(merged: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of a Config that say how queries and keys are rotated."""
    objects = [as_object(name, merged.get(name)) for name in ("rope_scaling", "rope_parameters")]
    if all(objects) and "rope_local_base_freq" in family.defaults and not is_nested(objects[0]):
        # Beside what is stated for each kind of layer, `rope_scaling` changes the layers without a window.
        unwindowed = as_object(f"rope_parameters.{FULL}", objects[1].get(FULL))
        objects = [{}, {**objects[1], FULL: {**unwindowed, **objects[0]}}]
    key = "rope_scaling" if objects[0] else "rope_parameters"
    stated = objects[0] or objects[1] or family.default_rope
    nested = stated if is_nested(stated) else None
    local: Mapping[str, Any] = {}
    if nested is not None:
        if "rope_local_base_freq" not in family.defaults or not {*nested} <= {FULL, SLIDING}:
            raise ModelError(
                f"rope_scaling must be null or one object for all layers; got {abbreviate(stated)}"
            )
        stated, local = (as_object(f"{key}.{kind}", nested.get(kind)) for kind in (FULL, SLIDING))
        kind = local.get("rope_type", local.get("type", "default"))
        if kind != "default":
            raise ModelError(f"{key}.{SLIDING}.rope_type must be 'default'; got {abbreviate(kind)}")
        no_stray_keys(f"{key}.{SLIDING}", local, "default")
        key = f"{key}.{FULL}"
    elif "rope_local_base_freq" in family.defaults and objects[1] and not objects[0]:
        raise ModelError(
            f"rope_parameters must have the objects {FULL} and {SLIDING}; got {abbreviate(objects[1])}"
        )
    result: dict[str, Any] = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        value = stated.get(name, merged.get(name))
        if value is not None and (name in ("rope_theta", *family.defaults) or value != 1.0):
            if name == "partial_rotary_factor" and name not in family.defaults:
                raise ModelError(f"{name} must be 1; got {abbreviate(value)}")
            result[name] = value
    if "rope_local_base_freq" in family.defaults:
        result["rope_local_base_freq"] = local.get("rope_theta", merged["rope_local_base_freq"])
    if "llama_4_scaling_beta" in family.defaults and stated.get("llama_4_scaling_beta") is not None:
        result["llama_4_scaling_beta"] = stated["llama_4_scaling_beta"]
    if family.stretched_base and is_dynamic(stated) and stated.get("alpha"):
        return {
            **result,
            "rope_theta": stretched_base(key, stated, {**merged, **result}),
            "rope_scaling": None,
        }
    result["rope_scaling"] = scaling_of(stated, merged)
    kind = "default" if result["rope_scaling"] is None else result["rope_scaling"].rope_type
    read_from_here = {"partial_rotary_factor", *{"llama_4_scaling_beta"} & family.defaults.keys()}
    no_stray_keys(key, stated, kind, read_from_here)
    return result


def is_nested(stated: Mapping[str, Any]) -> bool:
    """Whether there is an object for each kind of layer."""
    return any(isinstance(value, Mapping) for value in stated.values())


def is_dynamic(stated: Mapping[str, Any]) -> bool:
    """Whether the scaling is called "dynamic"."""
    return stated.get("rope_type", stated.get("type")) == "dynamic"


def stretched_base(field: str, stated: Mapping[str, Any], merged: Mapping[str, Any]) -> Any:
    """The base of a rotation that is stretched for every length alike: θ · alpha^(d / (d − 2)).

    Args:
        field: the name of the object in config.json.
        stated: the object.
        merged: config.json over the defaults.
    """
    alpha, theta = stated["alpha"], merged.get("rope_theta", 1e4)
    heads, hidden, dim = (merged.get(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    if dim is None and is_integer(heads) and is_integer(hidden) and heads > 0:
        dim = hidden // heads
    if not is_number(alpha) or not 0 < alpha < 1e9:
        raise ModelError(f"{field}.alpha must be a positive number; got {abbreviate(alpha)}")
    fits = is_number(theta) and 0 < theta < LARGEST_NUMBER and is_integer(dim) and 2 < dim < LARGEST_INTEGER
    return theta * alpha ** (dim / (dim - 2)) if fits else theta  # what does not fit is refused by `Config`


def no_stray_keys(field: str, stated: Mapping[str, Any], kind: str, others: Iterable[str] = ()) -> None:
    """Raise ModelError for a key that this kind of scaling does not read and that may mean another rotation.

    Args:
        field: the name of the object in config.json.
        stated: the object.
        kind: the kind of scaling, a key of `FIELDS` or "default".
        others: further keys that are read.
    """
    required, extra = FIELDS.get(kind, ((), ()))
    for key in sorted(stated.keys() - WITHOUT_EFFECT - {*required, *extra, *others}):
        value, name = stated[key], key if key.isidentifier() else abbreviate(key)
        if value is not None and not (is_number(value) and value == NEUTRAL.get(key)):
            raise ModelError(f"{field}.{name} must be absent with {kind!r}; got {abbreviate(value)}")


def scaling_of(stated: Mapping[str, Any], merged: Mapping[str, Any]) -> RopeScaling | None:
    """The scaling of the rotation.

    Args:
        stated: the object in config.json.
        merged: config.json over the defaults.
    """
    kind = stated.get("rope_type", stated.get("type", "default"))
    kind = KINDS.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "yarn" and stated.get("short_factor") is not None:  # in early files of Phi 3
        kind = "longrope"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in FIELDS:
        kinds = ", ".join(map(repr, ("default", *FIELDS)))
        raise ModelError(f"rope_scaling.rope_type must be one of {kinds}; got {abbreviate(kind)}")
    required, extra = FIELDS[kind]
    context = merged.get("max_position_embeddings")
    values: dict[str, Any] = {"original_max_position_embeddings": context, **stated}
    if merged.get("original_max_position_embeddings") is not None:  # of the model; it counts
        values["original_max_position_embeddings"] = merged["original_max_position_embeddings"]
    if kind == "dynamic":
        values["original_max_position_embeddings"] = context
    original = values["original_max_position_embeddings"]
    known = is_number(context) and is_number(original) and original > 0
    stated_original = stated.get("original_max_position_embeddings") or merged.get(
        "original_max_position_embeddings"
    )
    if kind == "yarn" and stated_original is None:  # from which its factor would follow
        known = False
    if kind in ("yarn", "longrope") and values.get("factor") is None and known:
        values["factor"] = context / original
    result: dict[str, Any] = {}
    for name in (*required, *extra):
        value = values.get(name)
        if name in ("short_factor", "long_factor"):
            result[name] = factors(name, value)
        elif name == "truncate":
            if value is not None and not isinstance(value, bool):
                raise ModelError(f"rope_scaling.truncate must be true or false; got {abbreviate(value)}")
            result[name] = True if value is None else value
        elif value is not None or name in required:
            low = 0 if name in ("mscale", "mscale_all_dim") else 1e-9
            if not is_number(value) or not low <= value < 1e9:
                raise ModelError(
                    f"rope_scaling.{name} must be a positive number with {kind!r}; got {abbreviate(value)}"
                )
            result[name] = value
    return RopeScaling(kind, **result)


def factors(name: str, value: Any) -> tuple[float, ...]:
    """The factors of the pairs of a head, for "longrope"."""
    listed = isinstance(value, (list, tuple)) and 0 < len(value) <= MOST_PAIRS
    if not listed or not all(is_number(x) and 0 < x < 1e9 for x in value):
        raise ModelError(f"rope_scaling.{name} must be a list of positive numbers; got {abbreviate(value)}")
    return tuple(value)
