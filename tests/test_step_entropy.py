"""A step that takes its entropies from a kernel equals a step in plain JAX, up to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import entropy, generate
from entropic_jax.methods.presets import preset
from entropic_jax.pallas import topk_entropy
from entropic_jax.pallas.dispatch import Operation, interpreted
from entropic_jax.sampling import constraints, step_entropy
from tests import tiny

STEPS = 6


@pytest.fixture
def with_kernel(monkeypatch):
    """Use the TPU kernel of `topk_entropy` in the interpreter; clears the caches of traced functions."""
    backend = interpreted("entropic_jax.pallas.topk_entropy.tpu", "topk_entropy")

    def switch(on: bool) -> None:
        served = {"tpu": backend} if on else {"xla": topk_entropy.reference.topk_entropy}
        monkeypatch.setattr(topk_entropy, "TOPK_ENTROPY", Operation("topk_entropy", served))
        jax.clear_caches()

    yield switch
    jax.clear_caches()


def traced(controller, **options):
    texts = tiny.prompts(9, 14)
    state = tiny.begin(texts, controller=controller, max_tokens=STEPS, **options)
    m = tiny.model()
    state, trace = generate(m.decoder, m.params, controller, state, STEPS, capacity=STEPS)
    return jax.device_get((trace, state.measured))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=[0.0, 0.9]),
        pytest.param(
            dict(temperature=0.8, presence_penalty=[0.7, 0.0], logit_bias={3: -2.0}),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["greedy-and-warm", "penalised"],
)
def test_tokens_and_traces_are_those_of_plain_jax(with_kernel, options):
    with_kernel(False)
    controller = preset("micro").controller
    plain, signal = traced(controller, **options)
    with_kernel(True)
    assert step_entropy.kernel(jnp.zeros((2, 96))) == "tpu"
    actual, actual_signal = traced(controller, **options)
    np.testing.assert_array_equal(plain.token, actual.token)
    assert plain.temperature[:, 1].std() > 0  # the law moves it: what is sampled is measured anew
    for ours, theirs in zip(*map(jax.tree.leaves, ((plain, signal), (actual, actual_signal))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_plain_jax(with_kernel):
    logits = jax.random.normal(jax.random.key(0), (3, 96)).at[0, 5].set(9.0).at[1, :40].set(-jnp.inf)
    token, reported = jnp.array([5, 60, 7]), jnp.array([True, False, True])
    with_kernel(False)
    plain = constraints.top_logprobs(logits, token, reported)
    with_kernel(True)
    actual = constraints.top_logprobs(logits, token, reported)
    np.testing.assert_array_equal(plain.token, actual.token)
    np.testing.assert_allclose(plain.logprob, actual.logprob, atol=1e-5)
    np.testing.assert_allclose(plain.token_logprob, actual.token_logprob, atol=1e-5)


@pytest.mark.exhaustive
def test_gradients_pass_the_kernel(with_kernel):
    logits = jax.random.normal(jax.random.key(1), (2, 40)) * 3
    unit, active = jnp.float32(1.0), jnp.ones(2, bool)

    def total(logits, temperature):
        belief, tempered = step_entropy.measure(logits, logits, jnp.bool_(False), temperature, unit, active)
        again = step_entropy.remeasure(logits, 2 * temperature, temperature, tempered, active)
        return (belief.entropy + 2 * tempered.varentropy + 3 * again.entropy).sum()

    at = jnp.array([0.7, 1.3])
    with_kernel(False)
    plain = jax.grad(total, (0, 1))(logits, at)
    with_kernel(True)
    actual = jax.grad(total, (0, 1))(logits, at)
    for ours, theirs in zip(plain, actual, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_plain_jax_is_what_it_was():
    logits = jax.random.normal(jax.random.key(2), (2, 40))
    at, active = jnp.array([0.7, 0.0]), jnp.ones(2, bool)
    belief, tempered = step_entropy.measure(logits, 2 * logits, jnp.bool_(True), at, jnp.float32(1.5), active)
    for ours, theirs in (
        (belief, entropy.entropy_statistics(logits / 1.5)),
        (tempered, entropy.at_temperature(2 * logits, at)),
        (step_entropy.remeasure(logits, at, 2 * at, tempered, active), entropy.at_temperature(logits, at)),
    ):
        np.testing.assert_array_equal(ours, theirs)
