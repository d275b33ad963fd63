"""Malformed model directories: one-line errors that name file and field, no traceback, no hang."""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from entropic_jax import models
from entropic_jax.models import Config, ModelError, RopeScaling
from entropic_jax.models.config import LARGEST_SETTINGS
from tests.models.damage import VALUES, damage
from tests.models.family_cases import LLAMA3

SIZES = (61, 16, 24, 2, 4, 2)
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=16)
LONGROPE = YARN._replace(rope_type="longrope", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
CONFIGS = {
    "llama": Config("LlamaForCausalLM", *SIZES, eos_token_id=(2,)),
    "gemma3": Config("Gemma3ForCausalLM", *SIZES, sliding_window=8, tie_word_embeddings=True),
    "gpt_oss": Config("GptOssForCausalLM", *SIZES, **EXPERTS, rope_scaling=YARN),
    "phi3": Config("Phi3ForCausalLM", *SIZES, 8, rope_scaling=LONGROPE),
    "deepseek": Config(
        *("DeepseekV3ForCausalLM", *SIZES[:5], SIZES[4]),
        **LATENT,
        moe_intermediate_size=20,
        num_local_experts=8,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
    ),
}
SECONDS = 5  # a load at most
SEEDS, MORE_SEEDS = 120, 400


def directory_of(name: str, path: Path) -> Path:
    """A valid directory, its tensors in one file."""
    models.save(models.initialise(CONFIGS[name], seed=0), path)
    backend = Backend(WordLevel({"a": 0, "b": 1, "<s>": 2}, "a"))
    backend.add_special_tokens(["<s>"])
    backend.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "b"}, "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> dict[str, Path]:
    """A valid directory of each configuration, its tensors in two files."""
    paths = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, path in paths.items():
        directory_of(name, path)
        tensors = load_file(path / "model.safetensors")
        files = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in tensors if files[name] == file}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        (path / "model.safetensors").unlink()
    return paths


def require_one_line(path: Path, expected: Any = None) -> str | None:
    """Loads a directory, within the time, or returns the error's message, which is one line.

    What is loaded is the `expected` weights, can be traced, and has a tokenizer that works.
    """
    begin, model, message = time.monotonic(), None, None
    try:
        model = models.load(path, progress=False)
    except ModelError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 2000 and str(path) in message
    assert time.monotonic() - begin < SECONDS
    if model is not None and expected is not None:
        require_usable(model)
        jax.tree.map(np.testing.assert_array_equal, model.params, expected)
    return message


def require_usable(model: models.Model) -> None:
    """Traces the model and uses its tokenizer. Raises what they raise."""
    attend = lambda query, key, value, cache, **_: (query, cache)
    caches, tokens = (None,) * model.config.num_hidden_layers, jax.ShapeDtypeStruct((1, 6), jnp.int32)
    hidden = lambda params, tokens: model.decoder.hidden(params, tokens, tokens, caches, attend)[0]
    jax.eval_shape(lambda *x: model.decoder.logits(x[0], hidden(*x)), model.params, tokens)
    assert all(0 <= token < model.config.vocab_size for token in model.stop_tokens)
    if (tokenizer := model.tokenizer) is not None:
        tokenizer.decode(tokenizer.encode("a b <s>"))
        f"{tokenizer.bos_token}{tokenizer.eos_token}".encode()
        with contextlib.suppress(ModelError):  # a template may be anything
            tokenizer.chat([{"role": "user", "content": "a"}])


def damaged_directories(seeds: range, sharded: dict[str, Path], path: Path) -> int:
    """Damages a directory for each seed, and loads it; how many are refused."""
    refused, expected = 0, {n: models.load(p, progress=False).params for n, p in sharded.items()}
    for seed in seeds:
        name, target = list(CONFIGS)[seed % len(CONFIGS)], path / str(seed)
        shutil.copytree(sharded[name], target)
        what = damage(target, seed)
        try:
            refused += require_one_line(target, expected[name]) is not None
        except Exception as error:
            raise AssertionError(f"seed {seed}, {name}, {what}") from error
    return refused


@pytest.mark.slow
def test_random_damage(sharded, tmp_path):
    """Fields, structure, bytes and kinds of files: an error of one line, or the model as it was."""
    assert damaged_directories(range(SEEDS), sharded, tmp_path) > SEEDS // 2


@pytest.mark.exhaustive
def test_more_random_damage(sharded, tmp_path):
    assert damaged_directories(range(SEEDS, SEEDS + MORE_SEEDS), sharded, tmp_path) > MORE_SEEDS // 2


def set_field(file, **fields):
    return lambda d: (d / file).write_text(json.dumps({**json.loads((d / file).read_text()), **fields}))


def edit_vocabulary(directory, *missing):
    file = directory / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"]["vocab"] = {t: i for t, i in described["model"]["vocab"].items() if t not in missing}
    file.write_text(json.dumps(described))


