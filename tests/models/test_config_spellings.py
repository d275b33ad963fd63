"""What config.json leaves out or spells in another way means what it means in transformers, or is refused."""

import json

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models import ModelError
from entropic_jax.models.config_json import from_json
from entropic_jax.models.decoder import family
from tests.models.family_cases import FULL, LLAMA3, SIZES, SLIDING, longrope
from tests.models.oracle import TOLERANCE, paged_logits, random_model

GPT_OSS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
LONG = {**longrope(4), "type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64}
OLMO3 = {"sliding_window": 6, "num_hidden_layers": 4}
# Family, settings of the model, and keys of config.json that change after it is written; None: left out.
READ = {
    "gelu of Gemma 1": ("Gemma", {"head_dim": 8}, {"hidden_act": "gelu", "hidden_activation": None}),
    "another key of Gemma 1": ("Gemma", {"head_dim": 8}, {"hidden_act": "silu", "hidden_activation": "relu"}),
    "our spelling of Gemma 2": ("Gemma2", {"head_dim": 8}, {"hidden_act": "silu", "hidden_activation": None}),
    "our spelling of Cohere": ("Cohere", {}, {"rms_norm_eps": 0.5, "layer_norm_eps": None}),
    "a scaling of Gemma 3 beside its rotations": (
        "Gemma3",
        {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 4},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "no rotation of gpt-oss": ("GptOss", GPT_OSS, {"rope_parameters": None}),
    "a base of gpt-oss": ("GptOss", GPT_OSS, {"rope_parameters": None, "rope_theta": 500.0}),
    "no rotation of Ministral 3": ("Ministral3", {"head_dim": 8}, {"rope_parameters": None}),
    "no rotation of Apertus": ("Apertus", {}, {"rope_parameters": None, "rope_theta": 1e4}),
    "no rotation of Cohere": ("Cohere", {}, {"rope_parameters": None}),
    "one base of OLMo 3": ("Olmo3", OLMO3, {"rope_parameters": None, "rope_theta": 500.0}),
    "a scaling of OLMo 3": (
        "Olmo3",
        OLMO3,
        {
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "layers of OLMo 3 without a window": (
        "Olmo3",
        OLMO3,
        {"rope_theta": 500.0, "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "layers of OLMo 3 with a window": (
        "Olmo3",
        OLMO3,
        {"rope_theta": 500.0, "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 100.0}}},
    ),
    "length of the model": (
        "Llama",
        {},
        {"rope_parameters": None, "rope_scaling": LONG, "original_max_position_embeddings": 16},
    ),
    "length of the model for llama3": (
        "Llama",
        {},
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 8},
    ),
    "longrope by another name": (
        "Phi3",
        {},
        {"rope_parameters": None, "rope_scaling": {**LONG, "type": "yarn", "rope_type": "yarn"}}
        | {"original_max_position_embeddings": 16},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "gelu of Gemma 1" else pytest.mark.slow) for n in READ]
)
def test_read_as_in_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    architecture, settings, changes = READ[name]
    random_model(architecture, {**SIZES, **settings}, seed=3).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    stated = {**json.loads(file.read_text()), **changes}
    absent = {key for key, value in changes.items() if value is None}
    file.write_text(json.dumps({key: value for key, value in stated.items() if key not in absent}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], 40)
    with torch.no_grad():
        expected = theirs.float()(input_ids=torch.tensor(tokens[None])).logits[0].numpy()
    actual = paged_logits(models.load(tmp_path, progress=False), tokens, len(tokens))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)


REFUSED = {
    "another type": ("Llama", {"model_type": "mistral"}, "model_type must be 'llama' for LlamaForCausalLM"),
    "not causal": ("Llama", {"is_causal": False}, "is_causal must be True; got False"),
    "both directions": (
        "Qwen3",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention must be False; got True",
    ),
    "pattern of Gemma 2": (
        "Gemma2",
        {"sliding_window_pattern": 3},
        "sliding_window_pattern must be 2; got 3",
    ),
    "one rotation of Gemma 3": (
        "Gemma3",
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
        f"rope_parameters must have the objects {FULL} and sliding_attention",
    ),
    "caps of Gemma 3": ("Gemma3", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping must be None"),
    "scale of another kind": (
        "DeepseekV3",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
        "rope_scaling.mscale_all_dim must be absent with 'linear'",
    ),
    "growth without yarn": (
        "Ministral3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
        "rope_scaling.llama_4_scaling_beta must be 0 without 'yarn'; got 0.1",
    ),
    "router of DeepSeek V2": (
        "DeepseekV2",
        {"topk_method": "noaux_tc", "moe_intermediate_size": 20},
        "topk_method must be 'greedy' or 'group_limited_greedy'; got 'noaux_tc'",
    ),
    "layers of Mistral": (
        "Mistral",
        {"layer_types": ["sliding_attention", FULL], "sliding_window": 5},
        "layer_types must be absent, or 'sliding_attention' in all layers",
    ),
    "a key by another name": (
        "DeepseekV2",
        {"n_routed_experts": [1, "a"]},
        "n_routed_experts must be an integer",
    ),
    "rotation of MiniMax": (
        "MiniMaxM2",
        {"head_dim": 8, "rotary_dim": 3},
        "rotary_dim must be an even number of at most head_dim, 8; got 3",
    ),
    "window of Llama 4": (
        "Llama4",
        {"layer_types": ["sliding_attention", FULL]},
        "layer_types must be 'full_attention' or 'chunked_attention'",
    ),
    "chunks without a size": ("Llama4", {"attention_chunk_size": None}, "attention_chunk_size must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    architecture, changes, message = REFUSED[name]
    raw = {**SIZES, "architectures": [f"{architecture}ForCausalLM"], **changes}
    with pytest.raises(ModelError) as raised:
        models.decoder.blocks(from_json(raw, family(raw)))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_keys_of_other_families_are_passed_over():
    """Only Qwen and SmolLM 3 have a switch of the window."""
    raw = {**SIZES, "architectures": ["MistralForCausalLM"], "sliding_window": 5, "use_sliding_window": False}
    assert from_json(raw, family(raw)).sliding_window == 5


def test_null_is_the_default_of_the_family():
    raw = {**SIZES, "architectures": ["CohereForCausalLM"], "layer_norm_eps": None, "logit_scale": None}
    config = from_json({**raw, "rope_theta": None, "hidden_act": None}, family(raw))
    assert (config.rms_norm_eps, config.logit_scale, config.rope_theta) == (1e-5, 0.0625, 5e5)
    raw = {**SIZES, "architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": None}
    assert from_json(raw, family(raw)).final_logit_softcapping is None


@pytest.mark.parametrize(
    ("architecture", "kinds"), [("Qwen2", "FFFFSS"), ("Qwen2Moe", "SFSFFF")], ids=["last", "every second"]
)
def test_layers_that_slide_by_number(architecture, kinds):
    raw = {**SIZES, "architectures": [f"{architecture}ForCausalLM"], "num_hidden_layers": 6}
    raw |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 4}
    windows = models.Decoder(from_json(raw, family(raw))).windows
    assert "".join("F" if window is None else "S" for window in windows) == kinds


def test_llama_4_as_first_published():
    """An empty list stands for every fourth layer, and a number for a switch."""
    raw = {**SIZES, "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 4, "no_rope_layers": []}
    config = from_json({**raw, "attn_temperature_tuning": 4}, family(raw))
    assert config.no_rope_layers == (1, 1, 1, 0) and config.attn_temperature_tuning is True
    assert config.chunk(0) == 8192 and config.chunk(3) is None


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 64),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "dynamic", "factor": 2.5}, 160),
        ({"type": "linear", "factor": 2.5}, 64),
    ],
)
def test_longest_context(scaling, longest):
    """Qwen documents yarn with `max_position_embeddings` as it was trained."""
    raw = {**SIZES, "architectures": ["Qwen2ForCausalLM"], "rope_scaling": scaling}
    assert from_json(raw, family(raw)).longest_context == longest


def test_a_model_type_under_which_others_publish_a_family():
    raw = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
    assert family(raw).model_type == "deepseek_v3" == family({"model_type": "kimi_k2"}).model_type
    with pytest.raises(ModelError, match="model_type must be 'llama' for LlamaForCausalLM"):
        family({"architectures": ["LlamaForCausalLM"], "model_type": "kimi_k2"})


def test_types_of_layers_are_a_list():
    raw = {**SIZES, "sliding_window": 4, "layer_types": 5}
    with pytest.raises(ModelError, match="layer_types must be a list; got 5"):
        from_json(raw, models.FAMILIES["Starcoder2ForCausalLM"])
