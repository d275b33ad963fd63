"""Files of weights: `pytorch_model.bin`, variants, names without a prefix, Mistral's file."""

import json
import pickle
import shutil
import zipfile

import pytest
from safetensors.numpy import save_file

from entropic_jax import models
from entropic_jax.models.formats.safetensors_files import LARGEST_HEADER
from tests.models.weight_directories import LLAMA, in_pairs, refusal, renamed, require_same, take

Q = "model.layers.0.self_attn.q_proj.weight"
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


def save_shards(directory, state, files, index):
    """Writes tensors to several files of torch in turn, with an index if there is more than one."""
    import torch

    parts = [dict(list(state.items())[i :: len(files)]) for i in range(len(files))]
    for part, file in zip(parts, files, strict=True):
        torch.save(part, directory / file)
    if len(files) > 1:
        placed = {name: file for part, file in zip(parts, files, strict=True) for name in part}
        (directory / index).write_text(json.dumps({"weight_map": placed}))


@pytest.mark.parametrize("shards", [1, 2])
def test_pytorch_model_bin(directory, shards):
    torch = pytest.importorskip("torch")
    tensors = take(directory)
    state = {name: torch.tensor(x) for name, x in tensors.items()}
    state[Q] = state[Q].t().contiguous().t()  # stored by columns
    state["model.norm.weight"] = torch.nn.Parameter(state["model.norm.weight"])
    files = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{i}.bin" for i in range(shards)]
    save_shards(directory, state, files, "pytorch_model.bin.index.json")
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
    "a number": (archive(pickle.dumps({"a": 1})), r"'a' is not a tensor"),
    "an object": (archive(b"cbuiltins\nobject\n."), r"it names 'builtins.object'"),
    "attributes": (archive(b"ccollections\nOrderedDict\n}b."), r"only a dict may have attributes"),
    "half a pickle": (archive(b"(dp0\nV"), r"it cannot be read"),
    "a place far away": (archive(b"(dr\xff\xff\xff\x7f."), r"it does not hold a dict"),
    "an array of bytes": (
        archive(b"\x96" + (2**33).to_bytes(8, "little") + b"."),
        r"it holds an array of bytes",
    ),
    "a deep nest": (archive(b"(" * 1000 + b"."), r"it is nested more than 100 deep"),
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


def test_a_tensor_is_not_larger_than_its_storage(directory):
    """Strides of 0 would let a file of any size claim the memory of a large one."""
    torch = pytest.importorskip("torch")
    take(directory)
    torch.save({"a": torch.ones(1).expand(1000)}, directory / "pytorch_model.bin")
    assert "a tensor is larger than its storage" in refusal(directory)


def test_a_variant(directory):
    tensors = take(directory)
    save_file(tensors, directory / "model.fp16.safetensors")
    require_same(directory, tensors)
    save_file(tensors, directory / "model.bf16.safetensors")
    assert "must hold one variant of model.safetensors; got bf16, fp16" in refusal(directory)


def test_shards_of_a_variant(directory):
    """As transformers 5 names them."""
    tensors, weight_map = take(directory), {}
    for number, name in enumerate(tensors):
        file = f"model.fp16-{number + 1:05}-of-{len(tensors):05}.safetensors"
        save_file({name: tensors[name]}, directory / file)
        weight_map[name] = file
    (directory / "model.safetensors.index.fp16.json").write_text(json.dumps({"weight_map": weight_map}))
    require_same(directory, tensors)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_variant_of_torch(directory, shards):
    torch = pytest.importorskip("torch")
    tensors = take(directory)
    state = {name: torch.tensor(x) for name, x in tensors.items()}
    ending = lambda i: "" if shards == 1 else f"-{i + 1:05}-of-{shards:05}"
    files = [f"pytorch_model.fp16{ending(i)}.bin" for i in range(shards)]
    save_shards(directory, state, files, "pytorch_model.bin.index.fp16.json")
    require_same(directory, tensors)


def test_names_without_prefix(directory):
    tensors = take(directory)
    save_file({n.removeprefix("model."): x for n, x in tensors.items()}, directory / "model.safetensors")
    require_same(directory, tensors)


def test_consolidated(directory):
    tensors = take(directory)
    stored = renamed(in_pairs(tensors, LLAMA), MISTRAL_NAMES)
    assert "layers.0.attention.wq.weight" in stored and "norm.weight" in stored
    save_file(stored, directory / "consolidated.safetensors")
    require_same(directory, tensors)


def test_consolidated_shards(directory):
    tensors, placed = take(directory), {}
    stored = renamed(in_pairs(tensors, LLAMA), MISTRAL_NAMES)
    for number in range(2):
        file, part = (
            f"consolidated-{number + 1:05}-of-00002.safetensors",
            dict(list(stored.items())[number::2]),
        )
        save_file(part, directory / file)
        placed |= dict.fromkeys(part, file)
    (directory / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    require_same(directory, tensors)


def test_long_headers_are_refused_unread(directory):
    take(directory)
    header = json.dumps({"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    header += " " * (LARGEST_HEADER + 1 - len(header))
    data = len(header).to_bytes(8, "little") + header.encode()
    (directory / "model.safetensors").write_bytes(data + bytes(1))
    assert f"its header must be at most {LARGEST_HEADER} bytes" in refusal(directory)
