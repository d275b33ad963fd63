"""`entropic convert`: the other commands take what it writes, and wrong use is one line."""

import json
import os
from pathlib import Path

import pytest

from entropic_jax.serving.options.model import computing_dtype, converted_dtype

PROMPT = (
    "--prompt",
    "def f(x):",
    "--max-tokens",
    "12",
    "--ignore-eos",
    "--temperature",
    "0",
    "--preset",
    "off",
)


@pytest.fixture
def converted(entropic, directory, tmp_path):
    """The directory of a model in bfloat16."""
    status, out, err = entropic(
        "convert", "--model", directory, "--output", str(tmp_path / "converted"), "--dtype", "bfloat16"
    )
    assert (status, out) == (0, ""), err
    return str(tmp_path / "converted")


@pytest.mark.slow
def test_a_converted_model_generates_the_same_text(entropic, directory, converted):
    expected = entropic("generate", "--model", directory, "--dtype", "bfloat16", *PROMPT)
    assert expected[0] == 0 and len(expected[1]) > 5, expected[2]
    for stated in ((), ("--dtype", "bfloat16")):  # the dtype is that of the checkpoint
        assert entropic("generate", "--model", converted, *stated, *PROMPT)[:2] == expected[:2]


def test_another_dtype_is_one_line(entropic, converted):
    status, _, err = entropic("generate", "--model", converted, "--dtype", "float32", *PROMPT)
    assert status == 2 and err.count("\n") == 1
    assert f"dtype must be bfloat16, which {converted} was converted to; got float32" in err


def test_the_dtype_of_a_checkpoint_is_the_default(converted, directory, tmp_path):
    assert computing_dtype(None, converted) == computing_dtype("auto", converted) == "bfloat16"
    assert computing_dtype("float16", converted) == "float16"
    assert converted_dtype(directory) is converted_dtype(None) is None
    file = tmp_path / "converted.json"
    for content in ("", "[]", '{"dtype": "auto"}', '{"dtype": 3}', "[" * 10**5):
        file.write_text(content)
        assert converted_dtype(tmp_path) is None
    file.unlink()
    os.mkfifo(file)
    assert converted_dtype(tmp_path) is None


def test_a_converted_model_is_described(entropic, directory, converted):
    describe = lambda path: dict(line.split(maxsplit=1) for line in entropic("models", path)[1].splitlines())
    original, described = describe(directory), describe(converted)
    assert described["parameters"] == original["parameters"]
    assert described["weights"].startswith("bfloat16 and float32, ")
    assert "converted" in described and "bfloat16" in described["converted"]
    raw = json.loads(Path(converted, "converted.json").read_text())
    assert raw["version"] == 1 and raw["dtype"] == "bfloat16" and raw["quantization"] is None


def test_wrong_use_is_one_line(entropic, directory, converted, tmp_path):
    cases = {
        f"error: --output must be a missing or empty directory; got {converted}": (directory, converted),
        "error: --output must be a directory that can be written to; got /proc/x": (directory, "/proc/x"),
        "path must be a model that is not converted": (converted, str(tmp_path / "again")),
        "must be a directory": (str(tmp_path / "nowhere"), str(tmp_path / "again")),
    }
    for message, (model, output) in cases.items():
        status, out, err = entropic("convert", "--model", model, "--output", output)
        assert status == 2 and message in err and err.count("\n") == 1, err
    arguments = ("convert", "--model", directory, "--output", str(tmp_path / "again"), "-tp", "9999")
    status, _, err = entropic(*arguments)
    assert status == 2 and "--tensor-parallel-size must be" in err and err.count("\n") == 1
