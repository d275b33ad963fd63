"""Each sampling parameter against the logits processor of the same name in transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import sampling
from entropic_jax.sampling import parameters

torch = pytest.importorskip("torch")
processors = pytest.importorskip("transformers.generation.logits_process")

ROWS, VOCABULARY = 4, 61  # a vocabulary that fills no vector register evenly

truncate = jax.jit(sampling.truncate)


def random_logits(seed: int) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((ROWS, VOCABULARY))).astype(np.float32)


def processed(logits: np.ndarray, *chain, tokens: np.ndarray | None = None) -> np.ndarray:
    """Logits after a chain of logits processors, given the tokens `[rows, n]`."""
    scores = torch.from_numpy(logits.copy())
    tokens = torch.zeros((len(logits), 1), dtype=torch.long) if tokens is None else torch.from_numpy(tokens)
    for processor in chain:
        scores = processor(tokens, scores)
    return scores.numpy()


@pytest.mark.parametrize("k", [1, 2, 17, VOCABULARY, VOCABULARY + 5])
def test_top_k(k):
    logits = random_logits(k)
    logits[0, :8] = 1.25  # transformers keeps the ties of top-k, too
    expected = processed(logits, processors.TopKLogitsWarper(k))
    np.testing.assert_array_equal(truncate(logits, parameters(ROWS, top_k=k)), expected)


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.9, 0.999])
def test_top_p(p):
    logits = random_logits(1)
    expected = processed(logits, processors.TopPLogitsWarper(p))
    sampling = parameters(ROWS)._replace(top_p=jnp.full(ROWS, p))  # 0 too, which `parameters` refuses
    np.testing.assert_array_equal(truncate(logits, sampling), expected)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.7, 1.0])
def test_min_p(p):
    logits = random_logits(2)
    expected = processed(logits, processors.MinPLogitsWarper(p))
    np.testing.assert_array_equal(truncate(logits, parameters(ROWS, min_p=p)), expected)


@pytest.mark.parametrize("p", [0.05, 0.4, 0.9, 0.995])
def test_typical_p(p):
    logits = random_logits(3)
    expected = processed(logits, processors.TypicalLogitsWarper(p))
    np.testing.assert_array_equal(truncate(logits, parameters(ROWS, typical_p=p)), expected)


@pytest.mark.parametrize("cutoff", [1e-4, 0.003, 0.05, 1.0])
def test_epsilon_and_eta_cutoff(cutoff):
    logits = random_logits(8)
    for name, cls in (
        ("epsilon_cutoff", processors.EpsilonLogitsWarper),
        ("eta_cutoff", processors.EtaLogitsWarper),
    ):
        warper = cls(min(cutoff, 0.999))  # which refuses 1, where the likeliest token alone is kept
        actual = truncate(logits, parameters(ROWS, **{name: cutoff}))
        np.testing.assert_array_equal(actual, processed(logits, warper))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.8])
def test_all_filters_in_a_chain(temperature):
    logits = random_logits(4)
    expected = processed(
        logits,
        processors.TemperatureLogitsWarper(temperature),
        processors.TopKLogitsWarper(30),
        processors.TopPLogitsWarper(0.95),
        processors.MinPLogitsWarper(0.01),
        processors.TypicalLogitsWarper(0.8),
    )
    params = parameters(ROWS, top_k=30, top_p=0.95, min_p=0.01, typical_p=0.8)
    np.testing.assert_allclose(truncate(logits / np.float32(temperature), params), expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_temperature(temperature):
    logits, params = random_logits(6), parameters(ROWS)
    warped = processed(logits, processors.TemperatureLogitsWarper(temperature))
    assert (sample(logits, params, temperature) == sample(warped, params, 1.0)).all()


@jax.jit
def sample(logits, params, temperature):
    """The tokens at 32 positions, `[32, rows]`."""
    seed, temperature = jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, temperature)
    draw = lambda position: sampling.sample(
        jnp.asarray(logits), params, temperature, jax.random.key(0), seed, jnp.full(ROWS, position)
    )
    return jax.lax.map(draw, jnp.arange(32))


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty(penalty):
    logits, rng = random_logits(5), np.random.default_rng(0)
    prompt, generated = rng.integers(0, VOCABULARY, (2, ROWS, 9))
    processor = processors.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processed(logits, processor, tokens=np.concatenate([prompt, generated], axis=1))
    seen = np.zeros((ROWS, VOCABULARY), bool)
    seen[np.arange(ROWS)[:, None], prompt] = True
    history = sampling.history(ROWS, VOCABULARY)._replace(prompt=jnp.asarray(seen))
    for tokens in generated.T:
        history = sampling.record(history, jnp.asarray(tokens, jnp.int32), jnp.ones(ROWS, bool))
    actual = sampling.penalise(jnp.asarray(logits), parameters(ROWS, repetition_penalty=penalty), history)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
