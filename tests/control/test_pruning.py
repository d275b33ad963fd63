"""The laws of ε: bounds, patience, and behaviour under uncertainty."""

from dataclasses import fields

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.control import chain
from entropic_jax.control.entropy_drop import AR1
from entropic_jax.control.laws import LAWS
from entropic_jax.control.pruning import FixedPruning, LinearPruning, Pruning, limit_at_entropy
from entropic_jax.methods.presets import PRESETS, Gains, preset, pruning_law
from entropic_jax.state import plain_action, quiet_signal

LAW = Pruning(dropped_mass_limit=0.2, low_entropy=0.5, high_entropy=2.5, smoothing=0.5, rate=0.05, patience=0)


def drops(law, entropies, rows: int = 1) -> np.ndarray:
    """The ε after each of a series of entropies."""
    action = plain_action(jnp.ones(rows))
    start = (action, law.init(action))

    def body(carry, entropy):
        action, state = carry
        signal = quiet_signal(rows)._replace(
            entropy=jnp.broadcast_to(entropy, rows), emitting=jnp.ones(rows, bool)
        )
        action, state = law.update(signal, action, state)
        return (action, state), action.dropped_mass_limit

    _, series = jax.lax.scan(body, start, jnp.asarray(entropies, jnp.float32))
    return np.asarray(series)[:, 0]


def oracle(law: Pruning, entropies) -> np.ndarray:
    drop, mean, out = 0.0, None, []
    for seen, h in enumerate(entropies):
        known = np.isfinite(h)
        mean_now = h if mean is None else mean + law.smoothing * (h - mean)
        mean_now = max(mean_now, law.entropy_floor) if known else mean_now
        doubt = max(mean_now, h) + law.entropy_error
        share = np.clip((law.high_entropy - doubt) / (law.high_entropy - law.low_entropy), 0, 1)
        expected = law.dropped_mass_limit * share if known and seen >= law.patience else 0.0
        if expected <= drop:
            drop = expected
        elif expected - drop > law.hysteresis:
            drop = drop + min(expected - drop, law.rate)
        mean = mean_now if known else mean
        out.append(drop)
    return np.array(out)


@pytest.mark.parametrize(
    "change", [{}, dict(entropy_error=0.7), dict(hysteresis=0.03), dict(patience=4), dict(entropy_floor=1.5)]
)
def test_the_law_is_what_its_docstring_says(change):
    law = Pruning(**{**{f: getattr(LAW, f) for f in LAW.__dataclass_fields__}, **change})
    entropies = np.random.default_rng(0).gamma(1.0, 1.2, 60)
    np.testing.assert_allclose(drops(law, entropies), oracle(law, entropies), atol=1e-6)


@pytest.mark.parametrize(("hysteresis", "expected"), [(0.125, 0.0), (0.1249, 0.125)])
def test_an_increase_of_the_size_of_the_hysteresis_is_not_made(hysteresis, expected):
    law = Pruning(0.25, low_entropy=0.5, high_entropy=2.5, hysteresis=hysteresis, rate=1.0, patience=0)
    assert drops(law, [1.5]).tolist() == [expected]  # half of the largest limit, without rounding


def test_doubt_closes_at_once_and_certainty_opens_slowly():
    series = drops(LAW, [0.1] * 10 + [4.0] + [0.1] * 10)
    assert series[9] == pytest.approx(0.2) and series[10] == 0
    assert np.all(np.diff(series[10:]) <= 0.05 + 1e-6)


def test_an_uncertain_estimate_never_drops_more():
    entropies = np.random.default_rng(1).gamma(1.0, 1.2, 60)
    certain, doubtful = (
        drops(LAW, entropies),
        drops(
            Pruning(dropped_mass_limit=0.2, low_entropy=0.5, high_entropy=2.5, entropy_error=0.5), entropies
        ),
    )
    assert (doubtful <= certain + 1e-6).all()


