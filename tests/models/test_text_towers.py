"""Text towers of models that see images: logits of a text are those of transformers, images are refused."""

import json
import logging

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models import ModelError
from entropic_jax.models.model import read_config
from entropic_jax.models.text_towers import TOWERS
from tests.models.family_cases import SIZES
from tests.models.oracle import TOLERANCE, greedy, paged_logits, random_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEPS = 8
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 16}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
OF_QWEN = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
IMAGE = {"image_token_index": 90}
CASES = {  # the text's configuration, that of the images, and other keys
    "Gemma3": (
        {"head_dim": 16, "sliding_window": 6, "num_hidden_layers": 6},
        VISION,
        IMAGE,
    ),
    "Mistral3": (
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        {**VISION, "model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 10, "tie_word_embeddings": False},
    ),
    "Llava": (
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model"},
        IMAGE,
    ),
    "LlavaNext": (
        {"model_type": "mistral", "sliding_window": 5},
        {**VISION, "model_type": "clip_vision_model"},
        IMAGE,
    ),
    "LlavaNextVideo": (
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model"},
        {**IMAGE, "video_token_index": 91},
    ),
    "LlavaOnevision": (
        {"model_type": "qwen2"},
        {**VISION, "model_type": "siglip_vision_model"},
        {**IMAGE, "video_token_index": 91},
    ),
    "SmolVLM": ({"model_type": "llama"}, VISION, {"image_token_id": 90}),
    "Idefics3": ({"model_type": "llama"}, VISION, {"image_token_id": 90}),
    "InternVL": (
        {"model_type": "qwen2"},
        {**VISION, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
        {"image_token_id": 90},
    ),
    "Qwen2VL": (
        SECTIONS,
        {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1},
        OF_QWEN,
    ),
    "Qwen2_5_VL": (
        {**SECTIONS, "num_key_value_heads": 1},
        QWEN_VISION,
        {**OF_QWEN, "tie_word_embeddings": True},
    ),
    "Llama4": (
        {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 36, "attention_chunk_size": 6},
        {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        IMAGE,
    ),
    "Qwen3VL": ({**SECTIONS, "head_dim": 8}, {**QWEN_VISION, "deepstack_visual_indexes": [0]}, OF_QWEN),
}
FAST = "Gemma3"


def write(name: str, directory) -> object:
    """A random model of transformers, saved."""
    text, vision, others = CASES[name]
    config = getattr(transformers, f"{name}Config")(
        text_config={**SIZES, **text}, vision_config=vision, **others
    )
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    random_weights(model, seed=1)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in CASES]
)
def test_a_text_has_the_logits_of_transformers(name, tmp_path, caplog):
    reference = write(name, tmp_path)
    prompt = np.random.default_rng(0).integers(0, 80, 13).tolist()
    tokens, expected = greedy(reference, prompt, STEPS)
    with caplog.at_level(logging.WARNING, "entropic_jax.models"):
        model = models.load(tmp_path, progress=False)
    assert "images are refused" in caplog.text
    actual = paged_logits(model, tokens[:-1], len(prompt))
    assert np.abs(expected).max() > 0.5, "the oracle's logits say nothing"
    assert np.abs(actual - expected).max() <= TOLERANCE

    models.save(model, tmp_path / "text")
    restored = models.load(tmp_path / "text", progress=False)
    assert restored.config == model.config


def test_every_tower_has_an_oracle():
    assert {f"{name}ForConditionalGeneration" for name in CASES} == set(TOWERS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": 5}, r"config\.json: text_config must be an object; got 5"),
        ({"text_config": {"model_type": "mamba"}}, r"text_config\.model_type must be one of .*; got 'mamba'"),
        ({"text_config": {"hidden_size": 0}}, r"hidden_size must be an integer of at least 1; got 0"),
    ],
)
def test_errors(changes, message, tmp_path):
    config = {"architectures": ["Gemma3ForConditionalGeneration"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        models.load(tmp_path, progress=False)


def test_a_null_is_what_it_means_to_the_family_and_a_missing_key_to_the_tower(tmp_path):
    def config_of(name: str, **text) -> models.Config:
        raw = {"architectures": [f"{name}ForConditionalGeneration"], "text_config": {**SIZES, **text}}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_config(tmp_path)

    windowless = config_of("Mistral3", model_type="mistral", sliding_window=None)
    assert windowless.sliding_window is None
    assert config_of("Mistral3", model_type="mistral").sliding_window == 4096
    for name, theta in (("Qwen2VL", 1e6), ("Qwen2_5_VL", 1e6), ("Qwen3VL", 5e5)):
        theirs = getattr(transformers, f"{name}Config")().get_text_config()
        ours = config_of(name)
        assert ours.rope_theta == theta == theirs.rope_parameters["rope_theta"]
        assert ours.rms_norm_eps == theirs.rms_norm_eps


def test_keys_at_the_top_and_sizes_left_out(tmp_path):
    """Qwen2-VL of 2024 has no `text_config`; Gemma 3 leaves out sizes."""
    flat = {**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "vision_config": {}}
    (tmp_path / "config.json").write_text(
        json.dumps({**flat, "architectures": ["Qwen2VLForConditionalGeneration"]})
    )
    config = read_config(tmp_path)
    assert (config.architecture, config.hidden_size, config.rope_scaling) == ("Qwen2ForCausalLM", 32, None)
    sparse = {
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "intermediate_size": 10240,
        "sliding_window": 1024,
    }
    stated = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": sparse, "eos_token_id": [1]}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    config = read_config(tmp_path)
    assert (config.architecture, config.num_attention_heads, config.head_dim) == ("Gemma3ForCausalLM", 8, 256)
    assert config.vocab_size == 262208 and config.eos_token_id == (1,)
