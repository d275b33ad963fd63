"""Calibration recovers known temperatures, corrects confidence, and checks the file that it reads."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_jax import calibration
from entropic_jax.calibration import Calibration, teacher_forcing
from tests import tiny
from tests.models import dense

# The temperature.


def sampled(temperature: float, tokens: int, vocabulary: int = 30, seed: int = 0):
    """Random logits `[tokens, vocabulary]` and tokens whose expected T_cal is `temperature`."""
    random = np.random.default_rng(seed)
    logits = 2 * random.standard_normal((tokens, vocabulary))
    drawn = (logits + random.gumbel(size=logits.shape)).argmax(-1)
    return (temperature * logits).astype(np.float32), drawn.astype(np.int32)


def batched(logits, tokens, size: int = 5000):
    """The same in batches; the last one is padded with tokens that do not count."""
    short = -len(tokens) % size
    logits = np.concatenate([logits, np.full((short, logits.shape[1]), np.inf, np.float32)])
    tokens = np.concatenate([tokens, np.full(short, -1, np.int32)])
    yield from zip(np.split(logits, len(tokens) // size), np.split(tokens, len(tokens) // size), strict=True)


def loss(logits, tokens, temperature: float) -> float:
    z = np.asarray(logits, np.float64) / temperature
    highest = z.max(-1)
    normaliser = highest + np.log(np.exp(z - highest[:, None]).sum(-1))
    return float((normaliser - z[np.arange(len(z)), tokens]).mean())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7, 3.1])
def test_a_known_temperature_is_found(temperature):
    fitted = calibration.fit_temperature(batched(*sampled(temperature, 64_000)))
    np.testing.assert_allclose(fitted, temperature, rtol=0.01)


def test_it_is_the_temperature_of_least_loss():
    """Compared with golden-section search in float64."""
    logits, tokens = sampled(1.31, 3000, seed=1)
    fitted = calibration.fit_temperature([(logits, tokens)])
    low, high = 0.5, 3.0
    for _ in range(60):
        a, b = high - (high - low) * 0.618034, low + (high - low) * 0.618034
        low, high = (low, b) if loss(logits, tokens, a) < loss(logits, tokens, b) else (a, high)
    np.testing.assert_allclose(fitted, (low + high) / 2, rtol=5e-4)


def test_a_minimum_outside_the_range_gives_its_end():
    logits = np.eye(4, dtype=np.float32)
    assert calibration.fit_temperature([(logits, np.arange(4))]) == pytest.approx(1 / 16)  # always right
    assert calibration.fit_temperature([(logits, (np.arange(4) + 1) % 4)]) == pytest.approx(16)  # never


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([], "batches must hold at least one token"),
        ([(np.zeros((2, 3)), np.full(2, -1))], "batches must hold at least one token"),
        ([(np.array([[0.0, -np.inf]]), np.array([1]))], "every target a finite loss"),
        ([(np.array([[0.0, np.nan]]), np.array([0]))], "every target a finite loss"),
    ],
)
def test_batches_that_fit_nothing_are_refused(batches, said):
    with pytest.raises(ValueError, match=said):
        calibration.fit_temperature(batches)


# The calibration error.


def test_error_by_hand():
    confidence, correct = [0.2, 0.4, 0.9, 0.7], [True, False, True, False]  # bins {.2, .4} and {.7, .9}
    error = calibration.expected_calibration_error(confidence, correct, bins=2)
    assert error == pytest.approx(0.5 * abs(0.3 - 0.5) + 0.5 * abs(0.8 - 0.5))
    assert calibration.expected_calibration_error([1.0, 1.0], [True, True]) == 0
    with pytest.raises(ValueError, match=r"confidence and correct must .*; got \(0,\) and \(0,\)"):
        calibration.expected_calibration_error([], [])


def test_error_falls_with_the_fit():
    logits, tokens = sampled(2.0, 20_000)
    temperature = calibration.fit_temperature([(logits, tokens)])

    def error(scaled):
        p = np.asarray(jax.nn.softmax(jnp.asarray(scaled)))
        return calibration.expected_calibration_error(p.max(-1), p.argmax(-1) == tokens)

    before, after = error(logits), error(logits / np.float32(temperature))
    assert before > 0.15 and after < 0.015


# Text.


@given(st.lists(st.integers(0, 30), max_size=5), st.integers(1, 12), st.none() | st.integers(1, 60))
def test_pieces_predict_every_token_once(lengths, context, limit):
    sequences = [[100 * n + i for i in range(length)] for n, length in enumerate(lengths)]
    pieces = calibration.split_sequences(sequences, context, limit)
    targets = [token for piece in pieces for token in piece[1:].tolist()]
    all_targets = [token for sequence in sequences for token in sequence[1:]]
    assert len(set(targets)) == len(targets) == min(len(all_targets), limit or len(all_targets))
    assert set(targets) <= set(all_targets)
    for piece in pieces:
        assert 2 <= len(piece) <= context + 1
        assert np.diff(piece).tolist() == [1] * (len(piece) - 1)


@pytest.mark.parametrize(("context", "tokens"), [(0, None), (4, 0)])
def test_sizes_below_one_are_refused(context, tokens):
    with pytest.raises(ValueError, match=r"must be an integer of at least 1; got 0"):
        calibration.split_sequences([[1, 2]], context, tokens)


@pytest.mark.slow
def test_forced_logits_are_those_of_a_dense_pass(monkeypatch):
    """In chunks, with sequences of several lengths that reuse one cache."""
    monkeypatch.setattr(teacher_forcing, "CHUNK", 16)
    model, texts = tiny.model(), tiny.prompts(50, 2, 33)
    logits: dict[int, list] = {}
    tokens: dict[int, list[int]] = {}
    for number, batch, targets in calibration.teacher_forced(model.decoder, model.params, texts):
        logits.setdefault(number, []).append(np.asarray(batch)[targets >= 0])
        tokens.setdefault(number, []).extend(targets[targets >= 0].tolist())
    for number, text in enumerate(texts):
        length = len(text) - 1
        expected = dense.run(model.decoder, model.params, jnp.asarray([text[:-1]]), length)[0]
        np.testing.assert_allclose(np.concatenate(logits[number]), expected, rtol=2e-4, atol=2e-4)
        assert tokens[number] == text[1:]
    with pytest.raises(ValueError, match=r"tokens must be between 0 and 95; got 96 in sequences\[1\]"):
        list(calibration.teacher_forced(model.decoder, model.params, [[1, 2], [5, 96]]))


@settings(max_examples=5)
@given(st.floats(-0.9, 0.9), st.floats(0.1, 2), st.floats(0, 3))
def test_autoregression_is_recovered(correlation, scale, mean):
    noise = scale * np.random.default_rng(0).standard_normal((4, 5000))
    series = np.zeros_like(noise)
    for t in range(1, noise.shape[1]):
        series[:, t] = correlation * series[:, t - 1] + noise[:, t]
    fitted = calibration.autoregression(list(series + mean))
    np.testing.assert_allclose(
        fitted, (mean, scale, correlation), atol=0.03 + 0.15 * abs(correlation) * scale
    )
    assert calibration.autoregression([np.full(9, 2.0)]) == (2.0, 0.0, 0.0)


@pytest.mark.slow
def test_a_model_is_calibrated_on_what_it_wrote():
    """Text drawn at temperature 1.6 has T_cal 1.6, and the set-points are quantiles of H₁."""
    model, prompts, done = tiny.model(), tiny.prompts(*[1] * 16), []
    written, _, _ = tiny.finish(tiny.begin(prompts, temperature=1.6, max_tokens=100))
    texts = [prompt + text for prompt, text in zip(prompts, written, strict=True)]
    record = calibration.calibrate(
        model.decoder, model.params, texts, context=128, tokens=1500, on_progress=done.append
    )
    assert record.tokens == 1500 and sum(done) == 3000
    np.testing.assert_allclose(record.temperature, 1.6, rtol=0.1)
    assert record.calibrated_loss < record.loss and record.calibrated_error < record.error
    assert record.quantiles == tuple(sorted(record.quantiles))
    assert record.low_entropy < record.target_entropy < record.high_entropy
    assert all(h > plain for h, plain in zip(record.quantiles, record.plain_quantiles, strict=True))
    with pytest.raises(ValueError, match=r"sequences must have at least 64 tokens to predict .*; got 3"):
        calibration.calibrate(model.decoder, model.params, [[1, 2, 3], [4, 5], [6]], context=64)


# The file.

SAVED = Calibration(
    temperature=1.25,
    tokens=5000,
    loss=2.5,
    calibrated_loss=2.25,
    error=0.05,
    calibrated_error=0.01,
    quantiles=(0.0, 0.1, 0.25, 1.0, 2.0, 3.0, 4.0),
    plain_quantiles=(0.0, 0.1, 0.2, 0.9, 1.8, 2.7, 3.6),
    varentropy_quantiles=(0.1, 0.2, 0.5, 1.5, 3.0, 5.0, 6.0),
    target_entropy=1.0,
    low_entropy=0.25,
    high_entropy=2.0,
    mean=1.3333333333,
    scale=0.5,
    correlation=-0.25,
)


def test_what_is_saved_is_loaded(tmp_path):
    calibration.save_calibration(SAVED, tmp_path)
    file = tmp_path / "calibration.json"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    rounded = SAVED._replace(mean=1.33333)  # six digits are kept
    assert calibration.load_calibration(tmp_path) == calibration.load_calibration(file) == rounded
    tree = json.loads(file.read_text())
    assert tree["version"] == 2 and tree["quantiles"]["0.5"] == 1.0
    calibration.save_calibration(SAVED._replace(tokens=64), file)
    assert calibration.load_calibration(file).tokens == 64


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"path must be a file written by .*calibration\.json does not exist"
    ):
        calibration.load_calibration(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: "{", "is not readable JSON"),
        (lambda t: [1], "must hold a JSON object; got list"),
        (lambda t: {**t, "version": 1}, "version must be 2; got 1"),
        (
            lambda t: {k: v for k, v in t.items() if k != "mean"},
            "exactly the fields version, .*; mean is missing",
        ),
        (lambda t: {**t, "date": "today"}, "exactly the fields version, .*; date is unknown"),
        (lambda t: {**t, "temperature": 0}, "temperature must be a number above 0; got 0"),
        (lambda t: {**t, "temperature": True}, "temperature must be a number above 0; got True"),
        (lambda t: {**t, "tokens": 1.5}, "tokens must be an integer of at least 1; got 1.5"),
        (lambda t: {**t, "loss": "2"}, "loss must be a number of at least 0; got '2'"),
        (lambda t: {**t, "error": float("nan")}, "error must be a number of at least 0; got nan"),
        (lambda t: {**t, "correlation": 1}, r"correlation must be a number in \(−1, 1\); got 1"),
        (
            lambda t: {**t, "high_entropy": 0.25},
            "high_entropy must be a number above low_entropy, .*; got 0.25",
        ),
        (lambda t: {**t, "quantiles": [1, 2]}, r"quantiles must be ascending numbers .*; got \[1, 2\]"),
        (lambda t: {**t, "quantiles": {**t["quantiles"], "0.5": 9}}, "quantiles must be ascending"),
        (lambda t: {**t, "plain_quantiles": {"0.5": 9}}, "plain_quantiles must be ascending"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, change, said):
    calibration.save_calibration(SAVED, tmp_path)
    file = tmp_path / "calibration.json"
    changed = change(json.loads(file.read_text()))
    file.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(ValueError, match=said) as caught:
        calibration.load_calibration(tmp_path)
    assert str(file) in str(caught.value)
