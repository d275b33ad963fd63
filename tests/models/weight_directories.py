"""Directories of a tiny model whose weights a test stores in another file, and what must come back."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from entropic_jax import models
from entropic_jax.models import Config, ModelError

LLAMA = Config("LlamaForCausalLM", 61, 64, 96, 2, 4, 2, eos_token_id=(2,))


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
