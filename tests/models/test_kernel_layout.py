"""Matrices that lie block by block: which do, and that results are those of others to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime, models
from entropic_jax.models import ModelError
from entropic_jax.models.kernel_layout import block_kernels
from entropic_jax.models.model import in_blocks, quantised
from entropic_jax.pallas import skinny_matmul
from tests import tiny
from tests.marks import exhaustive

ON_CPU = pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")
SIZES = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def loaded(quantization: str | None = None, **changes) -> tuple[models.Model, models.Model]:
    """A model, and the same in blocks."""

    def model() -> models.Model:
        plain = models.initialise(tiny.model(vocab_size=192, **{**SIZES, **changes}).config, 3)
        return plain if quantization is None else quantised(plain, quantization)

    return model(), in_blocks(model())


def dimensions(model: models.Model) -> dict[str, int]:
    """The number of dimensions of each matrix of the last layer, and of the output projection."""
    layer = model.params["layers"][-1]
    parts = {**layer["self_attn"], **layer["mlp"], "lm_head": model.params["lm_head"]}
    return {name: part["kernel"].ndim for name, part in parts.items() if "kernel" in part}


@ON_CPU
def test_all_matrices_of_a_layer_or_none():
    assert set(dimensions(loaded()[1]).values()) == {3}
    assert set(dimensions(loaded()[0]).values()) == {2}
    narrow = dimensions(loaded(num_key_value_heads=1)[1])  # keys and values of 32 columns
    assert {name for name, number in narrow.items() if number == 2} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    packed = dimensions(loaded("int4")[1])
    assert {name for name, number in packed.items() if number == 3} == {"lm_head"}
    params = {
        "experts": {"up_proj": {"kernel": jnp.ones((4, 64, 128))}},
        "kv_b_proj": {"kernel": jnp.ones((64, 64))},
    }
    block_kernels(params)
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes["experts"]["up_proj"]["kernel"] == (4, 2, 64, 64)
    assert shapes["kv_b_proj"]["kernel"] == (64, 64)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8", "int4", *exhaustive("fp8")])
@pytest.mark.parametrize("tokens", [3, *exhaustive(1, 70)])
def test_logits_are_the_same_to_the_bit(quantization, tokens):
    plain, blocked = loaded(quantization)
    hidden = jax.random.normal(jax.random.key(tokens), (tokens, 64))
    attend = lambda query, key, value, cache, **_: (query, cache)
    results = []
    for model in (plain, blocked):
        ids, positions = jnp.arange(tokens)[None] % 192, jnp.arange(tokens)[None]
        layers = (None,) * model.config.num_hidden_layers
        states, _ = jax.jit(lambda p, m=model: m.decoder.hidden(p, ids, positions, layers, attend))(
            model.params
        )
        results.append((states, model.decoder.logits(model.params, hidden)))
    for actual, expected in zip(*results[::-1], strict=True):
        np.testing.assert_array_equal(actual, expected)


@ON_CPU
def test_a_model_in_blocks_is_not_written_nor_changed(tmp_path):
    blocked = loaded()[1]
    with pytest.raises(ModelError, match="model must be loaded without `blocked` to be saved"):
        models.save(blocked, tmp_path)
    with pytest.raises(ModelError, match="model must be loaded without `blocked` to be quantised"):
        quantised(blocked)


def test_a_model_that_loads_in_blocks_has_the_numbers_of_its_files(tmp_path):
    plain = loaded()[0]
    models.save(plain, tmp_path)
    blocked = models.load(tmp_path, blocked=True)
    assert blocked.blocked
    for expected, actual in zip(jax.tree.leaves(plain.params), jax.tree.leaves(blocked.params), strict=True):
        np.testing.assert_array_equal(skinny_matmul.by_columns(actual), expected)


def test_a_model_without_a_matrix_in_blocks_can_be_saved(monkeypatch, tmp_path):
    monkeypatch.setattr(skinny_matmul, "reads_blocked", lambda kernel: False)
    models.save(in_blocks(loaded()[0]), tmp_path)


def test_models_whose_kernels_read_no_blocks_stay_as_they_are():
    narrow = models.initialise(tiny.model(vocab_size=192, **SIZES).config, 3, "float16")
    assert not in_blocks(narrow).blocked and dimensions(narrow)["lm_head"] == 2
