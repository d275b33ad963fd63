import json

import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "sliding_window": None,
}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": np.zeros((1000, 8), np.float16)}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file({"b": np.zeros((8,), np.float32)}, tmp_path / "model-2.safetensors")
    return tmp_path


def test_a_directory_is_described(entropic, directory):
    status, out, _ = entropic("models", str(directory))
    assert status == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["architecture"] == "LlamaForCausalLM"
    assert lines["parameters"] == "8,008"
    assert lines["weights"] == "float16 and float32, 0.0 MB"
    assert lines["context"] == "8,192"
    assert "sliding" not in out


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json, which cannot be read"),
        (
            lambda d: (d / "config.json").write_text("{"),
            "config.json must hold a JSON object; got text that is not JSON",
        ),
        (lambda d: (d / "config.json").write_text("[]"), "config.json must hold a JSON object; got list"),
        (
            lambda d: [f.unlink() for f in d.glob("*.safetensors")],
            "path must be a directory with *.safetensors; got",
        ),
        (
            lambda d: (d / "model-2.safetensors").write_bytes(b"\xff" * 9),
            "model-2.safetensors must be a complete safetensors file; got",
        ),
        (
            lambda d: (d / "model-2.safetensors").write_bytes(b"123"),
            "model-2.safetensors must be a complete safetensors file; got",
        ),
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
