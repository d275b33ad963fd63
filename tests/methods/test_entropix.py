"""The quadrants of Entropix against formulas in float64, as corrected and as released."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_jax.calibration import load_calibration
from entropic_jax.methods import entropix, entropix_released
from entropic_jax.methods.entropix import (
    ADAPT,
    CLARIFY,
    EXPLORE,
    FLOW,
    RESAMPLE,
    QuadrantFeatures,
    Thresholds,
)
from entropic_jax.sampling.randomness import row_keys
from entropic_jax.state import Focus, plain_action, quiet_signal
from tests import tiny

LN2 = math.log(2)
BITS = Thresholds(0.1, 3.0, 5.0, 0.1, 5.0)


def region(e: float, v: float, t: Thresholds = BITS) -> int:
    if e < t.low_entropy and v < t.low_varentropy:
        return FLOW
    if e > t.unsure_entropy and v < t.low_varentropy:
        return CLARIFY
    if e < t.high_entropy and v > t.high_varentropy:
        return EXPLORE
    if e > t.high_entropy and v > t.high_varentropy:
        return RESAMPLE
    return ADAPT


def formulas(quadrants: int, m: QuadrantFeatures) -> tuple[float, float, float, float]:
    """T, top-p, top-k, min-p of a quadrant, with the constants of the release."""
    t, p, k, least = 0.666, 0.9, 27, 0.03
    if quadrants == CLARIFY:
        t *= 1.3 + 0.2 * m.attention_entropy
    elif quadrants == EXPLORE:
        t *= 1.2 + 0.3 * m.interaction
        k = int(k * (1 + 0.5 * (1 - m.agreement)))
    elif quadrants == RESAMPLE:
        t *= 2.0 + 0.5 * m.attention_varentropy
        p -= 0.2 * m.attention_entropy
    elif quadrants == ADAPT:
        doubt, focus = m.entropy + m.varentropy, m.attention_entropy + m.attention_varentropy
        t *= 1 + 0.3 * doubt + 0.2 * focus - 0.2 * m.agreement
        p = min(max(p * (1 + 0.1 * m.attention_varentropy), 0.1), 1.0)
        k = min(max(round(k * (1 + 0.3 * m.interaction - 0.2 * m.agreement)), 1), 100)
        least = min(max(least * (1 - 0.5 * doubt), 0.01), 0.5)
    return t, p, k, least


measure = st.floats(0, 8, width=32)


@settings(max_examples=60)
@given(st.tuples(*(measure,) * 6))
def test_quadrants_and_their_settings(values):
    m = QuadrantFeatures(*(np.float64(v) for v in values))
    quadrants = region(m.entropy, m.varentropy)
    arrays = QuadrantFeatures(*(jnp.full(1, v, jnp.float32) for v in values))
    assert int(entropix.quadrant(arrays.entropy, arrays.varentropy, BITS)[0]) == region(
        *(float(np.float32(v)) for v in values[:2]), Thresholds(*map(np.float32, BITS))
    )
    chosen = entropix.quadrant_settings(jnp.full(1, quadrants, jnp.int32), arrays, entropix.Constants())
    t, p, k, least = formulas(quadrants, m)
    np.testing.assert_allclose(chosen.temperature[0], t, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(chosen.top_p[0], p, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(chosen.min_p[0], least, rtol=1e-5)
    assert abs(float(chosen.top_k[0]) - k) <= 1  # where a product rounds to the other side
    weights = (0.1, 0.3, 0.2, 0.4)
    certain = sum(w * (1 - x) for w, x in zip(weights, m[:4], strict=True))
    want = certain + 0.5 * m.agreement + 0.6 * m.interaction
    np.testing.assert_allclose(
        entropix.confidence(arrays, entropix.Constants())[0], want, rtol=1e-4, atol=1e-5
    )


def spread(entropy_of_others: float, rows: int, vocabulary: int = 96) -> np.ndarray:
    rng = np.random.default_rng(3)
    return (rng.standard_normal((rows, vocabulary)) * entropy_of_others).astype(np.float32)


def at(logits: np.ndarray, seed: int = 0, **focus: float):
    """The signal of a step with these logits and attention statistics."""
    from entropic_jax import entropy

    rows = len(logits)
    belief = entropy.entropy_statistics(jnp.asarray(logits))
    values = dict(entropy=2.0, varentropy=0.1, agreement=0.5, interaction=1.5, max_entropy=4.0) | focus
    return quiet_signal(rows)._replace(
        entropy=belief.entropy,
        varentropy=belief.varentropy,
        emitting=jnp.ones(rows, bool),
        logits=jnp.asarray(logits),
        key=row_keys(jax.random.key(seed), jnp.arange(rows), jnp.full(rows, 9)),
        focus=Focus(**{k: jnp.full(rows, v, jnp.float32) for k, v in values.items()}),
    )


def undecided(rows: int, temperature: float = 1.0):
    action = plain_action(jnp.full(rows, temperature))
    return action._replace(token=jnp.full(rows, -1))


def law(**changes: Any) -> entropix.Entropix:
    return entropix.calibrated(load_calibration("models/embedded"), **changes)


def forcing(quadrants: int) -> Thresholds:
    """Thresholds that put every step into one quadrant."""
    low, high = -1.0, 1e9
    return {
        FLOW: Thresholds(high, high, high, high, high),
        CLARIFY: Thresholds(low, low, high, high, high),
        EXPLORE: Thresholds(low, high, high, low, low),
        RESAMPLE: Thresholds(low, high, low, low, low),
        ADAPT: Thresholds(low, high, high, low, high),
    }[quadrants]


def test_thresholds_are_quantiles_of_the_calibration():
    record = load_calibration("models/embedded")
    t = law().thresholds
    assert (t.low_entropy, t.high_entropy, t.unsure_entropy) == (
        record.quantiles[2],
        record.quantiles[4],
        record.quantiles[5],
    )
    assert (t.low_varentropy, t.high_varentropy) == (
        record.varentropy_quantiles[3],
        record.varentropy_quantiles[5],
    )


def test_rank_is_the_share_of_tokens_with_less():
    values = np.sort(np.random.default_rng(0).gamma(2.0, 1.0, 20_000))
    quantiles = tuple(np.quantile(values, entropix.LEVELS))
    points = np.array([0.3, 1.0, 2.0, 3.5])
    want = np.searchsorted(values, points) / len(values)
    np.testing.assert_allclose(
        entropix.quantile_rank(jnp.asarray(points, jnp.float32), quantiles), want, atol=0.04
    )


@pytest.mark.slow
@pytest.mark.parametrize("quadrants", [FLOW, CLARIFY, EXPLORE, RESAMPLE, ADAPT])
def test_each_quadrant_draws_as_it_should(quadrants):
    """The first candidate is distributed as softmax of the truncated logits at the quadrant's temperature."""
    rows = 4000
    logits = np.repeat(spread(0.7, 1, 12), rows, 0)
    signal = at(logits, agreement=0.25)
    controller = law(thresholds=forcing(quadrants))
    action, law_state = jax.jit(controller.update)(signal, undecided(rows), controller.init(undecided(rows)))
    assert (np.asarray(law_state.quadrant) == quadrants).all()
    m = entropix.normalised_features(signal, controller.scale)
    t, p, k, least = formulas(quadrants, QuadrantFeatures(*(float(x[0]) for x in m)))
    token = np.asarray(action.token)
    if quadrants == FLOW:
        assert (token == logits[0].argmax()).all() and (np.asarray(law_state.candidates[:, 1:]) == -1).all()
        return
    share = np.exp(np.float64(logits[0]) / t)
    share /= share.sum()
    order = np.argsort(-share)
    before = np.cumsum(share[order]) - share[order]
    kept = np.zeros(12, bool)
    kept[order[(before < p) & (np.arange(12) < k)]] = True
    kept &= share >= least * share.max()
    share = np.where(kept, share, 0) / share[kept].sum()
    frequency = np.bincount(token, minlength=12) / rows
    np.testing.assert_allclose(frequency, share, atol=4 * np.sqrt(0.25 / rows))
    candidates = np.asarray(law_state.candidates)
    assert (candidates[:, 0] == token).all()
    for row in candidates[:50]:
        real = row[row >= 0]
        assert len(set(real)) == len(real) == min(4, kept.sum()) and kept[real].all()
    log_p = np.log(np.exp(np.float64(logits[0])) / np.exp(np.float64(logits[0])).sum())
    real = candidates[0] >= 0
    reported = np.asarray(law_state.log_probability[0])
    np.testing.assert_allclose(reported[real], log_p[candidates[0][real]], atol=1e-5)


