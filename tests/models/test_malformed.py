"""Malformed model directories: one-line errors that name file and field, no traceback, no hang."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from entropic_jax import models
from entropic_jax.models import Config, ModelError

SIZES = (61, 16, 24, 2, 4, 2)
CONFIGS = {
    "llama": Config("LlamaForCausalLM", *SIZES, eos_token_id=(2,)),
    "gemma3": Config("Gemma3ForCausalLM", *SIZES, sliding_window=8, tie_word_embeddings=True),
    "gpt_oss": Config("GptOssForCausalLM", *SIZES, num_local_experts=3, num_experts_per_tok=2),
}
VALUES = [
    *(0, -1, 1, 3, 10**9, 10**400, 0.5, -1e-3, 1e300, float("nan"), float("inf"), True, None),
    *("", "16", "swish", [], [1], ["full_attention"], [[[1]]], {}, {"a": {"b": 1}}, [None], "é" * 300),
]
SECONDS = 5  # a load at most
ROUNDS = 72


def directory_of(name: str, path: Path) -> Path:
    models.save(models.initialise(CONFIGS[name], seed=0), path)
    backend = Backend(WordLevel({"a": 0, "b": 1, "<s>": 2}, "a"))
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    return path


def require_one_line(path: Path) -> str | None:
    """Loads a directory, within the time, or returns the error's message, which is one line."""
    begin = time.monotonic()
    try:
        models.load(path, progress=False)
        message = None
    except ModelError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 2000 and str(path) in message
    assert time.monotonic() - begin < SECONDS
    return message


@pytest.mark.parametrize("name", CONFIGS)
def test_random_values_of_every_field(name, tmp_path):
    """Each round gives random values to random fields of the JSON files: an error of one line, or a model."""
    rng, refused = np.random.default_rng(list(CONFIGS).index(name)), 0
    directory_of(name, tmp_path)
    files = [tmp_path / f for f in ("config.json", "generation_config.json", "tokenizer_config.json")]
    texts = [file.read_text() for file in files]
    for _ in range(ROUNDS // len(CONFIGS)):
        file, text = [(f, t) for f, t in zip(files, texts, strict=True)][
            int(rng.choice(3, p=[0.8, 0.1, 0.1]))
        ]
        fields = json.loads(text)
        for key in rng.choice(sorted(fields), min(len(fields), int(rng.integers(1, 3))), replace=False):
            fields[str(key)] = VALUES[int(rng.integers(len(VALUES)))]
        file.write_text(json.dumps(fields))
        refused += require_one_line(tmp_path) is not None
        file.write_text(text)
    assert require_one_line(tmp_path) is None
    assert refused > ROUNDS // len(CONFIGS) // 4


def set_field(file, **fields):
    return lambda d: (d / file).write_text(json.dumps({**json.loads((d / file).read_text()), **fields}))


def pipe(file):
    def replace(directory):
        (directory / file).unlink(missing_ok=True)
        os.mkfifo(directory / file)

    return replace


def index(*names):
    def write(directory):
        (directory / "model.safetensors").rename(directory / "other.safetensors")
        placed = dict.fromkeys(load_file(directory / "other.safetensors"), "other.safetensors")
        text = json.dumps({"weight_map": {**placed, **dict.fromkeys(("x",), names[0])}})
        (directory / "model.safetensors.index.json").write_text(text)

    return write


CASES = {
    "layers": (set_field("config.json", num_hidden_layers=10**9), r"config\.json: num_hidden_layers must be"),
    "more layers than tensors": (
        set_field("config.json", num_hidden_layers=9000),
        r"num_hidden_layers must be at most 21, the number of tensors; got 9000",
    ),
    "vocabulary": (set_field("config.json", vocab_size=10**9), r"config\.json: vocab_size must be 61, as in"),
    "rope_theta": (set_field("config.json", rope_theta=0), r"rope_theta must be a positive number; got 0"),
    "rotated share": (
        set_field("config.json", partial_rotary_factor=0),
        r"partial_rotary_factor must be 1; got 0",
    ),
    "stop token": (set_field("config.json", eos_token_id=61), r"eos_token_id must be below vocab_size, 61"),
    "architectures": (set_field("config.json", architectures=[["a"]]), r"architectures must be one of"),
    "recurrent": (
        set_field("config.json", architectures=["FalconH1ForCausalLM"]),
        r"architectures must not be FalconH1ForCausalLM: layers with a recurrent state",
    ),
    "nested JSON": (
        lambda d: (d / "config.json").write_text("[" * 10**5),
        r"config\.json is not readable JSON",
    ),
    "config is a pipe": (pipe("config.json"), r"config\.json must be a regular file"),
    "weights are a pipe": (pipe("model.safetensors"), r"model\.safetensors must be a regular file"),
    "tokenizer is a pipe": (pipe("tokenizer.json"), r"tokenizer\.json must be a regular file"),
    "template is a pipe": (pipe("chat_template.jinja"), r"chat_template\.jinja must be a regular file"),
    "outside": (index("../x.safetensors"), r"weight_map must name files in its directory; got '\.\./x"),
    "bos_token": (set_field("tokenizer_config.json", bos_token=5), r"bos_token must be null, a string"),
    "chat_template": (set_field("tokenizer_config.json", chat_template=[1]), r"chat_template must be null"),
    "generation": (
        set_field("generation_config.json", eos_token_id=[[2]]),
        r"generation_config\.json: eos_token_id must be token ids below vocab_size",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_name_file_and_field(name, tmp_path):
    damage, expected = CASES[name]
    damage(directory_of("llama", tmp_path))
    with pytest.raises(ModelError, match=expected):
        models.load(tmp_path, progress=False)
    assert require_one_line(tmp_path) is not None


def test_swish_is_silu(tmp_path):
    set_field("config.json", hidden_act="swish")(directory_of("llama", tmp_path))
    assert models.load(tmp_path, progress=False).config.hidden_act == "silu"


def test_flipped_bytes_of_the_weights(tmp_path):
    """Damage to the header is an error or leaves the tensors as they are."""
    directory_of("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    data, rng = file.read_bytes(), np.random.default_rng(0)
    for _ in range(16):
        damaged = bytearray(data)
        damaged[int(rng.integers(0, 400))] = int(rng.integers(0, 256))
        file.write_bytes(bytes(damaged))
        require_one_line(tmp_path)
    save_file({"x": np.ones(1)}, file)
    assert "num_hidden_layers must be at most 1" in str(require_one_line(tmp_path))
