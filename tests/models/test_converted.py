"""Converted checkpoints: the bits of the original on every mesh, and one line where something is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from safetensors.numpy import load_file

from entropic_jax import models
from entropic_jax.models import Config, ModelError, conversion, embedding
from tests.compilation import virtual_devices

from . import format_writers
from .converted_programs import differences

ROOT = Path(__file__).resolve().parents[2]
LLAMA = Config("LlamaForCausalLM", 64, 64, 128, 2, 4, 2, attention_bias=True, eos_token_id=(2,))
TIED = Config("Qwen3ForCausalLM", 96, 64, 128, 2, 4, 2, tie_word_embeddings=True)
EXPERTS = Config(
    "MixtralForCausalLM", 64, 64, 128, 2, 4, 4, num_local_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=128,
)  # fmt: skip
EXAMPLES = {"llama": LLAMA, "tied": TIED, "mixtral": EXPERTS}


def saved(folder, config=LLAMA, dtype="bfloat16"):
    """The directory of a model with random weights of a dtype."""
    models.save(models.initialise(config, 3), folder / "model", dtype=dtype)
    return folder / "model"


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("config", EXAMPLES.values(), ids=EXAMPLES)
def test_a_conversion_has_the_bits_of_the_original(tmp_path, config, dtype, stored):
    path = saved(tmp_path, config, stored)
    models.convert(path, tmp_path / "converted", dtype, progress=False)
    actual, expected = (models.load(p, dtype, progress=False) for p in (tmp_path / "converted", path))
    assert differences(actual, expected) == []
    for field in ("config", "generation", "mesh", "quantization", "operand_dtype", "blocked"):
        assert getattr(actual, field) == getattr(expected, field)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantised_weights_come_back(tmp_path, quantization, dtype):
    path = saved(tmp_path)
    models.convert(path, tmp_path / "converted", dtype, progress=False, quantization=quantization)
    expected = models.load(path, dtype, progress=False, quantization=quantization)
    for stated in (None, quantization):
        actual = models.load(tmp_path / "converted", dtype, progress=False, quantization=stated)
        assert actual.quantization == quantization
        assert differences(actual, expected) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_that_is_in_memory_once_is_stored_once(tmp_path, monkeypatch, dtype):
    path = saved(tmp_path, TIED, "bfloat16")
    sizes = {}
    for large, name in ((2**40, "small"), (1, "large")):
        monkeypatch.setattr(embedding, "LARGE_TABLE", large)
        models.convert(path, tmp_path / name, dtype, progress=False)
        sizes[name] = len(json.loads((tmp_path / name / "converted.json").read_text())["arrays"])
    for large in (2**40, 1):  # each is loaded either way
        monkeypatch.setattr(embedding, "LARGE_TABLE", large)
        expected = models.load(path, dtype, progress=False)
        for name in sizes:
            assert differences(models.load(tmp_path / name, dtype, progress=False), expected) == []
    arrays = len(jax.tree.leaves(expected.params))
    assert sizes["large"] in (arrays, arrays - 1)
    if dtype == "bfloat16":
        assert sizes == {"small": arrays - 1, "large": arrays - 1}


def test_a_quantised_file_is_dequantised_once(tmp_path):
    path = saved(tmp_path, dtype="float32")
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (path / "config.json").write_text(json.dumps(raw))
    stored = load_file(path / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        stored |= format_writers.fp8(name.removesuffix(".weight"), stored.pop(name))[0]
    format_writers.save(stored, path / "model.safetensors")
    models.convert(path, tmp_path / "converted", progress=False)
    assert "quantization_config" not in json.loads((tmp_path / "converted" / "config.json").read_text())
    actual, expected = (models.load(p, progress=False) for p in (tmp_path / "converted", path))
    assert differences(actual, expected) == []


def test_the_embedded_model_has_its_other_files(tmp_path):
    models.convert(None, tmp_path / "converted", progress=False)
    actual, expected = models.load(tmp_path / "converted", progress=False), models.load(progress=False)
    assert differences(actual, expected) == []
    assert actual.tokenizer.encode("def f(x):\n") == expected.tokenizer.encode("def f(x):\n")
    assert actual.tokenizer.chat_template == expected.tokenizer.chat_template
    source = models.directory_of(None)
    for file in ("generation_config.json", "calibration.json", "draft_head/draft_head.safetensors"):
        assert (tmp_path / "converted" / file).read_bytes() == (source / file).read_bytes()
    assert not (tmp_path / "converted" / "model.safetensors").exists()


def reported(folder, dtype, quantization, *meshes):
    """What `converted_programs` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.converted_programs", folder, dtype, str(quantization), *meshes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "XLA_FLAGS": virtual_devices(4)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "dtype", "quantization", "meshes"),
    [
        (EXPERTS, "bfloat16", None, ("1", "2", "4", "2x2")),
        (LLAMA, "float32", "int8", ("1", "2")),
        pytest.param(LLAMA, "bfloat16", "int4", ("1", "2"), marks=pytest.mark.exhaustive),
        pytest.param(TIED, "float32", None, ("1", "2"), marks=pytest.mark.exhaustive),
    ],
    ids=["experts", "int8", "int4", "tied"],
)
def test_every_mesh_reads_what_another_has_written(tmp_path, config, dtype, quantization, meshes):
    saved(tmp_path, config)
    expected = {f"{first} {second}": [] for first in meshes for second in meshes}
    assert reported(tmp_path, dtype, quantization, *meshes) == expected


