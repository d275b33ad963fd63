"""Files of `torch.save` that are small and would take hours or gigabytes: errors of one line, at once."""

import pickle
import time
import zipfile

import pytest

from entropic_jax.models import ModelError
from entropic_jax.models.formats import torch_files
from entropic_jax.models.formats.torch_files import open_torch_file

DOUBLED = b"\x80\x02)" + b"".join(b"q\x00h\x00h\x00\x86" for _ in range(60))  # a tuple of 2^60 parts
DICT = b"\x80\x02}q\x01"
KEYS = "the keys of its dicts must be strings of at most 1000 characters"
INSTRUCTION = "it holds an instruction that no tensor needs"
PICKLES = {
    "a key of many parts": (DOUBLED + b"q\x02}h\x02K\x01s.", KEYS),
    "many such keys": (DOUBLED + b"q\x02}(h\x02K\x01h\x02K\x01u.", KEYS),
    "a dict of them": (DOUBLED + b"q\x02(h\x02K\x01d.", KEYS),
    "an ordered dict of them": (
        DOUBLED + b"q\x02ccollections\nOrderedDict\n](h\x02K\x01\x86e\x85R.",
        "takes 0 positional arguments",
    ),
    "a set of them": (DOUBLED + b"q\x02\x80\x04\x8f(h\x02\x90.", INSTRUCTION),
    "a frozen set of them": (DOUBLED + b"q\x02(h\x02\x91.", INSTRUCTION),
    "a new object": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", INSTRUCTION),
    "an object of a class": (b"(ccollections\nOrderedDict\no.", INSTRUCTION),
    "a value of many parts": (DOUBLED + b"q\x02}X\x01\x00\x00\x00ah\x02s.", "'a' is not a tensor"),
    "a storage of many parts": (DOUBLED + b"q\x02Q.", "a storage must be stated by type and key"),
    "many parts as a storage's key": (
        DOUBLED + b"q\x02(h\x02ctorch\nFloatStorage\nh\x02h\x02h\x02tQ.",
        "a storage must be stated by type and key",
    ),
    "many axes": (
        b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00(" + b"K\x01" * 65 + b"t(" + b"K\x01" * 65 + b"ttR.",
        "a tensor must be a part of a storage",
    ),
    "many arguments": (
        b"ctorch._utils\n_rebuild_parameter\n(" + b"N" * 17 + b"tR.",
        "a call must have at most 16 arguments",
    ),
    "a call of a number": (b"K\x01)R.", "it calls a function that does not build a tensor"),
    "a long name": (b"}X\xe9\x03\x00\x00" + b"a" * 1001 + b"K\x01s.", KEYS),
    "items of a list": (b"]X\x01\x00\x00\x00aK\x01s.", KEYS),
}


def write(path, **entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in entries.items():
            file.writestr(f"archive/{name.replace('_', '.')}", data)
    return path


@pytest.mark.parametrize("name", PICKLES)
def test_small_pickles_that_grow_are_refused(name, tmp_path):
    data, expected = PICKLES[name]
    begin = time.monotonic()
    with pytest.raises(ModelError) as raised:
        open_torch_file(write(tmp_path / "x.bin", data_pkl=data))
    assert expected in str(raised.value).replace('"', "'") and time.monotonic() - begin < 1
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_each_protocol_is_read(protocol, tmp_path):
    torch = pytest.importorskip("torch")
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.nn.Parameter(torch.ones(1))}
    torch.save(tensors, tmp_path / "x.bin", pickle_protocol=protocol)
    read = open_torch_file(tmp_path / "x.bin")
    assert read["a"][...].tolist() == [[0, 1, 2], [3, 4, 5]] and read["b"].shape == (1,)


def test_a_module_s_state_is_read(tmp_path):
    """It has attributes: the versions of its parts."""
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 1)).state_dict(), tmp_path / "x.bin")
    assert open_torch_file(tmp_path / "x.bin")["0.weight"].shape == (1, 2)


def test_of_the_byte_order_only_its_first_bytes_are_read(tmp_path, monkeypatch):
    """An entry of gigabytes of zeros takes a few kilobytes on disk."""
    path = write(tmp_path / "x.bin", byteorder=b"little" + bytes(10**7), data_pkl=b"}.")
    sizes, read = [], zipfile.ZipExtFile.read

    def counted(self, *size):
        data = read(self, *size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(zipfile.ZipExtFile, "read", counted)
    with pytest.raises(ModelError, match="its byte order must be little"):
        open_torch_file(path)
    assert max(sizes) <= 8


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_without_bounds_is_refused(compression, tmp_path):
    """`zipfile` unpacks these in full, whatever number of bytes it is asked for."""
    with zipfile.ZipFile(tmp_path / "x.bin", "w", compression) as file:
        file.writestr("archive/data.pkl", b"}.")
    with pytest.raises(ModelError, match=r"'archive/data\.pkl' must be stored or deflated"):
        open_torch_file(tmp_path / "x.bin")


def test_a_long_list_of_storages_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_files, "LARGEST_READ", 100_000)
    path = write(tmp_path / "x.bin", **{f"data/{i}": b"" for i in range(2000)}, data_pkl=b"}.")
    with pytest.raises(ModelError, match="the list of its storages must be at most 100000 bytes"):
        open_torch_file(path)
