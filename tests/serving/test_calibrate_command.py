"""`entropic calibrate` on a model with random weights."""

import json
import shutil
from pathlib import Path

import pytest

from entropic_jax.calibration import load_calibration

pytestmark = pytest.mark.slow

TEXT = "def f(x):\n    return x + 1\n" * 10


@pytest.fixture
def model(directory, tmp_path) -> Path:
    """A copy, as the command writes into it."""
    return Path(shutil.copytree(directory, tmp_path / "model"))


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text").write_text(TEXT)
    return str(tmp_path / "text")


def test_the_calibration_lies_in_the_model(entropic, model, text, tmp_path):
    """The 270 tokens of a file are split, because the model's context is 128."""
    status, out, err = entropic("calibrate", "--model", str(model), "--text", text, text)
    assert (status, err) == (0, "")
    record = load_calibration(model)
    assert record.tokens == 2 * len(TEXT)
    assert record.calibrated_loss < record.loss
    assert 0 < record.temperature <= 16
    assert f"{record.temperature:.3f}" in out and f"{record.loss:.4f} → {record.calibrated_loss:.4f}" in out
    assert f"stored in {model / 'calibration.json'}" in out
    assert json.loads((model / "calibration.json").read_text())["version"] == 2

    elsewhere = tmp_path / "elsewhere.json"
    limit = ("--tokens", "100", "--out", str(elsewhere))
    assert entropic("calibrate", "--model", str(model), "--text", text, *limit)[0] == 0
    assert load_calibration(elsewhere).tokens == 100
    assert load_calibration(model) == record


@pytest.mark.parametrize("reason", ["Read-only file system", "Permission denied"])
def test_a_directory_that_cannot_be_written_is_named_before_the_work(
    entropic, model, text, monkeypatch, reason
):
    def refuse(**_):
        raise OSError(30, reason)

    monkeypatch.setattr("entropic_jax.serving.commands.text_input.tempfile.NamedTemporaryFile", refuse)
    monkeypatch.setattr("entropic_jax.serving.commands.model_options.load_model", None)
    status, _, err = entropic("calibrate", "--model", str(model), "--text", text)
    assert status == 2
    assert f"--out must be a file in a writable directory; got {model / 'calibration.json'} ({reason})" in err
    assert err.count("\n") == 1


def test_what_is_wrong_is_said(entropic, model, text, tmp_path):
    (tmp_path / "short").write_text("abc")
    for arguments, said in (
        (("--text", str(tmp_path / "none")), "--text must be a readable file; got"),
        (("--text", str(tmp_path / "short")), "--text: sequences must have at least 64 tokens to predict"),
        (("--text", text, "--tokens", "0"), "must be an integer between 1 and 2147483647; got 0"),
        (
            ("--text", text, "--out", str(tmp_path)),
            f"--out must be a file in a writable directory; got {tmp_path} (it is a directory)",
        ),
        (("--text", text, "--out", str(tmp_path / "a" / "b")), "writable directory; got"),
        (
            ("--text", text, "--model", str(tmp_path / "none")),
            "--model must be a directory with a model; got",
        ),
        (("--text", text, "--model", str(tmp_path)), "config.json is missing"),
        ((), "the following arguments are required: --text"),
    ):
        status, _, err = entropic("calibrate", "--model", str(model), *arguments)
        assert status == 2, said
        assert said in err and err.count("\n") == 1
    assert not (model / "calibration.json").exists()
