"""A saved model loads as the same model: every family, with random values in the fields of its Config."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models import Config, ModelError, RopeScaling
from entropic_jax.models.config_json import COMMON, from_json, to_json
from entropic_jax.models.rope import FIELDS
from tests.models.family_cases import CHUNKED, FULL, SLIDING

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 44} | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
FIELD = {field.name: field for field in dataclasses.fields(Config)[1:]}
POOL: list[Any] = [  # of which a field gets one that it accepts
    *(None, True, False, 0, 1, 2, 3, 4, 8, 12, 64, 0.25, 0.5, 1.5, 20.5, 1e4, 5e5, (), (1,), (0, 2), (2, 5)),
    *("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "xielu"),
    *("greedy", "group_limited_greedy", "noaux_tc"),
    *((0, 1, 1, 0), (FULL,) * 4, (SLIDING,) * 4, (SLIDING, FULL) * 2, (CHUNKED, CHUNKED, CHUNKED, FULL)),
]
SCALINGS = (
    None,
    RopeScaling("linear", 4.0),
    RopeScaling("dynamic", 2.0, original_max_position_embeddings=64),
    RopeScaling("llama3", 8.0, 1.0, 4.0, 32),
    RopeScaling("yarn", 4.0, original_max_position_embeddings=16, beta_fast=20.5, truncate=False),
    RopeScaling("yarn", 4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5),
    RopeScaling("longrope", 4.0, original_max_position_embeddings=16, attention_factor=1.5),
)
CONFIGS, ATTEMPTS, MOST_REFUSED = 60, 2000, 30


def pick(rng: np.random.Generator, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def random_scaling(config: Config, rng: np.random.Generator) -> RopeScaling | None:
    """A scaling of any kind, with a factor for each pair that the model rotates."""
    scaling = pick(rng, SCALINGS)
    if scaling is None or scaling.rope_type != "longrope":
        return scaling
    factors = tuple(rng.uniform(1, 4, config.rotary_dim // 2).tolist())
    return scaling._replace(short_factor=factors, long_factor=factors[::-1])


def random_config(architecture: str, rng: np.random.Generator) -> Config | None:
    """A Config with random values in half of the fields that the family reads; None if they do not fit."""
    keys = [name for name in (*COMMON, *models.FAMILIES[architecture].defaults) if name in FIELD]
    values = dict(SIZES)
    for name in dict.fromkeys(keys):
        accepted = [value for value in POOL if FIELD[name].metadata["check"].accepts(value)]
        if name not in SIZES and rng.random() < 0.5:
            values[name] = pick(rng, accepted)
    try:
        config = Config(architecture, **values)
        config = dataclasses.replace(config, rope_scaling=random_scaling(config, rng), rope_theta=1e4)
        models.decoder.blocks(config)
    except ModelError:
        return None
    return config


def configs_of(architecture: str, count: int) -> list[Config]:
    """So many random configurations of a family that its model can be built of."""
    rng = np.random.default_rng(len(architecture))
    drawn = (random_config(architecture, rng) for _ in range(ATTEMPTS))
    return [config for config, _ in zip(filter(None, drawn), range(count), strict=False)]


def canonical(config: Config) -> Config:
    """The Config that is read where `config` was written, as `to_json` documents."""
    family, scaling = models.FAMILIES[config.architecture], config.rope_scaling
    keys, changes = family.defaults, {name: FIELD[name].default for name in family.unwritten}
    if "layer_types" in keys and config.layer_types is None:
        kind = FULL if config.sliding_window is None or "sliding_window" not in keys else SLIDING
        listed = (kind,) * config.num_hidden_layers
        derives = {"sliding_window_pattern", "attention_chunk_size"} & keys.keys()
        derives |= {"max_window_layers", "no_rope_layer_interval"} & keys.keys() if kind == SLIDING else set()
        derives |= {"max_window_layers"} & keys.keys() if "use_sliding_window" not in keys else set()
        changes["layer_types"] = listed if derives else None
    if "no_rope_layers" in keys and not config.no_rope_layers:
        changes["no_rope_layers"] = (1,) * config.num_hidden_layers
    if "rope_local_base_freq" in keys and config.rope_local_base_freq is None:
        changes["rope_local_base_freq"] = config.rope_theta
    if "intermediate_size_mlp" in keys and not config.intermediate_size_mlp:
        changes["intermediate_size_mlp"] = keys["intermediate_size_mlp"]
    if "num_nextn_predict_layers" in keys:
        changes["num_nextn_predict_layers"] = 0
    if scaling is not None:
        fields = {name: getattr(scaling, name) for names in FIELDS[scaling.rope_type] for name in names}
        changes["rope_scaling"] = RopeScaling(scaling.rope_type, **fields)
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("architecture", models.FAMILIES)
def test_round_trip(architecture):
    """What is written is read as the same Config, or refused with the name of a field."""
    family, configs = models.FAMILIES[architecture], configs_of(architecture, CONFIGS)
    assert len(configs) == CONFIGS
    refusals = []
    for config in configs:
        try:
            written = json.loads(json.dumps(to_json(config, family, "float32")))
        except ModelError as error:
            refusals.append(str(error))
            continue
        reread = from_json(written, family)
        assert reread == canonical(config)
        assert models.decoder.blocks(reread) == models.decoder.blocks(config)
    assert len(refusals) <= MOST_REFUSED
    names = (*FIELD, *family.aliases.values())
    assert all(message.startswith(names) for message in refusals)


PLAIN = (97, 32, 44, 4, 4, 2)
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SAVED = {
    "window in every layer": Config("Gemma2ForCausalLM", *PLAIN, sliding_window=5),
    "window in every layer, with experts": Config("GptOssForCausalLM", *PLAIN, sliding_window=5, **EXPERTS),
    "windows of Qwen": Config("Qwen2ForCausalLM", *PLAIN, sliding_window=5),
    "no chunks": Config("Llama4ForCausalLM", *PLAIN, **EXPERTS, attention_chunk_size=4),
    "no window": Config("Cohere2ForCausalLM", *PLAIN),
    "rotation of sliding layers": Config("Olmo3ForCausalLM", *PLAIN, rope_theta=1e3, sliding_window=5),
    "scaling without a context": Config("Phi3ForCausalLM", *PLAIN, rope_scaling=RopeScaling("linear", 4.0)),
    "layers for drafts": Config(
        *("DeepseekV3ForCausalLM", *PLAIN[:5], PLAIN[4]),
        **EXPERTS,
        moe_intermediate_size=12,
        num_nextn_predict_layers=1,
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_models(name, tmp_path):
    """Configurations made by hand, with their weights."""
    model = models.initialise(SAVED[name], seed=0)
    models.save(model, tmp_path)
    restored = models.load(tmp_path, progress=False)
    assert restored.config == canonical(model.config)
    assert models.decoder.blocks(restored.config) == models.decoder.blocks(model.config)
    jax.tree.map(np.testing.assert_array_equal, restored.params, model.params)


UNSTATABLE = {
    "window of Llama": (
        Config("LlamaForCausalLM", *PLAIN, sliding_window=5),
        "sliding_window must be None, since config.json of LlamaForCausalLM cannot state another value",
    ),
    "multiplier of Llama": (
        Config("LlamaForCausalLM", *PLAIN, residual_multiplier=0.5),
        "residual_multiplier must be 1.0, since .*; got 0.5",
    ),
    "some layers of Mistral": (
        Config("MistralForCausalLM", *PLAIN, sliding_window=5, layer_types=(SLIDING, FULL) * 2),
        "layer_types must be None, since",
    ),
    "activation of Gemma 1": (
        Config("GemmaForCausalLM", *PLAIN, hidden_act="gelu"),
        "hidden_act must be 'gelu_pytorch_tanh', since .*; got 'gelu'",
    ),
    "context of dynamic scaling": (
        Config("LlamaForCausalLM", *PLAIN, rope_scaling=RopeScaling("dynamic", 2.0)),
        "rope_scaling.original_max_position_embeddings must be 4096, since .*; got 8192",
    ),
}


@pytest.mark.parametrize("name", UNSTATABLE)
def test_what_config_json_cannot_state_is_not_saved(name, tmp_path):
    config, message = UNSTATABLE[name]
    with pytest.raises(ModelError, match=message):
        models.save(models.initialise(config, seed=0), tmp_path)
    assert not list(tmp_path.iterdir())


def test_layer_types_are_not_empty():
    with pytest.raises(ModelError, match=r"layer_types must be a list of 4 entries, one a layer; got \(\)"):
        Config("LlamaForCausalLM", *PLAIN, layer_types=())
