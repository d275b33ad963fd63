"""Unusual layers give the same logits and tokens however a text is divided into passes, and with drafts."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, models, parameters, start
from entropic_jax.attention.attend import TokenSpan, attend_to
from entropic_jax.methods import presets
from entropic_jax.models.config_json import from_json
from entropic_jax.state import cache
from tests.marks import keep
from tests.models.family_cases import CASES, SIZES
from tests.models.oracle import QUICK
from tests.speculation.test_lossless import corrupted, scripted

PAGE, LENGTH, STEPS = 8, 57, 24
TOLERANCE = 2e-4
# Chunks, growth of queries, caps, sinks, latent vectors, layers without rotation.
FAMILIES = ("Llama4", "Gemma2", "GptOss", "DeepseekV3", "SmolLM3")
EACH = ["Llama4", *keep(FAMILIES[1:], "GptOss", "DeepseekV3", marks=pytest.mark.slow)]
DRAFTED = keep(itertools.product(FAMILIES, ("off", "full")), ("Llama4", "full"), marks=pytest.mark.slow)
SPLITS = {
    "chunked prefill": (20, 30, 7),
    "verify": (13, 5, 3, 8, 1, 5, 3, 1, 5, 8, 5),
    "decode": (1,) * LENGTH,
}


def random_model(family: str) -> models.Model:
    """The first configuration of a family, with random weights."""
    changes = next(changes for name, changes in CASES if name == family)
    raw = {**SIZES, **changes, "architectures": [f"{family}ForCausalLM"]}
    return models.initialise(from_json(raw, models.FAMILIES[f"{family}ForCausalLM"]), seed=0)


@partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def one_pass(decoder, params, pool, tokens, begin):
    """Logits of a pass over tokens `[rows, n]`, and the cache as written."""
    rows, n = tokens.shape
    attend = attend_to(pool, TokenSpan(begin, jnp.full(rows, n, jnp.int32)))
    hidden, layers = decoder.hidden(params, tokens, begin[:, None] + jnp.arange(n), pool.layers, attend)
    return decoder.logits(params, hidden), pool._replace(layers=layers)


def logits_of(model: models.Model, split: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Logits of a text read in passes of these sizes."""
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (1, LENGTH)).astype(np.int32)
    pool = allocate(model.decoder.shape, 1, LENGTH, page_size=PAGE, dtype=dtype)
    pool, _ = cache.grant(pool, jnp.full(1, LENGTH, jnp.int32))
    parts, done = [], 0
    for n in split:
        place = jnp.full(1, done, jnp.int32)
        part, pool = one_pass(model.decoder, model.params, pool, tokens[:, done : done + n], place)
        parts.append(np.asarray(part[0]))
        done += n
    assert done == LENGTH
    return np.concatenate(parts)


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH)
def test_logits_do_not_depend_on_passes(family):
    """A pass begins and ends within a page, a window and a chunk, and reaches over their borders."""
    model = random_model(family)
    expected = logits_of(model, (LENGTH,))
    assert np.abs(expected).max() > 0.5
    for name, split in SPLITS.items():
        np.testing.assert_allclose(logits_of(model, split), expected, atol=TOLERANCE, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", keep(FAMILIES, "Llama4"))
def test_quantised_pages_are_near(family):
    model = random_model(family)
    expected = logits_of(model, (LENGTH,))
    error = np.abs(logits_of(model, (20, 37), "int8") - expected)
    assert 0 < error.mean() < 0.05 * np.abs(expected).mean()


@pytest.mark.parametrize(("family", "preset"), DRAFTED)
def test_drafts_change_no_token(family, preset):
    """Rows of other lengths, with drafts of which half are wrong."""
    model, rng = random_model(family), np.random.default_rng(1)
    prompts = [rng.integers(0, SIZES["vocab_size"], n).tolist() for n in (13, 6, 9)]
    controller = presets.preset(preset).controller if preset != "off" else chain()

    def tokens(speculator):
        pool = allocate(model.decoder.shape, len(prompts), LENGTH, page_size=PAGE)
        state = start(
            *(model.decoder, model.params, controller, pool, prompts),
            key=jax.random.key(3),
            sample=parameters(len(prompts), temperature=0.8),
            max_tokens=STEPS,
            speculator=speculator,
        )
        _, trace = generate(
            *(model.decoder, model.params, controller, state, STEPS),
            capacity=STEPS,
            speculator=speculator,
        )
        return [trace.token[trace.emitted[:, row], row].tolist() for row in range(len(prompts))], trace

    plain, _ = tokens(None)
    script = np.zeros((len(prompts), LENGTH + 8), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, plain, strict=True)):
        script[row, : LENGTH + 8] = np.resize([*prompt, *answer], LENGTH + 8)
    drafted, trace = tokens(scripted(corrupted(script, 0.5)))
    assert drafted == plain
    assert int(trace.from_draft.sum()) > 0
