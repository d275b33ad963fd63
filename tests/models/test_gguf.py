"""GGUF files: blocks of every type, the order of queries and keys, configuration, tokenizers, damage."""

import contextlib
import json
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from entropic_jax import models
from entropic_jax.models import Config, ModelError
from entropic_jax.models.formats import gguf_config
from entropic_jax.models.formats.ggml_blocks import BLOCK_TYPES
from entropic_jax.models.gguf_tokenizer import sentencepiece
from tests.models.weight_directories import LLAMA, in_pairs, refusal, renamed, require_same, take

K_BLOCKS = Config("LlamaForCausalLM", 40, 256, 512, 1, 4, 2, 64, rms_norm_eps=1e-5, tie_word_embeddings=True)
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "down", "up")},
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture
def directory(tmp_path):
    models.save(models.initialise(LLAMA, seed=0), tmp_path)
    return tmp_path


KINDS = {str: (8, ""), float: (6, "<f"), int: (4, "<I"), bool: (7, "?")}


def write_gguf(path, tensors, metadata, kinds):
    """A GGUF file, version 3; `kinds` are (number, bytes) by name."""
    text = lambda s: struct.pack("<Q", len(s.encode())) + s.encode()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key)
        if isinstance(value, list):
            head += struct.pack("<IIQ", 9, KINDS[type(value[0])][0], len(value))
        else:
            head += struct.pack("<I", KINDS[type(value)][0])
        for entry in value if isinstance(value, list) else [value]:
            head += text(entry) if isinstance(entry, str) else struct.pack(KINDS[type(entry)][1], entry)
    offset, data = 0, b""
    for name, x in tensors.items():
        kind, stored = kinds[name]
        head += text(name) + struct.pack(f"<I{x.ndim}Q", x.ndim, *reversed(x.shape))
        head += struct.pack("<IQ", kind, offset)
        data += stored + b"\0" * (-len(stored) % 32)
        offset = len(data)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def q8_0(row):
    """Bytes and values of one row in blocks of 32 numbers."""
    stored, values = b"", []
    for block in row.reshape(-1, 32):
        d = np.float16(np.abs(block).max() / 127)
        q = np.round(block / np.float32(d)).clip(-127, 127).astype(np.int8)
        stored += d.tobytes() + q.tobytes()
        values += [float(d) * int(x) for x in q]
    return stored, values


def q4_0(row):
    stored, values = b"", []
    for block in row.reshape(-1, 32):
        d = np.float16(np.abs(block).max() / 7)
        q = np.round(block / np.float32(d)).clip(-8, 7).astype(int) + 8
        stored += d.tobytes() + bytes(int(q[i]) | int(q[i + 16]) << 4 for i in range(16))
        values += [float(d) * (int(x) - 8) for x in q]
    return stored, values


def random_block(rng, size, halves):
    block = bytearray(rng.integers(0, 256, size, dtype=np.uint8).tobytes())
    for place in halves:
        block[place : place + 2] = np.float16(rng.uniform(1e-4, 3e-4)).tobytes()
    return bytes(block)


def half(block, place):
    return float(np.frombuffer(block[place : place + 2], np.float16)[0])


