"""Files of weights: `pytorch_model.bin`, variants, names without a prefix, Mistral's file, GGUF."""

import contextlib
import json
import pickle
import shutil
import struct
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from entropic_jax import models
from entropic_jax.models import Config, ModelError
from entropic_jax.models.formats.ggml_blocks import BLOCK_TYPES

LLAMA = Config("LlamaForCausalLM", 61, 64, 96, 2, 4, 2, eos_token_id=(2,))
Q = "model.layers.0.self_attn.q_proj.weight"
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
MISTRAL_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    **{f"{x}_proj.": f"w{x}." for x in "qkvo"},
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture
def directory(tmp_path):
    models.save(models.initialise(LLAMA, seed=0), tmp_path)
    return tmp_path


def take(directory):
    """The tensors of a directory, which has no file of weights afterwards."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    return tensors


def require_same(directory, expected, atol=0.0):
    models.save(models.load(directory, progress=False), directory / "dense", dtype="float32")
    actual = load_file(directory / "dense" / "model.safetensors")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(actual[name], tensor, rtol=0, atol=atol, err_msg=name)


def refusal(directory):
    with pytest.raises(ModelError) as raised:
        models.load(directory, progress=False)
    assert "\n" not in str(raised.value) and str(directory) in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("shards", [1, 2])
def test_pytorch_model_bin(directory, shards):
    torch = pytest.importorskip("torch")
    tensors = take(directory)
    state = {name: torch.tensor(x) for name, x in tensors.items()}
    state[Q] = state[Q].t().contiguous().t()  # stored by columns
    state["model.norm.weight"] = torch.nn.Parameter(state["model.norm.weight"])
    parts = [dict(list(state.items())[i::shards]) for i in range(shards)]
    files = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{i}.bin" for i in range(shards)]
    for part, file in zip(parts, files, strict=True):
        torch.save(part, directory / file)
    if shards > 1:
        placed = {name: file for part, file in zip(parts, files, strict=True) for name in part}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    require_same(directory, tensors)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def archive(data):
    def write(path):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", data)

    return write


TORCH_FILES = {
    "a call": (archive(pickle.dumps(Call(print, "x"))), r"it names 'builtins.print', which no tensor needs"),
    "a module": (archive(pickle.dumps(Call(shutil.rmtree, "/tmp/x"))), r"it names 'shutil.rmtree'"),
    "a number": (archive(pickle.dumps({"a": 1})), r"'a' is no tensor"),
    "an object": (archive(b"cbuiltins\nobject\n."), r"it names 'builtins.object'"),
    "attributes": (archive(b"ccollections\nOrderedDict\n}b."), r"only a dict may have attributes"),
    "half a pickle": (archive(b"(dp0\nV"), r"it cannot be read"),
    "a place far away": (archive(b"(dr\xff\xff\xff\x7f."), r"it holds no dict"),
    "an old file": (lambda path: path.write_bytes(pickle.dumps(1)), r"File is not a zip file"),
}


@pytest.mark.parametrize("name", TORCH_FILES)
def test_pickles_that_hold_more_than_tensors_are_refused(name, directory):
    take(directory)
    write, expected = TORCH_FILES[name]
    write(directory / "pytorch_model.bin")
    assert expected in refusal(directory).replace('"', "'")


def test_a_tensor_does_not_end_behind_its_storage(directory):
    torch = pytest.importorskip("torch")
    take(directory)
    torch.save({"a": torch.ones(4)}, directory / "x.bin")
    with (
        zipfile.ZipFile(directory / "x.bin") as source,
        zipfile.ZipFile(directory / "pytorch_model.bin", "w") as target,
    ):
        for entry in source.infolist():
            data = source.read(entry)
            target.writestr(entry.filename, data[:8] if "/data/" in entry.filename else data)
    assert "a tensor ends behind its storage" in refusal(directory)


def test_a_variant(directory):
    tensors = take(directory)
    save_file(tensors, directory / "model.fp16.safetensors")
    require_same(directory, tensors)
    save_file(tensors, directory / "model.bf16.safetensors")
    assert "must hold one variant of model.safetensors; got bf16, fp16" in refusal(directory)


def test_names_without_prefix(directory):
    tensors = take(directory)
    save_file({n.removeprefix("model."): x for n, x in tensors.items()}, directory / "model.safetensors")
    require_same(directory, tensors)


def in_pairs(tensors, config):
    """Queries and keys with the rows of a head in the order 0, d/2, 1, d/2 + 1, …"""
    result = dict(tensors)
    for name, x in tensors.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in name:
                result[name] = x.reshape(count, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
    return result


def renamed(tensors, names):
    result = {}
    for name, x in tensors.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        result[name] = np.ascontiguousarray(x)
    return result


def test_consolidated(directory):
    tensors = take(directory)
    stored = renamed(in_pairs(tensors, LLAMA), MISTRAL_NAMES)
    assert "layers.0.attention.wq.weight" in stored and "norm.weight" in stored
    save_file(stored, directory / "consolidated.safetensors")
    require_same(directory, tensors)


def write_gguf(path, tensors, metadata, kinds):
    """A GGUF file, version 3; `kinds` are (number, bytes) by name."""
    text = lambda s: struct.pack("<Q", len(s.encode())) + s.encode()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, code = {str: (8, ""), float: (6, "f"), int: (4, "I")}[type(value)]
        data = struct.pack(f"<{code}", value) if code else text(value)
        head += text(key) + struct.pack("<I", kind) + data
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
    write_gguf(file, tensors, {}, {n: (10, x.tobytes()) for n, x in tensors.items()})
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
