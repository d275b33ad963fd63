"""Weight quantisation: the error of a matrix is bounded, and what runs is the rounded model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from entropic_jax import models
from entropic_jax.mesh import AXES, SHARDS
from entropic_jax.models.decoder import structure
from entropic_jax.models.model import quantised
from entropic_jax.models.quantisation import (
    QUANTIZATIONS,
    quantise_fp8,
    quantise_groups,
    quantise_kernel,
    quantise_table,
)
from entropic_jax.models.sharding import check_groups, partition_spec
from entropic_jax.pallas.skinny_matmul.reference import unpack
from entropic_jax.serving.options import model as model_options
from tests import tiny
from tests.marks import exhaustive, sample

EXPERTS = dict(architecture="MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2)
WIDE = dict(hidden_size=64, intermediate_size=128)  # of which groups of 32 inputs are parts
KERNEL_DTYPES = {"int8": "int8", "int4": "uint8", "fp8": "float8_e4m3fn"}


def logits(model: models.Model, length: int) -> np.ndarray:
    """Logits of a text without a cache."""
    decoder = model.decoder
    tokens = jnp.asarray(tiny.prompts(length))
    position = jnp.arange(length)[None]

    def attend(query, key, value, cache, **_):
        group = query.shape[2] // key.shape[2]
        scores = jnp.einsum("rnhd,rmhd->rhnm", query, jnp.repeat(key, group, 2)) / query.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("rhnm,rmhd->rnhd", weights, jnp.repeat(value, group, 2)), cache

    layers = (None,) * model.config.num_hidden_layers
    hidden, _ = decoder.hidden(model.params, tokens, position, layers, attend)
    return np.asarray(decoder.logits(model.params, hidden))


def widened(params):
    """The parameters with quantised kernels and embeddings as float32."""
    if isinstance(params, tuple):
        return tuple(map(widened, params))
    if not isinstance(params, dict):
        return params
    if "scale" in params and "weight" in params:
        return {"weight": params["weight"].astype(jnp.float32) * params["scale"].astype(jnp.float32)[:, None]}
    if "scale" in params:
        kernel, scale = params["kernel"], params["scale"]
        of_matrix = lambda kernel, scale: (
            unpack(kernel, scale) if scale.ndim == 2 else kernel.astype(jnp.float32) * scale
        )
        wide = of_matrix(kernel, scale) if kernel.ndim == 2 else jax.vmap(of_matrix)(kernel, scale)
        return {name: x for name, x in params.items() if name != "scale"} | {"kernel": wide}
    return {name: widened(x) for name, x in params.items()}


def test_the_error_of_an_element_is_at_most_half_a_step():
    kernel = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    kernel[:, 3] = 0
    quantised_kernel, scale = quantise_kernel(jnp.asarray(kernel))
    assert quantised_kernel.dtype == jnp.int8 and (scale > 0).all()
    error = np.abs(np.asarray(quantised_kernel, np.float32) * np.asarray(scale) - kernel)
    assert (error <= np.asarray(scale) * 0.5001).all()
    np.testing.assert_allclose(scale[:3], np.abs(kernel).max(0)[:3] / 127, rtol=1e-6)


@pytest.mark.parametrize("group", [32, 128])
def test_a_group_has_the_scale_of_a_small_error(group):
    kernel = np.random.default_rng(1).standard_normal((256, 24)).astype(np.float32)
    kernel[:group, 3] = 0
    packed, scale = quantise_groups(jnp.asarray(kernel), group)
    assert packed.shape == (128, 24) and packed.dtype == jnp.uint8
    assert scale.shape == (256 // group, 24) and scale.dtype == jnp.bfloat16 and (scale != 0).all()
    error = np.asarray(unpack(packed, scale)) - kernel
    assert not error[:group, 3].any()
    grouped = kernel.reshape(-1, group, 24)
    step = np.abs(grouped).max(1, keepdims=True) / 7  # of symmetric numbers up to the largest element
    step[step == 0] = 1
    plain = (np.round(grouped / step) * step).reshape(256, 24) - kernel
    assert (error**2).sum() < 0.9 * (plain**2).sum()


def test_fp8_keeps_three_bits():
    kernel = np.random.default_rng(2).standard_normal((40, 24)).astype(np.float32)
    numbers, scale = quantise_fp8(jnp.asarray(kernel))
    wide = np.asarray(numbers, np.float32) * np.asarray(scale)
    np.testing.assert_allclose(wide, kernel, rtol=2**-4 * 1.001, atol=float(scale.max()) * 2**-10)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_rows_of_a_table_have_scales_of_its_dtype(kind):
    table = jnp.asarray(np.random.default_rng(3).standard_normal((20, 32)), kind).at[4].set(0)
    numbers, scale = quantise_table(table)
    assert numbers.dtype == jnp.int8 and scale.shape == (20,) and scale.dtype == table.dtype
    error = np.asarray(numbers, np.float32) * np.asarray(scale, np.float32)[:, None] - np.asarray(
        table, np.float32
    )
    assert (np.abs(error) <= 0.75 * np.asarray(scale, np.float32)[:, None]).all()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("length", [5, *exhaustive(70)])
@pytest.mark.parametrize("quantization", sample(list(KERNEL_DTYPES), 0, 2))
def test_the_model_computes_with_its_rounded_weights(quantization, length, changes):
    model = tiny.model(**WIDE, **changes)
    narrow = quantised(model, quantization)
    assert narrow.params["layers"][0]["self_attn"]["q_proj"]["kernel"].dtype == KERNEL_DTYPES[quantization]
    head = narrow.params["lm_head"]["kernel"].dtype
    assert head == (jnp.float8_e4m3fn if quantization == "fp8" else jnp.int8)
    assert narrow.params["embed_tokens"]["weight"].dtype == jnp.int8
    assert jax.tree.leaves(narrow.params)[0].dtype == jnp.float32  # by which callers know the model's dtype
    rounded = models.Model(model.config, widened(narrow.params))
    np.testing.assert_allclose(logits(narrow, length), logits(rounded, length), atol=2e-4)
    # The median, because a token may change its experts.
    assert 1e-3 < np.median(np.abs(logits(narrow, length) - logits(model, length))) < 0.8


@pytest.mark.slow
def test_a_model_of_bfloat16_computes_in_bfloat16():
    model = tiny.model(**WIDE)
    half = models.Model(model.config, jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))
    narrow = quantised(half, "int4")
    hidden, _ = narrow.decoder.hidden(
        narrow.params,
        jnp.zeros((1, 1), int),
        jnp.zeros((1, 1), int),
        (None,) * 2,
        lambda q, k, v, c, **_: (q, c),
    )
    assert hidden.dtype == jnp.bfloat16
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), widened(narrow.params))
    np.testing.assert_allclose(logits(narrow, 9), logits(models.Model(model.config, rounded), 9), atol=0.3)


@pytest.mark.parametrize("quantization", KERNEL_DTYPES)
def test_load_quantises(quantization: str, tmp_path: Path):
    model = tiny.model(**WIDE)
    models.save(model, tmp_path)
    loaded = models.load(tmp_path, quantization=quantization)
    assert loaded.quantization == loaded.decoder.quantization == quantization
    expected = quantised(model, quantization).params
    for x, y in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def test_errors(tmp_path: Path):
    model = quantised(tiny.model())
    with pytest.raises(
        ValueError, match="quantization must be int8, int4, int4-128, fp8 or None; got 'int3'"
    ):
        models.load(tmp_path, quantization="int3")
    with pytest.raises(ValueError, match="model must not be quantised; its weights are int8"):
        quantised(model)
    with pytest.raises(ValueError, match="model must not be quantised to be saved"):
        models.save(model, tmp_path)
    message = (
        "int8, fp8 or None for a model whose down_proj has 48 inputs, .* not a multiple of 32; got 'int4'"
    )
    with pytest.raises(ValueError, match=message):
        quantised(tiny.model(), "int4")
    assert model_options.QUANTIZATIONS == QUANTIZATIONS


def test_devices_of_a_mesh_get_whole_groups():
    path = ("layers", 0, "mlp", "down_proj", "scale")
    assert partition_spec(path, 2) == P(SHARDS, None)
    shapes = structure(tiny.model(**WIDE).config, "int4")[1]  # o_proj has 2 groups, down_proj 4
    check_groups(shapes, AbstractMesh((1, 2, 1), AXES))
    with pytest.raises(ValueError, match=r"must divide the 2 groups of inputs of o_proj, .*; got 4"):
        check_groups(shapes, AbstractMesh((1, 4, 1), AXES))
