"""LoRA adapters against PEFT and against merged weights, and what is refused of their files."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from entropic_jax import models
from entropic_jax.models import lora, lora_files
from entropic_jax.models.config import ModelError
from tests.lora_adapters import write_adapter
from tests.models.family_cases import CASES, SIZES
from tests.models.oracle import TOLERANCE, random_model

LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", **SIZES)
TOKENS = np.array([[1, 5, 9, 3, 7, 2, 8, 4]])
# Dense models whose files name or fuse their layers differently, one with experts, whose attention is dense.
FAMILIES = ("Llama", "Phi3", "Glm", "Starcoder2", "Gemma2", "Phi", "Mixtral")
SLOW = pytest.mark.slow


def attend(query, key, value, cache, *, window, soft_cap=None, **_):
    """Causal attention over the tokens of the pass."""
    n, group = query.shape[1], query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
    scores = jnp.einsum("rnhd,rmhd->rhnm", query, key) / query.shape[-1] ** 0.5
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    distance = jnp.arange(n)[:, None] - jnp.arange(n)
    seen = (distance >= 0) & (distance < (n if window is None else window))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("rhnm,rmhd->rnhd", weights, value), cache


def logits(decoder: Any, params: Any, rows: int = 1, **adapter: Any) -> np.ndarray:
    """Logits of `TOKENS` in each of some rows."""
    tokens = jnp.asarray(np.repeat(TOKENS, rows, 0), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def program(params, adapter):
        layers = (None,) * decoder.shape.layers
        hidden, _ = decoder.hidden(params, tokens, positions, layers, attend, **adapter)
        return decoder.logits(params, hidden)

    return np.asarray(jax.jit(program)(params, adapter))


def adapted(model: models.Model, *directories: Path, rank: int = 8) -> lora.LoraParams:
    """Parameters with adapters in the first slots of three."""
    adapters = lora.empty_adapters(model.config, 3, rank, "float32")
    for slot, directory in enumerate(directories):
        adapters = lora.install(
            adapters, jnp.int32(slot), lora_files.read_adapter(directory, model.config, rank), model.config
        )
    return lora.LoraParams(model.params, adapters)


def loaded(tmp_path: Path, family: str = "Llama", changes: Any = ()) -> tuple[Any, models.Model]:
    """A random model of transformers, and ours of the same weights."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    reference = random_model(family, {**SIZES, **dict(changes)}, seed=3)
    reference.save_pretrained(tmp_path / "base")
    return reference, models.load(tmp_path / "base", progress=False)


PEFT_CASES = [
    {},
    {"use_rslora": True, "lora_alpha": 5},
    {
        "rank_pattern": {"k_proj": 2, "layers.1.self_attn.q_proj": 6},
        "alpha_pattern": {"^model.layers.0.mlp.up_proj": 9},
    },
    {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "init_lora_weights": "gaussian"},
    {"target_modules": "all-linear", "lora_dropout": 0.1},
]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, in what PEFT calls
@pytest.mark.parametrize("settings", PEFT_CASES)
def test_agrees_with_peft(settings, tmp_path):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    reference, model = loaded(tmp_path)
    everything = {"target_modules": [*lora.BLOCKS], "r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
    wrapped = peft.get_peft_model(reference, peft.LoraConfig(**{**everything, **settings})).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.2)
        expected = wrapped(input_ids=torch.tensor(TOKENS)).logits.numpy()[0]
        with wrapped.disable_adapter():
            alone = wrapped(input_ids=torch.tensor(TOKENS)).logits.numpy()[0]
    wrapped.save_pretrained(tmp_path / "adapter")
    params = adapted(model, tmp_path / "adapter", tmp_path / "adapter")
    actual = logits(lora.LoraDecoder(model.decoder), params, 2, adapter=jnp.array([2, 0]))
    assert np.abs(expected - alone).max() > 0.1, "the adapter does nothing"
    assert np.abs(actual[0] - expected).max() <= TOLERANCE
    assert np.abs(actual[1] - alone).max() <= TOLERANCE


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=() if n in ("Llama", "Phi3") else SLOW) for n in FAMILIES]
)
def test_agrees_with_merged_weights(family, tmp_path):
    """The weights on disk plus scale · B A, through transformers."""
    torch = pytest.importorskip("torch")
    changes = next(changes for name, changes in CASES if name == family)
    reference, model = loaded(tmp_path, family, changes.items())
    directory = write_adapter(tmp_path / "adapter", model, seed=2, rank=3, size=0.2, lora_alpha=6)
    tensors, state = load_file(directory / "adapter_model.safetensors"), reference.state_dict()
    for name in [name for name in tensors if ".lora_A." in name]:
        a, b = (torch.tensor(tensors[n]) for n in (name, name.replace("lora_A", "lora_B")))
        state[name.removeprefix("base_model.model.").replace("lora_A.", "")] += 2.0 * (b @ a)
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor(TOKENS)).logits.numpy()[0]
    actual = logits(lora.LoraDecoder(model.decoder), adapted(model, directory), adapter=jnp.array([1]))
    assert np.abs(actual[0] - expected).max() <= TOLERANCE
    plain = logits(model.decoder, model.params)
    assert np.abs(plain[0] - expected).max() > 0.1, "the adapter does nothing"