@pytest.mark.slow
def test_rows_decide_and_draw_for_themselves():
    logits = spread(1.0, 6)
    controller = law()
    batched, _ = controller.update(at(logits), undecided(6), controller.init(undecided(6)))
    signal = at(logits)
    for row in range(6):
        alone = jax.tree.map(lambda x: x[row : row + 1], signal)
        single, _ = controller.update(alone, undecided(1), controller.init(undecided(1)))
        assert int(single.token[0]) == int(batched.token[row])
    other, _ = controller.update(at(logits, seed=1), undecided(6), controller.init(undecided(6)))
    assert (np.asarray(other.token) != np.asarray(batched.token)).any()


@pytest.mark.slow
def test_the_clarification_is_said_in_full_and_then_not_again_at_once():
    controller = law(thresholds=forcing(CLARIFY), clarification=(7, 8, 9), patience=4)
    action, law_state = undecided(2), controller.init(undecided(2))
    said = []
    for step in range(12):
        clarification_index, law_state = controller.update(at(spread(1.0, 2), seed=step), action, law_state)
        said.append(clarification_index.token.tolist())
    said = np.array(said)
    assert said[:3].tolist() == said[7:10].tolist() == [[7, 7], [8, 8], [9, 9]]
    quiet = law(thresholds=forcing(CLARIFY))
    clarification_index, _ = quiet.update(at(spread(1.0, 2)), action, quiet.init(action))
    warm = 0.666 * (1.3 + 0.2 * 0.5)
    np.testing.assert_allclose(clarification_index.temperature, warm, rtol=1e-5)