@pytest.mark.slow
def test_kv_heads_are_divided_while_loading_and_converting(tmp_path):
    saved(tmp_path, LLAMA)  # two KV heads
    meshes = "1", "2", "4"
    expected = {f"{first} {second}": [] for first in meshes for second in meshes}
    assert reported(tmp_path, "bfloat16", None, *meshes) == expected


@pytest.fixture
def converted_directory(tmp_path):
    path = tmp_path / "converted"
    models.convert(saved(tmp_path), path, "bfloat16", progress=False)
    return path


def refusal(path, dtype="bfloat16", quantization=None):
    with pytest.raises(ModelError) as raised:
        models.load(path, dtype, progress=False, quantization=quantization)
    assert "\n" not in str(raised.value)
    return str(raised.value).replace(str(path), "DIR")


def test_another_dtype_or_quantization_is_refused(converted_directory):
    expected = "dtype must be bfloat16, which DIR was converted to; got float32"
    assert refusal(converted_directory, "float32") == expected
    expected = "quantization must be None, which DIR was converted to; got int8"
    assert refusal(converted_directory, quantization="int8") == expected


def test_another_quantization_than_that_of_the_checkpoint_is_refused(tmp_path):
    models.convert(saved(tmp_path), tmp_path / "int8", "bfloat16", progress=False, quantization="int8")
    expected = "quantization must be int8 or None, which DIR was converted to; got int4"
    assert refusal(tmp_path / "int8", quantization="int4") == expected


def changed(path, **values):
    """Change fields of converted.json."""
    raw = json.loads((path / "converted.json").read_text())
    (path / "converted.json").write_text(json.dumps(raw | values))


def test_another_version_is_refused(converted_directory):
    changed(converted_directory, version=2)
    assert refusal(converted_directory) == "DIR/converted.json: version must be 1; got 2"


@pytest.mark.parametrize(
    "fields", [{"arrays": None}, {"arrays": {"a": ["float3", [1]]}}, {"files": []}, {"quantization": "int3"}]
)
def test_a_description_with_other_fields_is_refused(converted_directory, fields):
    changed(converted_directory, **fields)
    assert refusal(converted_directory).startswith("DIR/converted.json must have dtype, quantization, arrays")


def test_another_config_is_refused(converted_directory):
    file = converted_directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 96}))
    expected = "DIR/converted.json: layers.0.mlp.down_proj.kernel must be (96, 64), as config.json says; got "
    assert refusal(converted_directory) == f"{expected}(128, 64)"


def largest(path):
    """The largest file of arrays."""
    files = (file for file in (path / "weights").rglob("*") if file.is_file())
    return max(files, key=lambda file: file.stat().st_size)


def test_a_missing_or_truncated_file_is_named(converted_directory):
    file = largest(converted_directory)
    content = file.read_bytes()
    name = str(file).replace(str(converted_directory), "DIR")
    file.write_bytes(content[:-1])
    size = len(content)
    expected = f"{name} must have {size} bytes; got {size - 1}: the checkpoint is damaged"
    assert refusal(converted_directory) == expected
    file.unlink()
    assert refusal(converted_directory) == f"{name} is missing: the checkpoint is damaged"


def test_damage_that_leaves_the_sizes_is_one_line(converted_directory):
    file = converted_directory / "weights" / "manifest.ocdbt"
    file.write_bytes(bytes(file.stat().st_size))
    assert refusal(converted_directory).startswith("DIR/weights cannot be read, the checkpoint is damaged: ")


def test_a_conversion_that_has_not_ended_is_refused(converted_directory):
    (converted_directory / "converted.json").unlink()
    assert refusal(converted_directory) == "DIR/converted.json is missing: the conversion has not ended"


def test_what_cannot_be_converted_is_refused(tmp_path, converted_directory):
    refused = {
        "output must be a missing or empty directory; got ": (tmp_path / "model", converted_directory),
        "path must be a model that is not converted; got ": (converted_directory, tmp_path / "again"),
        "path must be a directory with config.json": (tmp_path / "nowhere", tmp_path / "again"),
    }
    for message, (source, output) in refused.items():
        with pytest.raises(ModelError, match=message):
            conversion.convert(source, output, "bfloat16", progress=False)
    assert not (tmp_path / "again").exists()