def q4_k(row, rng):
    """Random blocks of 256 numbers, and their values by the loops of the layout."""
    stored, values = b"", []
    for _ in range(len(row) // 256):
        block = random_block(rng, 144, (0, 2))
        scales, qs = block[4:16], block[16:]
        for sub in range(8):
            if sub < 4:
                scale, least = scales[sub] & 63, scales[sub + 4] & 63
            else:
                scale = (scales[sub + 4] & 15) | (scales[sub - 4] >> 6) << 4
                least = scales[sub + 4] >> 4 | (scales[sub] >> 6) << 4
            for i in range(32):
                q = qs[sub // 2 * 32 + i] >> 4 * (sub % 2) & 15
                values.append(half(block, 0) * scale * q - half(block, 2) * least)
        stored += block
    return stored, values


def q6_k(row, rng):
    stored, values = b"", []
    for _ in range(len(row) // 256):
        block = random_block(rng, 210, (208,))
        scales = np.frombuffer(block[192:208], np.int8)
        for i in range(256):
            part, inner = divmod(i, 128)
            quarter, place = divmod(inner, 32)
            low = block[64 * part + place + 32 * (quarter % 2)] >> 4 * (quarter // 2) & 15
            high = block[128 + 32 * part + place] >> 2 * quarter & 3
            values.append(half(block, 208) * int(scales[i // 16]) * ((low | high << 4) - 32))
        stored += block
    return stored, values


def encode(tensors, kind, writer):
    """Every matrix in blocks of one kind; vectors in float32. Returns bytes and values by name."""
    stored, dense = {}, {}
    for name, x in tensors.items():
        rows = [writer(row) for row in x] if x.ndim == 2 else []
        stored[name] = (kind, b"".join(data for data, _ in rows)) if rows else (0, x.tobytes())
        dense[name] = np.array([values for _, values in rows], np.float32) if rows else x
    return stored, dense


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_gguf(name, tmp_path):
    """With config.json and, for blocks of 256 numbers, without it."""
    rng, config = np.random.default_rng(0), LLAMA if name.endswith("_0") else K_BLOCKS
    models.save(models.initialise(config, seed=0), tmp_path)
    tensors = take(tmp_path)
    writer = {"Q8_0": q8_0, "Q4_0": q4_0}.get(name) or (
        lambda row: {"Q4_K": q4_k, "Q6_K": q6_k}[name](row, rng)
    )
    kind = next(number for number, block in BLOCK_TYPES.items() if block.name == name)
    # What is stored is in the order of pairs; what is expected is put back by the inverse permutation.
    paired = in_pairs(tensors, config)
    stored, values = encode(paired, kind, writer)
    places = in_pairs(
        {n: np.arange(x.size).reshape(x.shape) for n, x in tensors.items() if x.ndim == 2}, config
    )
    expected = dict(values)
    for tensor, place in places.items():
        expected[tensor] = np.empty_like(values[tensor])
        expected[tensor].reshape(-1)[place.reshape(-1)] = values[tensor].reshape(-1)
    names = renamed(paired, GGUF_NAMES)
    kinds = dict(zip(names, stored.values(), strict=True))
    metadata = {
        "general.architecture": "llama",
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if config is K_BLOCKS:
        (tmp_path / "config.json").unlink()
        metadata |= {
            "llama.embedding_length": 256,
            "llama.feed_forward_length": 512,
            "llama.block_count": 1,
            "llama.attention.head_count": 4,
            "llama.attention.head_count_kv": 2,
            "llama.context_length": 4096,
        }
    write_gguf(tmp_path / "model.gguf", names, metadata, kinds)
    require_same(tmp_path, expected, atol=1e-6)


def test_a_part_of_a_head_that_is_rotated_is_refused(directory):
    (directory / "config.json").unlink()
    tensors = renamed(in_pairs(take(directory), LLAMA), GGUF_NAMES)
    sizes = {"embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "context_length": 64}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    metadata = {f"llama.{name}": value for name, value in sizes.items()}
    metadata |= {"general.architecture": "llama", "llama.attention.layer_norm_rms_epsilon": 1e-6}
    kinds = {n: (0, x.tobytes()) for n, x in tensors.items()}
    write_gguf(directory / "model.gguf", tensors, {**metadata, "llama.rope.dimension_count": 8}, kinds)
    assert "partial_rotary_factor must be 1; got 0.5" in refusal(directory)
    write_gguf(directory / "model.gguf", tensors, {**metadata, "llama.rope.dimension_count": 16}, kinds)
    assert models.load(directory, progress=False).config.rotary_dim == 16


def test_damaged_gguf(directory):
    tensors = renamed(in_pairs(take(directory), LLAMA), GGUF_NAMES)
    file, kinds = directory / "model.gguf", {n: (0, x.tobytes()) for n, x in tensors.items()}
    write_gguf(file, tensors, {"general.architecture": "mamba"}, kinds)
    assert "general.architecture must be llama for LlamaForCausalLM; got 'mamba'" in refusal(directory)
    write_gguf(file, tensors, {"general.architecture": "llama"}, kinds)
    data = file.read_bytes()
    file.write_bytes(data[:-999])
    assert "rows of" in refusal(directory) and "must have" in refusal(directory)
    file.write_bytes(data[:99])
    assert "it ends within its metadata" in refusal(directory)
    write_gguf(file, tensors, {}, {n: (16, x.tobytes()) for n, x in tensors.items()})
    assert "must be of type F32, F16, Q4_0" in refusal(directory)
    file.write_bytes(b"GGML" + data[4:])
    assert "its version must be 2 or 3" in refusal(directory)
    rng = np.random.default_rng(0)
    for _ in range(30):
        damaged = bytearray(data)
        damaged[int(rng.integers(0, 600))] = int(rng.integers(0, 256))
        file.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            models.load(directory, progress=False)


TEXT = "The cats' 1234 mats sat\n\n  on naïve ÅÄ mats, we'll see: 多"


def gguf_of_tokenizer(directory, tokens, types, **fields):
    """A model of the vocabulary's size with the tokenizer in its GGUF file; returns the tokenizer."""
    config = Config("LlamaForCausalLM", len(tokens), 64, 96, 1, 4, 2)
    models.save(models.initialise(config, seed=0), directory)
    tensors = renamed(in_pairs(take(directory), config), GGUF_NAMES)
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": tokens}
    metadata |= {"tokenizer.ggml.token_type": types, **{f"tokenizer.ggml.{n}": x for n, x in fields.items()}}
    kinds = {n: (0, x.tobytes()) for n, x in tensors.items()}
    write_gguf(directory / "model.gguf", tensors, metadata, kinds)
    return models.load(directory, progress=False).tokenizer


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_byte_level_tokenizer_of_gguf(pre, tmp_path):
    """Equals the tokenizer that it was written from."""
    backend = tokenizers.Tokenizer(BPE(ignore_merges=pre == "llama-bpe"))
    backend.normalizer = normalizers.NFC()
    numbers = r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}"
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    )
    split = pre_tokenizers.Split(Regex(words + r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    described = json.loads(backend.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].get)
    merges = [" ".join(merge) for merge in described["merges"]]
    actual = gguf_of_tokenizer(
        *(tmp_path, tokens, [3, 3] + [1] * (len(tokens) - 2)),
        model="gpt2",
        pre=pre,
        merges=merges,
        bos_token_id=0,
        eos_token_id=1,
        **({} if pre == "llama-bpe" else {"add_bos_token": True}),  # which Llama 3 does without
    )
    assert actual.encode(TEXT) == [0, *backend.encode(TEXT, add_special_tokens=False).ids]
    assert actual.encode("</s>", special=False) == [1]
    assert actual.decode(actual.encode(TEXT)) == TEXT
    assert (actual.bos_token, actual.eos_token) == ("<s>", "</s>")


def test_sentencepiece_tokenizer_of_gguf(tmp_path):
    """Merges go by score, the best pair first; bytes stand for the rest."""
    pieces = {"▁": -20.0, "a": -21.0, "b": -22.0, "c": -23.0, "bc": -1.0, "ab": -2.0, "▁a": -3.0, "abc": -4.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    actual = gguf_of_tokenizer(
        *(tmp_path, tokens, [2, 3, 3] + [6] * 256 + [1] * len(pieces)),
        model="llama",
        scores=[0.0] * 259 + list(pieces.values()),
        bos_token_id=1,
        eos_token_id=2,
    )
    names = lambda text: [tokens[i] for i in actual.encode(text)]
    assert names("abc") == ["<s>", "▁a", "bc"]  # "bc" is better than "ab", and "▁a" than "abc"
    assert names("b ab") == ["<s>", "▁", "b", "▁", "ab"]
    assert names("é")[2:] == ["<0xC3>", "<0xA9>"]
    assert actual.decode(actual.encode("abc é ab")) == "abc é ab"


def test_tokenizers_of_gguf_that_are_not_understood(tmp_path):
    fields = {"model": "gpt2", "pre": "qwen2", "merges": ["a b"]}
    for changes, expected in (
        ({"model": "bert"}, "tokenizer.ggml.model must be gpt2 or llama, or tokenizer.json must stand next"),
        ({"pre": "olmo"}, "tokenizer.ggml.pre must be llama-bpe, .*, or tokenizer.json must stand next"),
        ({"merges": ["a b c"]}, "tokens and merges must fit together"),
        ({"merges": ["x y"]}, "tokens and merges must fit together"),
        ({"bos_token_id": 9}, "bos_token_id must be from 0 to 3; got 9"),
    ):
        with pytest.raises(ModelError, match=expected) as raised:
            gguf_of_tokenizer(tmp_path, ["a", "b", "ab", "<s>"], [1, 1, 1, 3], **(fields | changes))
        assert "\n" not in str(raised.value)


def test_long_tokens_of_sentencepiece_are_refused(tmp_path):
    """Each place of a token is looked at, and what stands before and behind it copied."""
    begin = time.monotonic()
    for tokens in (["a", "b" * 10**6], [str(i).zfill(500) for i in range(17_000)]):
        with pytest.raises(ModelError, match="tokens must have at most 512 characters each and 8000000 tog"):
            sentencepiece(tmp_path, {"tokenizer.ggml.scores": [0.0] * len(tokens)}, tokens)
    assert time.monotonic() - begin < 1


def test_names_of_tensors_of_gguf_are_text(directory):
    take(directory)
    write_gguf(
        directory / "model.gguf", {"a\x1b[2J": np.ones(4, np.float32)}, {}, {"a\x1b[2J": (0, bytes(16))}
    )
    assert r"names of tensors must be at most 255 printable ASCII characters" in refusal(directory)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, None),
    ],
)
def test_a_scaling_without_a_type_is_linear(values, expected):
    stated = {f"llama.{name}": value for name, value in values.items()}
    assert gguf_config.rope_scaling(Path("model.gguf"), stated, "llama") == expected