@pytest.mark.slow
def test_greedy_rows_are_left_alone():
    logits = spread(1.0, 3)
    for controller in (law(), entropix_released.AsReleased()):
        action = plain_action(jnp.array([0.0, 1.0, 0.0]))._replace(token=jnp.full(3, -1))
        after, _ = controller.update(at(logits), action, controller.init(action))
        assert after.token[0] == after.token[2] == -1 and after.token[1] >= 0
        assert after.temperature[0] == after.temperature[2] == 0


@pytest.mark.slow
def test_new_gains_do_not_retrace_and_vmap():
    signal, action = at(spread(1.0, 2)), undecided(2)
    temperature = lambda constants: (
        law(thresholds=forcing(EXPLORE), constants=constants)
        .update(signal, action, entropix.initial_state(2, 4))[0]
        .temperature
    )
    many = jax.vmap(lambda t: temperature(entropix.Constants(temperature=t)))(jnp.array([0.5, 0.8]))
    np.testing.assert_allclose(many[1] / many[0], 1.6, rtol=1e-5)


# As released.


def released(logits: np.ndarray, focus: Focus, pause: int = -1, last: tuple[int, ...] = ()) -> list[int]:
    """One step of the release for a whole batch, in float64, with the noise of a rank drawn once."""
    z = np.float64(logits)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(-1) / LN2
    varentropy = (p * (log_p / LN2 + entropy[:, None]) ** 2).sum(-1)
    f = Focus(*(float(np.mean(x)) for x in focus))
    m = QuadrantFeatures(
        entropy.mean(), varentropy.mean(), f.entropy / LN2, f.varentropy / LN2**2, f.agreement, f.interaction
    )
    quadrants = region(m.entropy, m.varentropy)
    if quadrants == FLOW:
        return z.argmax(-1).tolist()
    if quadrants == CLARIFY and pause >= 0 and pause not in last:
        return [pause] * len(z)
    t, top_p, k, _ = formulas(quadrants, m)
    if quadrants in (CLARIFY, EXPLORE):
        t = min(t, 1.5)
    if quadrants == EXPLORE:
        k = max(k, 5)
    if quadrants == RESAMPLE:
        t, top_p = max(t, 2.0), max(top_p, 0.5)
    count = 5 if quadrants == ADAPT else 1
    keys = jax.random.split(jax.random.key(1337), 5)[:count]
    best = []
    for row in range(len(z)):
        share = np.exp(z[row] / t - (z[row] / t).max())
        share /= share.sum()
        order = np.argsort(-share, kind="stable")[: min(k, len(share))]
        ascending = share[order][::-1]
        mask = np.cumsum(ascending) - ascending > top_p
        kept = np.where(mask, 0.0, ascending)[::-1]
        offered = []
        for key in keys:
            noise = np.asarray(jax.random.exponential(key, (len(z), min(100, z.shape[1]))), np.float64)
            offered.append(order[np.argmax(kept / kept.sum() / noise[row][: len(order)])])
        best.append(max(offered, key=lambda token: log_p[row, token]))
    return [int(token) for token in best]