@pytest.fixture(scope="module")
def small() -> models.Model:
    config = models.model.from_json(LLAMA, models.decoder.family(LLAMA))
    return models.initialise(config, 0)


def test_a_row_gets_its_adapter_whatever_the_others_have(small, tmp_path):
    paths = [write_adapter(tmp_path / str(i), small, i, rank=2 + i, size=0.4) for i in range(3)]
    decoder, params = lora.LoraDecoder(small.decoder), adapted(small, *paths)
    mixed = logits(decoder, params, 4, adapter=jnp.array([2, 0, 3, 1]))
    for place, number in enumerate((2, 0, 3, 1)):
        np.testing.assert_array_equal(
            mixed[place], logits(decoder, params, 4, adapter=jnp.full(4, number))[place]
        )
    np.testing.assert_array_equal(mixed[1], logits(small.decoder, small.params, 4)[1])
    np.testing.assert_array_equal(mixed[1], logits(decoder, params, 4)[1])


def test_a_pass_computes_the_updates_of_its_adapters_only(small, tmp_path, monkeypatch):
    calls, product = [], lora.skinny_matmul

    def counted(*operands):
        jax.debug.callback(lambda: calls.append(1))
        return product(*operands)

    monkeypatch.setattr(lora, "skinny_matmul", counted)
    decoder = lora.LoraDecoder(small.decoder)
    params = adapted(small, *(write_adapter(tmp_path / str(i), small, i) for i in range(2)))
    of_one = sum(1 + len(site.names) for site in lora.sites(small.config))  # A side by side, each B
    for rows, adapters in (([0, 0, 0], 0), ([0, 1, 1], 1), ([2, 0, 1], 2)):
        calls.clear()
        logits(decoder, params, 3, adapter=jnp.array(rows))
        jax.effects_barrier()
        assert len(calls) == adapters * of_one, rows


def test_both_ways_to_update_rows_agree():
    rng, rows = np.random.default_rng(0), jnp.array([2, 0, 3, 2, 0])
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    factors = lora.StackedFactors(draw(3, 8, 4), (draw(3, 2, 6), draw(3, 2, 5)))
    outputs, x = (draw(5, 2, 6), draw(5, 2, 5)), draw(5, 2, 8)
    results = [jax.jit(way)(factors, rows, outputs, x) for way in (lora.gathered, lora.one_by_one)]
    for y, first, second in zip(outputs, *results, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)
        np.testing.assert_array_equal(first[jnp.array([1, 4])], y[jnp.array([1, 4])])
        np.testing.assert_array_equal(second[jnp.array([1, 4])], y[jnp.array([1, 4])])
        assert np.abs(first[0] - y[0]).max() > 0.1