def pipe(file):
    def replace(directory):
        (directory / file).unlink(missing_ok=True)
        os.mkfifo(directory / file)

    return replace


def post_processor(number):
    """Puts a token of this id before a text."""
    part = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    token = {"id": "<s>", "ids": [number], "tokens": ["<s>"]}
    template = {"single": part, "pair": part, "special_tokens": {"<s>": token}}
    return set_field("tokenizer.json", post_processor={"type": "TemplateProcessing", **template})


def index(name, key="x"):
    def write(directory):
        (directory / "model.safetensors").rename(directory / "other.safetensors")
        placed = dict.fromkeys(load_file(directory / "other.safetensors"), "other.safetensors")
        text = json.dumps({"weight_map": {**placed, key: name}})
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
    "rope_scaling": (
        set_field("config.json", rope_scaling=0),
        r"rope_scaling must be null or an object; got 0",
    ),
    "yarn": (
        set_field("config.json", rope_scaling=YARN._replace(original_max_position_embeddings=1).to_json()),
        r"original_max_position_embeddings must be above 1 with 'yarn'; got 1",
    ),
    "yarn without a factor": (
        set_field("config.json", rope_scaling={"type": "yarn"}),
        r"rope_scaling\.factor must be a positive number with 'yarn'; got None",
    ),
    "frequencies of llama3": (
        set_field("config.json", rope_scaling=LLAMA3 | {"low_freq_factor": 5.0}),
        r"rope_scaling\.low_freq_factor must be at most high_freq_factor, 4\.0; got 5\.0",
    ),
    "longrope": (
        set_field("config.json", rope_scaling=LONGROPE.to_json() | {"short_factor": [1.0]}),
        r"rope_scaling\.short_factor must have 2 numbers, one a pair; got 1",
    ),
    "link to nothing": (
        lambda d: ((d / "tokenizer.json").unlink(), (d / "tokenizer.json").symlink_to("nowhere")),
        r"tokenizer\.json must be a regular file",
    ),
    "split_special_tokens": (
        set_field("tokenizer_config.json", split_special_tokens="yes"),
        r"tokenizer_config\.json: split_special_tokens must be null, true or false; got 'yes'",
    ),
    "surrogate": (
        set_field("tokenizer_config.json", bos_token="\ud800"),
        r"bos_token must be null, a string",
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
    "two lines": (index("x\ny"), r"weight_map must name files in its directory; got 'x.ny'"),
    "outside": (index("../x.safetensors"), r"weight_map must name files in its directory; got '\.\./x"),
    "long name": (index("x" * 5000), r"weight_map must name files in its directory; got 'x"),
    "no name": (index(""), r"index\.json: weight_map must name files in its directory; got ''"),
    "the directory above": (index(".."), r"index\.json: weight_map must name files in .*; got '\.\.'"),
    "a tensor's name": (
        lambda d: save_file({"a\n\x1b[2J" + "x" * 10**5: np.ones(1)}, d / "model.safetensors"),
        r"model\.safetensors: names of tensors must be at most 255 printable ASCII characters; got 'a\\\\n",
    ),
    "a key of the index": (
        index("other.safetensors", key="\x1b[2J"),
        r"index\.json: names of tensors must be at most 255 printable ASCII",
    ),
    "a post-processor": (post_processor(99), r"tokenizer\.json: post_processor .* vocab_size, 61; got 99"),
    "no unknown token": (
        lambda d: edit_vocabulary(d, "a"),
        r"tokenizer\.json is not readable by tokenizers: WordLevel error: Missing",
    ),
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


SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json")


@pytest.mark.parametrize("name", SETTINGS)
def test_large_files_are_refused_unread(name, tmp_path):
    """Parsing and quoting a value of many objects takes longer than any error is worth."""
    directory_of("phi3", tmp_path)
    file = tmp_path / name
    stated = json.loads(file.read_text())
    file.write_text(json.dumps({**stated, "rope_parameters": [{}] * LARGEST_SETTINGS}))
    begin = time.process_time()
    with pytest.raises(ModelError, match=rf"{name} must be at most {LARGEST_SETTINGS} bytes; got \d+"):
        models.load(tmp_path, progress=False)
    assert time.process_time() - begin < SECONDS


def test_large_integers_are_numbers(tmp_path):
    """An integer beyond 32 bits in the place of a number."""
    fields = {"final_logit_softcapping": 10**12, "query_pre_attn_scalar": 10**12}
    set_field("config.json", **fields)(directory_of("gemma3", tmp_path))
    require_usable(models.load(tmp_path, progress=False))


def test_damage_depends_on_the_seed_alone(sharded, tmp_path):
    """A seed does not change the values that later ones choose from."""
    values = repr(VALUES)
    for seed in range(SEEDS):
        damage(shutil.copytree(sharded["gemma3"], tmp_path / str(seed)), seed)
    assert repr(VALUES) == values


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
