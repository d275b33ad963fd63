"""Text towers of models that also see images: their part of config.json, and the names of their tensors.

A `*ForConditionalGeneration` holds a language model of a known family under `text_config` (older files keep
its keys at the top) next to a vision tower. Only the language model is loaded, so images are refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .config import ModelError, abbreviate
from .families import FAMILIES


class TextTower(NamedTuple):
    """The language model inside an architecture."""

    model_type: str  # of the family, unless text_config states another
    defaults: Mapping[str, Any] = {}  # of keys that its files may leave out


QWEN2_VL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
TOWERS = {
    "Gemma3ForConditionalGeneration": TextTower(
        "gemma3_text",
        {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    ),
    "Mistral3ForConditionalGeneration": TextTower("mistral"),
    "LlavaForConditionalGeneration": TextTower("llama"),
    "LlavaNextForConditionalGeneration": TextTower("llama"),
    "LlavaNextVideoForConditionalGeneration": TextTower("llama"),
    "LlavaOnevisionForConditionalGeneration": TextTower("qwen2"),
    "Idefics3ForConditionalGeneration": TextTower("llama"),
    "SmolVLMForConditionalGeneration": TextTower("llama"),
    "InternVLForConditionalGeneration": TextTower("qwen2"),
    "Qwen2VLForConditionalGeneration": TextTower("qwen2", QWEN2_VL),
    "Qwen2_5_VLForConditionalGeneration": TextTower("qwen2", QWEN2_VL),
    "Qwen3VLForConditionalGeneration": TextTower("qwen3", {"rope_theta": 5e5}),
    "Llama4ForConditionalGeneration": TextTower("llama4_text"),
}
# Model types of towers that differ from a family in the rotation of images alone.
MODEL_TYPES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
OF_BOTH = ("quantization_config", "bos_token_id", "eos_token_id", "torch_dtype", "dtype")
TIED = "tie_word_embeddings"
PREFIXES = (  # of the language model's tensors, and what stands for them in a file of the family
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
KEPT = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def tower_of(raw: Mapping[str, Any]) -> TextTower | None:
    """The text tower of the architecture that a parsed config.json names; None if it is no such one."""
    stated = raw.get("architectures")
    name = stated[0] if isinstance(stated, list) and len(stated) == 1 else stated
    return TOWERS.get(name) if isinstance(name, str) else None


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json about the language model, as its family spells it; raises ModelError.

    Args:
        raw: a parsed config.json, which is returned as it is for any other architecture.
    """
    tower = tower_of(raw)
    if tower is None:
        return raw
    text = raw.get("text_config", raw)
    if not isinstance(text, Mapping):
        raise ModelError(f"text_config must be an object; got {abbreviate(text)}")
    stated = text.get("model_type") if text is not raw else None
    model_type = tower.model_type if stated is None else stated
    if isinstance(model_type, str):
        model_type = MODEL_TYPES.get(model_type, model_type)
    architectures = {family.model_type: name for name, family in FAMILIES.items()}
    if not isinstance(model_type, str) or model_type not in architectures:
        accepted = ", ".join(sorted({*architectures, *MODEL_TYPES}))
        raise ModelError(f"text_config.model_type must be one of {accepted}; got {abbreviate(stated)}")
    shared = {name: raw[name] for name in OF_BOTH if raw.get(name) is not None}
    # A null means something to the family (no window); where the tower has a default, it means that.
    filled = {*tower.defaults, *OF_BOTH}
    of_text = {name: value for name, value in text.items() if value is not None or name not in filled}
    tied = {} if raw.get(TIED) is None else {TIED: raw[TIED]}  # the one at the top counts
    named = {"architectures": [architectures[model_type]], "model_type": model_type}
    return {**tower.defaults, **shared, **of_text, **tied, **named}


def text_tensors(names: Iterable[str]) -> dict[str, str]:
    """The tensors of the language model: the name in a file of its family to the name on disk.

    >>> text_tensors(["language_model.model.norm.weight", "lm_head.weight", "visual.patch_embed.proj.weight"])
    {'model.norm.weight': 'language_model.model.norm.weight', 'lm_head.weight': 'lm_head.weight'}
    """
    result = {}
    for stored in names:
        name = stored
        for theirs, ours in PREFIXES:
            if stored.startswith(theirs):
                name = ours + stored.removeprefix(theirs)
                break
        if name.startswith(KEPT):
            result[name] = stored
    return result
