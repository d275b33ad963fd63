"""Keys of `rope_scaling` and `rope_parameters`: strays are refused, what real checkpoints state is read."""

import json

import pytest

from entropic_jax import models
from entropic_jax.models import Config, ModelError
from entropic_jax.models.config_json import from_json
from entropic_jax.models.decoder import family
from entropic_jax.models.rope import FIELDS
from tests.models.family_cases import FULL, LLAMA3, SIZES, SLIDING, longrope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
STATED = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "longrope": {**longrope(4), "original_max_position_embeddings": 16},
}
STRAYS = {  # none of which a kind that it is not of reads
    "alpha": 1000.0,
    "beta_fast": 32,
    "mscale_all_dim": 1.0,
    "attn_factor": 1.5,
    "short_mscale": 1.25,
    "low_freq_factor": 1.0,
    "llama_4_scaling_beta": 0.1,
    "truncate": False,
}
LLAMA_4 = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0}
LLAMA_4 |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
DEEPSEEK = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK |= {"original_max_position_embeddings": 4096, "type": "yarn"}
GPT_OSS = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False, "rope_type": "yarn"}
MINISTRAL_3 = {
    **DEEPSEEK,
    "llama_4_scaling_beta": 0.1,
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
}
PHI_3 = {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
GEMMA_3 = {
    FULL: {"factor": 8.0, "rope_theta": 1e6, "rope_type": "linear"},
    SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
}
# Family, key of config.json, what checkpoints of the family state there, and the kind that it is.
REAL = {
    "Llama 3.1": ("Llama", "rope_scaling", {**LLAMA_4, "factor": 8.0, "high_freq_factor": 4.0}, "llama3"),
    "Llama 4": ("Llama4", "rope_scaling", LLAMA_4, "llama3"),
    "Qwen 2.5": ("Qwen2", "rope_scaling", {**YARN, "type": "yarn", "rope_type": None}, "yarn"),
    "Qwen 3": ("Qwen3", "rope_parameters", {**YARN, "rope_theta": 1e6}, "yarn"),
    "Qwen 2.5 VL": ("Qwen2", "rope_scaling", {"type": "mrope", "mrope_section": [1, 1, 2]}, "default"),
    "Qwen 3 VL": (
        "Qwen3",
        "rope_scaling",
        {"mrope_interleaved": True, "mrope_section": [1, 1, 2], "rope_type": "default"},
        "default",
    ),
    "Phi 3": ("Phi3", "rope_scaling", {**PHI_3, "type": "su"}, "longrope"),
    "Phi 4 mini": ("Phi3", "rope_scaling", {**PHI_3, "type": "longrope"}, "longrope"),
    "Phi 3 by transformers 5": (
        "Phi3",
        "rope_parameters",
        {**longrope(4), "type": "longrope", "partial_rotary_factor": 1.0, "factor": 32.0}
        | {"original_max_position_embeddings": 4096},
        "longrope",
    ),
    "gpt-oss": ("GptOss", "rope_scaling", {**GPT_OSS, "original_max_position_embeddings": 4096}, "yarn"),
    "DeepSeek V3": ("DeepseekV3", "rope_scaling", DEEPSEEK, "yarn"),
    "Ministral 3": ("Ministral3", "rope_parameters", MINISTRAL_3, "yarn"),
    "Gemma 3": ("Gemma3", "rope_parameters", GEMMA_3, "linear"),
    "Gemma 3 by transformers 4": ("Gemma3", "rope_scaling", {"factor": 8.0, "rope_type": "linear"}, "linear"),
    "Seed-OSS": ("SeedOss", "rope_scaling", {"rope_type": "default"}, "default"),
    "Nemotron": ("Nemotron", "rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "default"),
    "YaRN of Llama 2": ("Llama", "rope_scaling", {**YARN, "finetuned": True}, "yarn"),
    "a factor of one": ("Llama", "rope_scaling", {"type": "default", "factor": 1.0}, "default"),
}


def read(architecture: str, **changes) -> Config:
    raw = {**SIZES, "architectures": [f"{architecture}ForCausalLM"], **changes}
    return from_json(raw, family(raw))


@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("kind", STATED)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_stray_keys_are_refused(field, kind, stray):
    assert set(STATED) == {"default", *FIELDS}
    if any(stray in keys for keys in FIELDS.get(kind, ())):
        read("Llama", **{field: {**STATED[kind], stray: STRAYS[stray]}})  # not a stray one
        return
    with pytest.raises(ModelError) as raised:
        read("Llama", **{field: {**STATED[kind], stray: STRAYS[stray]}})
    assert str(raised.value) == f"{field}.{stray} must be absent with {kind!r}; got {STRAYS[stray]!r}"


OF_SOME_LAYERS = {
    "full": (FULL, {"alpha": 1e3}, "rope_parameters.full_attention.alpha must be absent with 'linear'; got"),
    "sliding": (
        SLIDING,
        {"alpha": 1e3},
        "rope_parameters.sliding_attention.alpha must be absent with 'default'",
    ),
    "factor": (SLIDING, {"factor": 8.0}, "rope_parameters.sliding_attention.factor must be absent with"),
    "share": (
        SLIDING,
        {"partial_rotary_factor": 0.5},
        "sliding_attention.partial_rotary_factor must be absent",
    ),
    "older name": (
        SLIDING,
        {"rope_type": None, "type": "linear"},
        "rope_type must be 'default'; got 'linear'",
    ),
}


@pytest.mark.parametrize("case", OF_SOME_LAYERS)
def test_stray_keys_of_some_layers_are_refused(case):
    layers, changes, message = OF_SOME_LAYERS[case]
    stated = {key: v for key, v in {**GEMMA_3[layers], **changes}.items() if v is not None}
    with pytest.raises(ModelError) as raised:
        read("Gemma3", rope_parameters={**GEMMA_3, layers: stated})
    assert message in str(raised.value)


@pytest.mark.parametrize("name", REAL)
def test_what_checkpoints_state_is_read(name):
    architecture, field, stated, kind = REAL[name]
    scaling = read(
        architecture, **{field: {key: v for key, v in stated.items() if v is not None}}
    ).rope_scaling
    assert ("default" if scaling is None else scaling.rope_type) == kind


def test_the_message_names_the_file_and_is_one_line(tmp_path):
    config = Config("LlamaForCausalLM", 64, 16, 32, 1, 2)
    models.save(models.initialise(config, seed=0), tmp_path)
    file = tmp_path / "config.json"
    stated = {"type": "dynamic", "factor": 2.0, "a\nb": [1] * 1000}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_scaling": stated}))
    with pytest.raises(ModelError) as raised:
        models.load(tmp_path, progress=False)
    message = str(raised.value)
    assert "config.json: rope_scaling.'a\\nb' must be absent with 'dynamic'; got [1, 1" in message
    assert "\n" not in message and len(message) < 500
