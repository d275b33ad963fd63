"""Each of several processes reads only what its devices hold: numbers of a region, and the bytes read."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models import Config, sharding, weights
from entropic_jax.models.formats import file_rows

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=16,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)
CONFIGS = {
    "tied, with biases": Config("LlamaForCausalLM", **SIZES, tie_word_embeddings=True, attention_bias=True),
    "fused projections": Config("Phi3ForCausalLM", **SIZES),
    "a tensor per expert": Config("MixtralForCausalLM", **SIZES, **EXPERTS),
    "stacked experts": Config("GptOssForCausalLM", **SIZES, **EXPERTS, attention_bias=True),
}


def middle(path, shape, mesh):
    """The middle half along every divided axis, as a process would have it that has devices 1 and 2 of 4."""
    spec = tuple(sharding.partition_spec(path, len(shape)))
    spec += (None,) * (len(shape) - len(spec))
    parts = zip(shape, spec, strict=True)
    return tuple(slice(n // 4, 3 * n // 4) if axis else slice(0, n) for n, axis in parts)


@pytest.fixture
def read_by(monkeypatch):
    """Loads a directory with another `local_region`; gives each array that was read, and its region."""

    def load(directory, region, dtype):
        arrays = {}

        def place(host, path, mesh, shape, part):
            arrays[path] = np.array(host), part
            return jax.numpy.zeros(shape, host.dtype)

        with monkeypatch.context() as patch:
            patch.setattr(weights, "place", place)
            patch.setattr(weights, "local_region", region)
            models.load(directory, dtype, progress=False)
        return arrays

    return load


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_region_holds_what_the_array_holds_there(name, dtype, read_by, tmp_path):
    model = models.initialise(CONFIGS[name], 0)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jax.numpy.asarray(random.normal(size=x.shape), x.dtype), model.params)
    model = dataclasses.replace(model, params=params)  # biases are not zero
    models.save(model, tmp_path, dtype=dtype)
    everything = read_by(tmp_path, lambda path, shape, mesh: tuple(slice(0, n) for n in shape), "float32")
    halves = read_by(tmp_path, middle, "float32")
    assert halves.keys() == everything.keys()
    divided = 0
    for path, (host, region) in halves.items():
        np.testing.assert_array_equal(host, everything[path][0][region], err_msg=str(path))
        divided += host.size < everything[path][0].size
    assert divided >= 7 * CONFIGS[name].num_hidden_layers + 2 - ("fused" in name)


def test_columns_are_read_without_what_is_between_them(monkeypatch, tmp_path):
    numbers = np.arange(600 * 500, dtype=np.uint16).reshape(600, 500)
    (tmp_path / "file").write_bytes(numbers.tobytes())
    mapped = np.memmap(tmp_path / "file", np.uint16, "r").reshape(600, 500)
    reads, preadv = [], file_rows.os.preadv
    monkeypatch.setattr(
        file_rows.os, "preadv", lambda fd, buffers, at: reads.append(n := preadv(fd, buffers, at)) or n
    )
    part = mapped[100:300, 40:90]
    np.testing.assert_array_equal(file_rows.read_rows(part, tmp_path / "file"), numbers[100:300, 40:90])
    assert sum(reads) == part.nbytes
