"""Model directories: sharded, in half precision, with other spellings of config.json, and broken ones."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from entropic_jax import cpu_runtime, models
from entropic_jax.models import Config, ModelError, RopeScaling
from tests.models.dense import run

LLAMA = Config("LlamaForCausalLM", 61, 16, 24, 2, 4, 2, eos_token_id=(2,))
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
CONFIGS = {
    "llama": Config(**{**vars(LLAMA), "tie_word_embeddings": True, "rope_scaling": LLAMA3, "mlp_bias": True}),
    "linear": Config(**{**vars(LLAMA), "rope_scaling": RopeScaling("linear", 4.0), "eos_token_id": (2, 3)}),
    "mistral": Config("MistralForCausalLM", 61, 16, 24, 2, 4, 1, sliding_window=8, bos_token_id=1),
    "qwen2": Config(
        *("Qwen2ForCausalLM", 61, 16, 24, 2, 4, 2),
        sliding_window=8,
        layer_types=("full_attention", "sliding_attention"),
    ),
    "qwen3": Config("Qwen3ForCausalLM", 61, 16, 24, 2, 4, 2, 6, attention_bias=True),
    "mixtral": Config("MixtralForCausalLM", 61, 16, 24, 2, 4, 2, num_local_experts=3, num_experts_per_tok=2),
    "qwen3_moe": Config(
        *("Qwen3MoeForCausalLM", 61, 16, 24, 3, 4, 2),
        num_local_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=10,
        norm_topk_prob=True,
        mlp_only_layers=(1,),
    ),
}


VALUES_OF_GLM = (61, 16, 24, 2, 4, 2, 4)
EXPERTS_OF_GLM = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8} | {
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A valid directory, for a test to damage."""
    models.save(models.initialise(LLAMA, seed=0), tmp_path)
    return tmp_path


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def retensor(directory: Path, change) -> None:
    """Rewrite the weights after `change` has edited the dict of tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def shard(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    files = {n: f"model-{1 + i * 3 // len(names):05d}-of-00003.safetensors" for i, n in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (directory / "model.safetensors").unlink()


def same(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name, tmp_path):
    model = models.initialise(CONFIGS[name], seed=1)
    models.save(model, tmp_path)
    actual = models.load(tmp_path)
    assert actual.config == model.config
    same(actual.params, model.params)
    assert isinstance(actual.params["layers"], tuple)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(actual.params))


def test_tied_head_is_a_transposed_copy_and_is_not_saved(tmp_path):
    model = models.initialise(CONFIGS["llama"], seed=1)
    same(model.params["lm_head"]["kernel"], model.params["embed_tokens"]["weight"].T)
    models.save(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    actual = models.load(tmp_path)
    same(actual.params["lm_head"]["kernel"], actual.params["embed_tokens"]["weight"].T)


def test_shards_load_alike(directory):
    expected = models.load(directory)
    shard(directory)
    same(models.load(directory).params, expected.params)


@pytest.mark.parametrize("on_disk", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("in_memory", ["bfloat16", "float16", "float32"])
def test_precisions(directory, on_disk, in_memory):
    exact = models.load(directory).params
    models.save(models.load(directory), directory, dtype=on_disk)
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    assert all(t.dtype == kinds[on_disk] for t in load_file(directory / "model.safetensors").values())
    actual = models.load(directory, dtype=in_memory).params
    same(actual, jax.tree.map(lambda leaf: leaf.astype(on_disk).astype(in_memory), exact))


@pytest.mark.slow
def test_half_precision_computes_in_it(directory):
    exact, half = models.load(directory), models.load(directory, dtype="bfloat16")
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    expected, actual = (run(m.decoder, m.params, tokens, 4) for m in (exact, half))
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=0.1)


def test_initialise_repeats_itself():
    first, again, other = (models.initialise(LLAMA, seed) for seed in (3, 3, 4))
    same(first.params, again.params)
    assert not np.array_equal(first.params["lm_head"]["kernel"], other.params["lm_head"]["kernel"])


def test_both_spellings_of_rope(directory):
    scaling = {"type": "linear", "factor": 2.0}
    edit(directory / "config.json", rope_theta=3e5, rope_scaling=scaling)
    old = models.load(directory).config
    edit(directory / "config.json", rope_theta=None, rope_scaling=None, torch_dtype=None, dtype="float32")
    edit(directory / "config.json", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 3e5})
    assert models.load(directory).config == old
    assert old.rope_theta == 3e5 and old.rope_scaling == RopeScaling("linear", 2.0)


def test_stop_tokens(directory):
    assert models.load(directory).stop_tokens == (2,)
    edit(directory / "generation_config.json", eos_token_id=[5, 6])
    assert models.load(directory).stop_tokens == (5, 6)
    (directory / "generation_config.json").unlink()
    assert models.load(directory).stop_tokens == (2,) and models.load(directory).generation == {}


def test_harmless_tensors_are_passed_over(directory):
    expected = models.load(directory).params
    retensor(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}))
    same(models.load(directory).params, expected)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path):
    """DeepSeek V3 and GLM 4.5 have them after the last layer."""
    model = models.initialise(Config("Glm4MoeForCausalLM", *VALUES_OF_GLM, **EXPERTS_OF_GLM), seed=1)
    models.save(model, tmp_path)
    retensor(tmp_path, lambda t: t.update({"model.layers.2.eh_proj.weight": np.ones((2, 2))}))
    with pytest.raises(ModelError, match=r"holds model\.layers\.2\.eh_proj\.weight, which 2 layers"):
        models.load(tmp_path)
    edit(tmp_path / "config.json", num_nextn_predict_layers=1)
    same(models.load(tmp_path).params, model.params)


def test_layers_of_ernie_that_predict_further_tokens_are_passed_over(directory):
    expected = models.load(directory).params
    for name in ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight", "mtp.fc.weight"):
        retensor(directory, lambda t, name=name: t.update({name: np.ones((2, 2))}))
    same(models.load(directory).params, expected)
    retensor(directory, lambda t: t.update({"model.smtp_block.weight": np.ones((2, 2))}))
    with pytest.raises(ModelError, match=r"holds model\.smtp_block\.weight"):
        models.load(directory)


def test_architecture_by_model_type_alone(directory):
    edit(directory / "config.json", architectures=None)
    assert models.load(directory).config.architecture == "LlamaForCausalLM"


def config(**changes):
    return lambda d: edit(d / "config.json", **changes)


def weights(change):
    return lambda d: retensor(d, change)


def text(name, content):
    return lambda d: (d / name).write_text(content)


def truncate(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def lose_shard(directory):
    shard(directory)
    (directory / "model-00002-of-00003.safetensors").unlink()


def misplace(directory):
    shard(directory)
    index = directory / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**placed, "model.norm.weight": "model-00001-of-00003.safetensors"})


def tie_unequal(directory):
    edit(directory / "config.json", tie_word_embeddings=True)


Q = "model.layers.1.self_attn.q_proj.weight"
BROKEN = {
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json is missing"),
    "config is not JSON": (text("config.json", '{"vocab_size": '), r"config\.json is not readable JSON"),
    "config is a list": (text("config.json", "[]"), r"config\.json must hold a JSON object; got list"),
    "unknown architecture": (
        config(architectures=["GPT2LMHeadModel"]),
        r"must be one of those that `entropic models` lists; got \['GPT2LMHeadModel'\]",
    ),
    "no architecture": (
        config(architectures=None, model_type=None),
        r"architectures must be one of those that `entropic models` lists; got None",
    ),
    "missing size": (
        config(hidden_size=None),
        r"config\.json: hidden_size must be a positive integer; it is missing",
    ),
    "size of another type": (config(vocab_size="61"), r"vocab_size must be an integer .*; got '61'"),
    "zero heads": (config(num_key_value_heads=0), r"num_key_value_heads must be a positive integer; got 0"),
    "heads that do not divide": (
        config(num_key_value_heads=3),
        r"num_key_value_heads must be a divisor of num_attention_heads, 4; got 3",
    ),
    "odd head": (config(head_dim=5), r"head_dim must be an even number .*; got 5"),
    "other activation": (config(hidden_act="tanh"), r"hidden_act must be one of 'silu', .*; got 'tanh'"),
    "epsilon": (config(rms_norm_eps=-1.0), r"rms_norm_eps must be a positive number; got -1\.0"),
    "rope type": (
        config(rope_scaling={"rope_type": "proportional", "factor": 2.0}),
        r"rope_type must be one of .*'llama3'.*; got 'proportional'",
    ),
    "rope factor": (
        config(rope_scaling={"rope_type": "linear"}),
        r"rope_scaling\.factor must be a positive number with 'linear'; got None",
    ),
    "rope of a layer": (config(rope_scaling={"full_attention": {}}), r"one object for all layers"),
    "partial rope": (config(partial_rotary_factor=0.5), r"partial_rotary_factor must be 1; got 0\.5"),
    "quantised": (
        config(quantization_config={"bits": 4}),
        r"quantization_config\.quant_method must be one of 'fp8', .*; got None",
    ),
    "too few layers": (config(num_hidden_layers=1), r"holds model\.layers\.1\..* and 6 more, which 1 layers"),
    "too many layers": (config(num_hidden_layers=3), r"lacks model\.layers\.2\..* and 6 more"),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        r"must hold model\.safetensors, or several files and .*; got neither",
    ),
    "truncated": (truncate, r"model\.safetensors must be a complete safetensors file; got \d+ bytes"),
    "empty": (text("model.safetensors", ""), r"must not be empty; got 0 bytes"),
    "a web page": (text("model.safetensors", "<html>" * 9), r"must be a complete safetensors file"),
    "missing tensor": (weights(lambda t: t.pop(Q)), rf"lacks {re.escape(Q)}; config\.json asks for"),
    "unexpected tensor": (
        weights(lambda t: t.update(extra=np.ones(1))),
        r"holds extra, which 2 layers of Llama",
    ),
    "wrong shape": (
        weights(lambda t: t.update({Q: t[Q][:, 1:]})),
        r"q_proj.* must have shape \(16, 16\); got \(16, 15\)",
    ),
    "wrong dtype": (
        weights(lambda t: t.update({Q: t[Q].astype(np.int8)})),
        r"must be of F64, F32, F16, BF16; got I8",
    ),
    "unequal tie": (tie_unequal, r"lm_head\.weight must be absent or equal model\.embed_tokens\.weight; got"),
    "lost shard": (lose_shard, r"model-00002-of-00003\.safetensors is missing, and .*index\.json names it"),
    "misplaced tensor": (misplace, r"model\.norm\.weight is in .*model-00001.*, but .* holds it"),
    "empty index": (
        lambda d: (shard(d), edit(d / "model.safetensors.index.json", weight_map={})),
        r"weight_map",
    ),
    "index of a list": (
        lambda d: (shard(d), edit(d / "model.safetensors.index.json", weight_map=[1])),
        r"tensor to",
    ),
    "generation config": (text("generation_config.json", "nope"), r"generation_config\.json is not readable"),
    "tokenizer": (text("tokenizer.json", "{}"), r"tokenizer\.json is not readable by tokenizers"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_directories_say_what_is_wrong(name, directory):
    damage, message = BROKEN[name]
    damage(directory)
    with pytest.raises(ModelError, match=message) as raised:
        models.load(directory)
    assert str(directory) in str(raised.value)


def test_no_such_directory(tmp_path):
    with pytest.raises(ModelError, match=r"path must be a directory with .*; got .*nowhere"):
        models.load(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", ["int8", "float64", "f99", object()])
def test_other_dtypes_are_refused(directory, dtype):
    with pytest.raises(ModelError, match="dtype must be one of float32, bfloat16, float16; got"):
        models.load(directory, dtype=dtype)


def test_experts_need_numbers():
    with pytest.raises(ModelError, match="num_local_experts"):
        models.initialise(Config("MixtralForCausalLM", 61, 16, 24, 2, 4, 2), seed=0)


@pytest.mark.slow
@pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")
def test_matrices_stay_as_narrow_as_they_are_stored(tmp_path):
    config = Config("LlamaForCausalLM", 128, 64, 192, 2, 1, 1, tie_word_embeddings=True)
    models.save(models.initialise(config, seed=0), tmp_path, dtype="bfloat16")
    narrow, wide = models.load(tmp_path), models.load(tmp_path, as_stored=False)
    is_kernel = lambda path: path[-1].key == "kernel"
    for path, leaf in jax.tree_util.tree_leaves_with_path(narrow.params):
        assert leaf.dtype == (jnp.bfloat16 if is_kernel(path) else jnp.float32)
    same(jax.tree.map(lambda x: x.astype(jnp.float32), narrow.params), wide.params)
    for length in (2, 48):  # of few rows alone, and with more than the kernel takes
        tokens = jnp.arange(2 * length, dtype=jnp.int32).reshape(2, length)
        actual, expected = (run(m.decoder, m.params, tokens, length - 1) for m in (narrow, wide))
        np.testing.assert_allclose(actual, expected, atol=1e-4)