def test_an_adapter_that_is_not_finite_stays_in_its_rows(small, tmp_path):
    paths = [write_adapter(tmp_path / str(i), small, i) for i in range(2)]
    tensors = load_file(paths[0] / "adapter_model.safetensors")
    save_file(
        {n: np.full_like(t, np.nan) for n, t in tensors.items()}, paths[0] / "adapter_model.safetensors"
    )
    decoder = lora.LoraDecoder(small.decoder)
    mixed = logits(decoder, adapted(small, *paths), 3, adapter=jnp.array([1, 2, 0]))
    assert np.isnan(mixed[0]).all() and np.isfinite(mixed[1:]).all()


@pytest.mark.slow
def test_an_adapter_of_a_quantised_model(small, tmp_path):
    path = write_adapter(tmp_path / "a", small, 1)
    quantised = models.model.quantised(small)
    factors, kernel = lora_files.read_adapter(path, small.config, 4), jnp.zeros(())
    actual = logits(
        lora.LoraDecoder(quantised.decoder), adapted(quantised, path), 2, adapter=jnp.array([1, 0])
    )
    dense = jax.tree.map(lambda x: x, small.params)
    for name, target in lora.targets(small.config).items():
        for place, number in enumerate(target.layers):
            linear = dense["layers"][number][lora.BLOCKS[name][0]][name]
            stored = quantised.params["layers"][number][lora.BLOCKS[name][0]][name]
            kernel = stored["kernel"].astype(jnp.float32) * stored["scale"]
            linear["kernel"] = kernel + factors[name].a[place] @ factors[name].b[place]
    head, table = quantised.params["lm_head"], quantised.params["embed_tokens"]
    dense["embed_tokens"]["weight"] = table["weight"].astype(jnp.float32) * table["scale"][:, None]
    dense["lm_head"]["kernel"] = head["kernel"].astype(jnp.float32) * head["scale"]
    expected = logits(small.decoder, dense)
    np.testing.assert_allclose(actual[0], expected[0], atol=TOLERANCE)
    np.testing.assert_array_equal(actual[1], logits(quantised.decoder, quantised.params, 2)[1])


def changed(directory: Path, **settings: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type must be 'LORA'; got 'IA3'"),
    ({"bias": "all"}, "bias must be 'none'; got 'all'"),
    ({"use_dora": True}, "use_dora must be absent or null; got True"),
    ({"use_qalora": True}, "use_qalora must be absent or null; got True"),
    ({"lora_bias": True}, "lora_bias must be absent or null"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save must be absent or null"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices must be absent"),
    ({"layer_replication": [[0, 1]]}, "layer_replication must be absent"),
    ({"target_parameters": ["x"]}, "target_parameters must be absent"),
    ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow must be absent or null; got 1"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights must be True or False or 'gaussian'"),
    ({"r": 0}, "r must be an integer between 1 and 65536; got 0"),
    ({"r": True}, "r must be an integer"),
    ({"r": "8"}, "r must be an integer"),
    ({"r": 9}, "max_lora_rank must be at least 9, the rank of model.layers.0"),
    ({"r": 3}, "lora_A must have shape"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a number; got nan"),
    ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
    ({"lora_alpha": None}, "lora_alpha must be a number; got None"),
    ({"use_rslora": 1}, "use_rslora must be True or False; got 1"),
    ({"fan_in_fan_out": "no"}, "fan_in_fan_out must be True or False"),
    ({"target_modules": 3}, "target_modules must be a list of names, a pattern or null; got 3"),
    ({"target_modules": ["q_proj", 3]}, "target_modules must be a list of names"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object of module names to positive integers"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must be an object"),
    ({"alpha_pattern": {"q_proj": "1"}}, "alpha_pattern must be an object of module names to numbers"),
    ({"alpha_pattern": {"(a+)+b": 1}}, r"alpha_pattern must name modules, not patterns; got '\(a\+\)\+b'"),
]