@pytest.mark.parametrize("sharpness", [0.05, 0.5, 1.0, 2.0, 4.0, 30.0])
@pytest.mark.parametrize("interaction", [0.1, 2.0])
def test_as_released(sharpness, interaction):
    logits = spread(sharpness, 3, 200)
    if sharpness == 4.0:  # a heavy tail: high entropy with high varentropy
        logits = logits - 0.5 * np.log1p(np.arange(200, dtype=np.float32)) * 4
    signal = at(logits, entropy=11.9 * LN2, varentropy=0.01, agreement=1e-4, interaction=interaction)
    controller = entropix_released.AsReleased()
    action, last = controller.update(signal, undecided(3), controller.init(undecided(3)))
    assert action.token.tolist() == released(logits, signal.focus)
    assert last.token.tolist() == action.token.tolist()


def test_the_release_decides_once_for_the_batch_and_pauses_once():
    even = np.zeros((2, 4096), np.float32)  # 12 bits, no varentropy
    controller = entropix_released.AsReleased(pause=5)
    action, last = controller.update(at(even), undecided(2), controller.init(undecided(2)))
    assert action.token.tolist() == [5, 5]
    action, _ = controller.update(at(even), undecided(2), last)
    assert 5 not in action.token.tolist()
    mixed = np.stack([even[0], 50 * np.eye(4096, dtype=np.float32)[3]])  # 6 bits in the mean: no flow
    _, last = controller.update(at(mixed), undecided(2), controller.init(undecided(2)))
    assert last.quadrant.tolist() == [CLARIFY] * 2


def test_its_top_p_cuts_the_likeliest_and_its_noise_never_changes():
    logits = np.log(np.array([[0.05, *[0.95 / 19] * 19]], np.float32))
    logits[0, 0] += 0.01
    how = entropix.SamplerSettings(*(jnp.full(1, x, jnp.float32) for x in (1.0, 0.9, 27.0, 0.03)))
    token, share = entropix_released.shares(jnp.asarray(logits), how)
    assert int(token[0, 0]) == 0 and float(share[0, 0]) == 0
    again = [entropix_released.drawn(share, 5).tolist() for _ in range(2)]
    assert again[0] == again[1]


# In the loop.


@pytest.mark.slow
@pytest.mark.parametrize("released", [False, True])
def test_generation_is_reproducible_and_independent_of_the_launch(released):
    make = entropix_released.AsReleased if released else law
    texts = tiny.prompts(9, 14)
    controller = make()
    outs = [
        tiny.finish(tiny.begin(texts, controller=controller), steps=steps, controller=controller)[0]
        for steps in (64, 3)
    ]
    assert outs[0] == outs[1] and all(len(text) == 20 for text in outs[0])
    greedy = tiny.begin(texts, controller=controller, temperature=0.0)
    plain, _, _ = tiny.finish(tiny.begin(texts, temperature=0.0))
    assert tiny.finish(greedy, controller=controller)[0] == plain
