"""Embeddings: a large tied table is in memory once, with the bits of two, and no look-up copies a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import generate, models
from entropic_jax.mesh import make_mesh
from entropic_jax.models import Config, embedding
from entropic_jax.models.model import quantised
from entropic_jax.models.placement import copied, shard
from entropic_jax.pallas import skinny_matmul
from tests import tiny
from tests.marks import exhaustive

CONFIG = Config("Gemma3ForCausalLM", 192, 64, 128, 2, 4, 2, 16, tie_word_embeddings=True, sliding_window=8)
EXACT = dict(strict=True)


@pytest.fixture(params=["float32", "bfloat16"])
def loaded(request, tmp_path, monkeypatch):
    """Loads a tied checkpoint of a dtype with one table, or with two."""
    models.save(models.initialise(CONFIG, 3), tmp_path, dtype=request.param)

    def load(one_table: bool, **options) -> models.Model:
        monkeypatch.setattr(embedding, "LARGE_TABLE", 0 if one_table else 2**28)
        return models.load(tmp_path, request.param, progress=False, **options)

    return load


def tokens_and_logits(model: models.Model) -> tuple[jax.Array, jax.Array]:
    """Greedy tokens of two rows through the paged loop, and the surprisal of each."""
    pool = tiny.allocate(model.decoder.shape, 2, 64, page_size=8)
    sample = tiny.parameters(2, temperature=0.0)
    texts = tiny.prompts(5, 17)
    options = dict(key=jax.random.key(0), sample=sample, max_tokens=12)
    state = tiny.start(model.decoder, model.params, tiny.chain(), pool, texts, **options)
    state, trace = generate(model.decoder, model.params, tiny.chain(), state, 12)
    return trace.token, trace.surprisal


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [True, *exhaustive(False)])
def test_one_table_gives_the_bits_of_two(loaded, blocked):
    shared, separate = (loaded(one_table, blocked=blocked) for one_table in (True, False))
    assert shared.params["embed_tokens"]["weight"] is shared.params["lm_head"]["kernel"]
    assert separate.params["embed_tokens"]["weight"].shape == (192, 64)
    tokens = jnp.asarray([[0, 191, 63, 64], [-3, 500, 100, 100]])
    vectors = (model.decoder.embedded(model.params, tokens) for model in (shared, separate))
    np.testing.assert_array_equal(*vectors, **EXACT)
    for actual, expected in zip(*map(tokens_and_logits, (shared, separate)), strict=True):
        np.testing.assert_array_equal(actual, expected, **EXACT)


def test_one_table_is_saved_and_copied_as_two_are(loaded, tmp_path):
    shared, separate = loaded(True), loaded(False)
    again = copied(shared, jax.devices()[0])
    assert again.params["embed_tokens"]["weight"] is again.params["lm_head"]["kernel"]
    for name, model in {"shared": shared, "separate": separate}.items():
        models.save(model, tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("shared", "separate")]
    assert files[0] == files[1]


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_one_table_is_quantised_and_divided_as_two_are(loaded, quantization):
    shared, separate = (
        jax.tree.leaves_with_path(quantised(loaded(one_table), quantization).params)
        for one_table in (True, False)
    )
    for (path, actual), (_, expected) in zip(shared, separate, strict=True):
        np.testing.assert_array_equal(actual, expected, err_msg=str(path), **EXACT)
    divided = shard(loaded(True), make_mesh(1))
    assert divided.params["embed_tokens"]["weight"].shape == (192, 64)


@pytest.mark.slow
def test_gradients_of_one_table_add_up_to_those_of_two(loaded):
    def gradient(model: models.Model) -> jax.Array:
        def loss(params):
            vectors = model.decoder.embedded(params, jnp.arange(8)).astype(jnp.float32)
            return (model.decoder.logits(params, vectors) ** 2).sum()

        gradients = jax.grad(loss)(model.params)
        table, kernel = gradients["embed_tokens"]["weight"], gradients["lm_head"]["kernel"]
        return (table if table.shape == kernel.shape else table.T) + kernel

    np.testing.assert_array_equal(*(gradient(loaded(one_table)) for one_table in (True, False)), **EXACT)


def test_small_and_untied_tables_are_in_memory_twice(tmp_path):
    assert not embedding.may_have_one_table(CONFIG, 4)
    wide = dict(vocab_size=128256, hidden_size=3072)
    for tied in (True, False):
        config = Config(**{**vars(CONFIG), **wide, "tie_word_embeddings": tied})
        assert embedding.may_have_one_table(config, 2) is tied


@pytest.mark.parametrize("lay_out", [lambda x: x, skinny_matmul.in_blocks, skinny_matmul.in_tiles])
def test_columns_of_every_layout(lay_out):
    weight = jnp.arange(64 * 192, dtype=jnp.float32).reshape(64, 192)
    numbers = jnp.asarray([[0, 191, 17], [200, -1, 130]])
    actual = skinny_matmul.take_columns(lay_out(weight), numbers)
    expected = weight.T[jnp.clip(numbers, 0, 191)]
    np.testing.assert_array_equal(actual, expected, **EXACT)


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA's CPU back end does")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["rows", "columns", "blocks"])
@pytest.mark.parametrize("number", [1, 8, 40])
def test_no_loop_copies_or_widens_the_table(dtype, layout, number):
    kernel = jnp.ones((64, 4096), dtype)
    table = {"rows": kernel.T, "columns": kernel, "blocks": skinny_matmul.in_blocks(kernel)}[layout]

    @jax.jit
    def loop(table: jax.Array, tokens: jax.Array) -> jax.Array:
        add = lambda i, total: total + embedded(table, tokens + i).astype(jnp.float32)
        return jax.lax.fori_loop(0, 9, add, jnp.zeros((number, 64)))

    def embedded(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if layout == "rows":
            return embedding.look_up(table, tokens)
        return skinny_matmul.take_columns(*embedding.read_in_each_step(table, tokens))

    compiled = loop.lower(table, jnp.arange(number)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes // 4
