"""Checkpoints of 8-bit integers: those that keep them, and zero points."""

import json

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models import ModelError
from tests.models import format_writers as write
from tests.models.test_formats import CHANNELS, FORMATS, MATRICES, groups, plain, quantise, read, tensors_of

__all__ = ["plain"]  # a fixture


@pytest.mark.parametrize("name", ["int8", "8 bits of bitsandbytes"])
def test_int8_stays_int8(name, plain, tmp_path):
    """With quantization="int8", matrices keep the integers and scales of the file."""
    dense = quantise(plain, tmp_path, name)
    stored = read(tmp_path / "model.safetensors")
    model = models.load(tmp_path, progress=False, quantization="int8")
    for stem in MATRICES:
        part = model.params["layers"][0][stem.split(".")[3]][stem.split(".")[4]]
        assert part["kernel"].dtype == np.int8
        np.testing.assert_array_equal(part["kernel"].T, stored[f"{stem}.weight"])
        wide = np.asarray(part["kernel"], np.float32) * np.asarray(part["scale"])
        np.testing.assert_allclose(wide.T, dense[f"{stem}.weight"], rtol=1e-5, atol=1e-6)
    assert model.params["lm_head"]["kernel"].dtype == np.int8  # not quantised on disk


def test_each_matrix_has_the_scheme_that_its_zero_points_ask_for(plain, tmp_path, monkeypatch):
    """A symmetric scheme that comes first does not take matrices that have zero points."""
    mixed = lambda stem, w: write.int8_rows(stem, w, symmetric="mlp" not in stem)
    schemes = groups(CHANNELS, {**CHANNELS, "symmetric": False})
    monkeypatch.setitem(FORMATS, "mixed", (schemes, mixed))
    dense = quantise(plain, tmp_path, "mixed")
    actual = tensors_of(models.load(tmp_path, progress=False), tmp_path / "dense")
    for tensor, expected in dense.items():
        np.testing.assert_allclose(actual[tensor], expected, rtol=1e-5, atol=1e-6, err_msg=tensor)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, "quantization_config": groups(CHANNELS)}))
    with pytest.raises(ModelError, match=r"zero_point must be absent or 0 where weights\.symmetric is true"):
        models.load(tmp_path, progress=False)
