"""Bits of a forward pass: a token gets the same in a pass of many tokens and rows as in a step of its own."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime, models
from entropic_jax.attention.attend import TokenSpan, attend_to
from entropic_jax.models.model import quantised
from entropic_jax.pallas import skinny_matmul
from entropic_jax.state import cache

EMBEDDED = Path(models.__file__).parent / "embedded"
PROMPT, CONTEXT, PAGE = 13, 128, 16
SIZES = dict(
    vocab_size=136,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)

pytestmark = pytest.mark.skipif(
    cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU"
)


def tiny(architecture: str, dtype: str = "float32", **changes) -> models.Model:
    return models.initialise(models.Config(architecture=architecture, **SIZES, **changes), 0, dtype)


@partial(jax.jit, static_argnums=0)
def run(decoder, params, pool, tokens, start):
    """Logits of a pass over tokens `[rows, n]`, and the cache as written."""
    rows, n = tokens.shape
    attend = attend_to(pool, TokenSpan(start, jnp.full(rows, n, jnp.int32)))
    hidden, layers = decoder.hidden(params, tokens, start[:, None] + jnp.arange(n), pool.layers, attend)
    return decoder.logits(params, hidden), pool._replace(layers=layers)


def passes(model: models.Model, rows: int, split: tuple[int, ...], dtype: str = "float32"):
    """Logits of the tokens after the prompt, read in passes of these sizes, and the cache after them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 96, (4, CONTEXT)).astype(np.int32)[:rows]
    pool = cache.allocate(model.decoder.shape, rows, CONTEXT, page_size=PAGE, dtype=dtype)
    pool, _ = cache.grant(pool, jnp.full(rows, CONTEXT, jnp.int32))
    logits, done = [], 0
    for n in (PROMPT, *split):
        start = jnp.full(rows, done, jnp.int32)
        out, pool = run(model.decoder, model.params, pool, tokens[:, done : done + n], start)
        logits.append(out)
        done += n
    return jnp.concatenate(logits[1:], 1), pool


def assert_same_bits(model: models.Model, dtype: str = "float32") -> None:
    """Decoding one by one, verification, and prefill of more queries than `verify` takes."""
    alone, pool = passes(model, 1, (1,) * 100, dtype)
    for split in ((100,), (1, 2, 5, 4, 70, 18), (33, 67)):
        logits, written = passes(model, 1, split, dtype)
        np.testing.assert_array_equal(logits, alone, err_msg=f"passes of {split}")
        for layer, expected in zip(jax.tree.leaves(written), jax.tree.leaves(pool), strict=True):
            np.testing.assert_array_equal(layer, expected, err_msg=f"pages after passes of {split}")
    for split in ((100,), (1,) * 5 + (95,)):
        np.testing.assert_array_equal(passes(model, 4, split, dtype)[0][:1], alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("LlamaForCausalLM", "float32"),
        pytest.param("LlamaForCausalLM", "bfloat16", marks=pytest.mark.slow),
        pytest.param("Qwen3ForCausalLM", "int8", marks=pytest.mark.slow),
    ],
)
def test_dense_models(architecture, dtype):
    assert_same_bits(tiny(architecture), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_models_with_weights_of_bfloat16(quantization):
    """Activations are float32; operands are rounded where the processor multiplies bfloat16."""
    model = tiny("LlamaForCausalLM", "bfloat16")
    assert model.operand_dtype == ("bfloat16" if skinny_matmul.rounds_operands() else "float32")
    assert_same_bits(quantised(model, quantization) if quantization else model, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantised_models(quantization):
    assert_same_bits(quantised(tiny("LlamaForCausalLM"), quantization))


@pytest.mark.slow
def test_the_embedded_model():
    assert_same_bits(models.load(EMBEDDED, progress=False))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_experts(quantization):
    model = tiny("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2)
    assert_same_bits(model if quantization is None else quantised(model, quantization))