@pytest.mark.parametrize("law", [LAW, LinearPruning(), FixedPruning()])
def test_what_is_no_number_poisons_nothing(law):
    series = drops(law, [0.1, 0.1, np.nan, np.inf, 0.1, 0.1, 0.1, 0.1])
    assert np.isfinite(series).all() and (series >= 0).all() and (series < 1).all()
    if not isinstance(law, FixedPruning):
        assert series[2] == series[3] == 0 and series[-1] > 0


def test_thresholds_are_ends_of_the_opening():
    np.testing.assert_allclose(
        limit_at_entropy(jnp.array([0.0, 0.5, 1.5, 2.5, 9.0]), 0.5, 2.5, 0.2),
        [0.2, 0.2, 0.1, 0, 0],
        atol=1e-6,
    )


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("width", [None, 2])
def test_every_preset_keeps_the_contract(name, width):
    chosen = preset(name, width)
    action = plain_action(jnp.array([0.0, 0.7, 1.0]))
    signal = quiet_signal(3)._replace(
        entropy=jnp.full(3, 0.1),
        emitting=jnp.ones(3, bool),
        runnable=jnp.ones(3, bool),
        logits=jnp.linspace(-1, 1, 12).reshape(3, 4),
    )
    state = chosen.controller.init(action)
    after = chosen.controller.update(signal, action, state)
    chex.assert_trees_all_equal_shapes_and_dtypes((action, state), after)
    assert after[0].temperature[0] == 0  # greedy stays greedy
    assert (chosen.page_policy is not None) == (name in ("meso-lossy", "full-lossy", "paper"))
    assert (chosen.width is not None) == (
        width is not None and name in ("macro", "full", "full-lossy", "paper")
    )


def test_the_limit_of_a_preset_is_fixed_after_its_first_tokens():
    law = pruning_law(Gains(dropped_mass_limit=0.04))
    limits = drops(law, np.random.default_rng(0).uniform(0, 6, 40))
    np.testing.assert_array_equal(limits[: law.patience], 0)
    np.testing.assert_array_equal(limits[law.patience :], drops(FixedPruning(0.04), np.zeros(36)))


def test_off_is_the_null_controller():
    assert preset("off").controller == chain()


@pytest.mark.parametrize("law", LAWS)
def test_every_law_of_temperature_can_be_named(law):
    action = plain_action(jnp.ones(1))
    chosen = preset("micro", gains=Gains(law=law))
    assert chosen.controller.init(action) is not None


def test_unknown_names_are_refused():
    for options in (
        dict(name="best"),
        dict(name="micro", gains=dict(law="magic")),
        dict(name="off", gains=dict(schedule="lottery")),
    ):
        with pytest.raises(ValueError, match="must be one of"):
            preset(options["name"], gains=Gains(**options.get("gains", {})))


@pytest.mark.parametrize("width", [None, 2])
def test_the_paper_preset_differs_from_full_lossy_in_the_printed_laws_alone(width):
    gains = Gains(
        target_entropy=1.4, highest_temperature=1.2, dropped_mass_limit=0.05, prior=AR1(1.0, 2.0, 0.3)
    )
    full, paper = preset("full-lossy", width, gains), preset("paper", width, gains)
    assert (paper.page_policy, paper.width) == (full.page_policy, full.width)
    pairs = list(zip(full.controller.controllers, paper.controller.controllers, strict=True))
    kinds = [(type(a).__name__, type(b).__name__) for a, b in pairs]
    assert (
        kinds
        == [
            ("Normalised", "Paper"),
            ("Pruning", "Pruning"),
            ("Scheduling", "PaperScheduling"),
        ][: len(pairs)]
    )
    for ours, printed in pairs:
        for field in {f.name for f in fields(ours)} & {f.name for f in fields(printed)} - {"rate"}:
            assert getattr(ours, field) == getattr(printed, field), field
