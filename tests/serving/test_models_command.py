import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from entropic_jax import models
from entropic_jax.serving.engine import description

from .. import tiny


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "model"
    models.save(tiny.model(), path)
    return path


def described(entropic, path):
    status, out, err = entropic("models", str(path))
    assert status == 0, err
    return dict(line.split(maxsplit=1) for line in out.splitlines())


def test_a_directory_is_described(entropic, directory):
    lines = described(entropic, directory)
    stored = load_file(directory / "model.safetensors")
    assert lines["architecture"] == json.loads((directory / "config.json").read_text())["architectures"][0]
    assert lines["parameters"] == f"{sum(x.size for x in stored.values()):,}"
    assert lines["weights"].startswith("float32, ")
    assert "sliding" not in lines and "quantization" not in lines


def test_a_tied_embedding_counts_once(entropic):
    stored = load_file(models.directory_of(None) / "model.safetensors")
    assert (
        described(entropic, models.directory_of(None))["parameters"]
        == f"{sum(x.size for x in stored.values()):,}"
    )


def test_a_server_counts_as_the_command_does(entropic):
    model = models.load(models.directory_of(None))
    counted = description._model(model)["parameters"]
    assert described(entropic, models.directory_of(None))["parameters"] == f"{counted:,}"


def test_parameters_of_quantised_weights_are_those_of_the_model(entropic, directory):
    before = described(entropic, directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (directory / "config.json").write_text(json.dumps(config))
    stored = load_file(directory / "model.safetensors")
    name = next(name for name in stored if name.endswith("q_proj.weight"))
    stored[name.replace(".weight", ".weight_scale")] = np.ones((), np.float32)
    save_file(stored, directory / "model.safetensors")
    lines = described(entropic, directory)
    assert lines["parameters"] == before["parameters"]
    assert lines["quantization"] == "fp8"


def test_weights_need_not_be_in_safetensors(entropic, directory):
    torch = pytest.importorskip("torch")
    before = described(entropic, directory)
    file = directory / "model.safetensors"
    tensors = {name: torch.from_numpy(np.array(x)) for name, x in load_file(file).items()}
    torch.save(tensors, directory / "pytorch_model.bin")
    file.unlink()
    assert described(entropic, directory)["parameters"] == before["parameters"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "must hold model.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 9), "model.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"123"), "model.safetensors"),
    ],
)
def test_what_is_wrong_is_said(entropic, directory, spoil, said):
    spoil(directory)
    status, _, err = entropic("models", str(directory))
    assert status == 2
    assert said in err
    assert str(directory) in err
    assert " must " in err
    assert err.count("\n") == 1


def test_the_list_has_the_embedded_model_and_the_architectures(entropic):
    status, out, _ = entropic("models")
    assert status == 0
    assert "embedded" in out and "LlamaForCausalLM" in out