@pytest.mark.parametrize(
    ("settings", "message"), REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_fields_are_checked(small, settings, message, tmp_path):
    directory = write_adapter(tmp_path / "a", small, 0)
    changed(directory, **settings)
    with pytest.raises(ModelError, match=message):
        lora_files.read_adapter(directory, small.config, 8)


def test_fields_of_training_are_accepted(small, tmp_path):
    directory = write_adapter(tmp_path / "a", small, 0)
    before = lora_files.read_adapter(directory, small.config, 8)
    changed(
        directory,
        lora_dropout=0.3,
        base_model_name_or_path="x",
        megatron_core="y",
        use_dora=False,
        peft_version="1",
    )
    jax.tree.map(np.testing.assert_array_equal, lora_files.read_adapter(directory, small.config, 8), before)


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{LAYER}.lora_B.weight"), "q_proj must have lora_A and lora_B; got lora_A"),
        (
            lambda t: t.update({f"{LAYER}.lora_magnitude_vector": np.ones(2, np.float32)}),
            "got .*magnitude_vector",
        ),
        (lambda t: t.update({f"{LAYER}.lora_B.bias": np.ones(2, np.float32)}), "got .*lora_B.bias"),
        (
            lambda t: t.update(
                {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones(2, np.float32)}
            ),
            "got .*lora_embedding_A",
        ),
        (lambda t: t.update({f"{LAYER}.lora_A.weight": np.ones((4, 3), np.float32)}), "must have shape"),
        (
            lambda t: t.update({f"{LAYER}.lora_A.weight": t[f"{LAYER}.lora_A.weight"].astype(np.int8)}),
            "must be of F64",
        ),
        (
            lambda t: t.update(
                {f"base_model.model.lm_head.lora_{x}.weight": np.ones((4, 4), np.float32) for x in "AB"}
            ),
            "lm_head must be one of q_proj, .* of a dense layer",
        ),
        (
            lambda t: t.update(
                {f"{LAYER.replace('0', '9')}.lora_{x}.weight": np.ones((4, 4), np.float32) for x in "AB"}
            ),
            "layers.9.self_attn.q_proj must be a linear layer of LlamaForCausalLM",
        ),
        (lambda t: [t.pop(n) for n in list(t) if "up_proj" in n], "lacks tensors of 'up_proj'"),
        (lambda t: t.clear(), "must have tensors; got none"),
    ],
)
def test_tensors_are_checked(small, edit, message, tmp_path):
    directory = write_adapter(tmp_path / "a", small, 0)
    tensors = load_file(directory / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=message):
        lora_files.read_adapter(directory, small.config, 8)


def test_files_are_checked(small, tmp_path):
    with pytest.raises(ModelError, match=r"adapter must be a directory with adapter_config\.json"):
        lora_files.read_adapter(tmp_path / "missing", small.config, 8)
    directory = write_adapter(tmp_path / "a", small, 0)
    (directory / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match="complete safetensors file"):
        lora_files.read_adapter(directory, small.config, 8)
    (directory / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        lora_files.read_adapter(directory, small.config, 8)


def test_experts_and_latent_attention_have_no_adapters():
    assert {"q_proj", "o_proj"} == {*targets_of("Mixtral")} - {"k_proj", "v_proj"}
    assert targets_of("DeepseekV3").keys() <= {"gate_proj", "up_proj", "down_proj"}


def targets_of(family: str) -> dict[str, lora.Target]:
    transformers = pytest.importorskip("transformers")
    changes = next(changes for name, changes in CASES if name == family)
    raw = getattr(transformers, f"{family}Config")(**{**SIZES, **changes}).to_dict()
    raw["architectures"] = [f"{family}ForCausalLM"]
    return lora.targets(models.model.from_json(raw, models.decoder.family(raw)))
