"""Second passes: their bytes count, and rules are compared with fixed ε at equal bytes."""

from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.ablation.second_pass import equal_bytes, measure, quartiles, report
from benchmarks.ablation.second_pass.record import (
    DENSE,
    Passes,
    Sizes,
    budget,
    divergence_from,
    pass_names,
    sizes_of,
)
from entropic_jax.analysis.ablation import Subject
from entropic_jax.state.cache import ModelShape

TEXTS, STEPS = 16, 200
LEVELS = ("ε 0.01", "ε 0.1")
POSITIONS = {"ε 0.01": 50.0, "ε 0.1": 20.0, "8 pages": 10.0, DENSE: 100.0}


def passes(useful: bool = True) -> Passes:
    """Steps of which a tenth are hard: few pages harm them a hundred times as much, and H₁ may tell which."""
    rng = np.random.default_rng(0)
    hard = rng.random((TEXTS, STEPS)) < 0.1
    harm = np.where(hard, 1.0, 0.01) * rng.uniform(0.9, 1.1, hard.shape)
    entropy = np.where(hard & useful, 3.0, 1.0) + rng.uniform(0, 0.5, hard.shape)
    share = {"ε 0.01": 0.2, "ε 0.1": 0.5, "8 pages": 1.0, DENSE: 0.0}
    return Passes(
        dict.fromkeys(POSITIONS, entropy),
        {name: harm * x for name, x in share.items()},
        {name: np.full(hard.shape, x) for name, x in POSITIONS.items()},
    )


def recorded(weights: float, rows: int = 1, useful: bool = True) -> equal_bytes.Recorded:
    return equal_bytes.Recorded(passes(useful), Sizes(weights, 1.0), rows)


def test_the_quartiles_of_a_useful_signal_differ_and_those_of_a_shuffled_one_do_not():
    signals = quartiles.signals(passes(), "8 pages")
    lost = passes().divergence["8 pages"][:, 1:]
    useful, shuffled = (
        quartiles.by_quartile(lost, signals[name]) for name in ("cheap pass", "cheap pass, shuffled")
    )
    value, low, high = useful["ratio"]
    assert 30 < low < value < high < 60  # four tenths of the highest quartile are hard steps
    assert shuffled["ratio"][1] < 1 < shuffled["ratio"][2]
    assert np.mean([mean[0] for mean in useful["means"]]) == pytest.approx(lost.mean())
    assert signals["step before"].shape == signals["dense pass"].shape == lost.shape
    np.testing.assert_array_equal(signals["step before"][:, 1:], signals["dense pass"][:, :-1])
    assert quartiles.correlation(lost, lost) == pytest.approx(1)


def test_a_second_pass_reads_the_weights_again_once_for_a_batch():
    signal = np.zeros((TEXTS, STEPS - 1))
    signal[0, :10] = 1.0
    rule = equal_bytes.Rule("8 pages", DENSE, 0.5)
    alone = recorded(1000.0).two_passes(rule, signal)
    part = 10 / (STEPS - 1)
    np.testing.assert_allclose(alone.bytes_read[0], 1010 + part * 1100)
    np.testing.assert_allclose(alone.bytes_read[1:], 1010)
    np.testing.assert_allclose(alone.again, [part, *[0.0] * (TEXTS - 1)])
    batch = recorded(1000.0, rows=8).two_passes(rule, signal)
    np.testing.assert_allclose(batch.bytes_read[0], 125 + 10 + part * (125 + 100))
    np.testing.assert_allclose(batch.bytes_read[1:8], 125 + 10 + part * 125)
    np.testing.assert_allclose(batch.bytes_read[8:], 125 + 10)
    harm = passes().divergence["8 pages"][:, 1:]
    np.testing.assert_allclose(alone.divergence[0], harm[0, 10:].sum() / (STEPS - 1))
    np.testing.assert_allclose(alone.divergence[1:], harm[1:].mean(1))


def test_fixed_limits_are_interpolated_between_their_bytes():
    read, lost = np.array([100.0, 60.0, 20.0]), np.array([0.0, 0.01, 1.0])
    at = lambda level: equal_bytes.at_bytes(read, lost, level)
    assert at(60) == pytest.approx(0.01) and at(20) == pytest.approx(1.0)
    assert at(40) == pytest.approx(0.1)  # the logarithm is linear
    assert at(80) == pytest.approx(0.005) and at(100) == at(120) == 0
    assert at(19) == pytest.approx(1.0)


def test_a_useful_signal_beats_fixed_limits_where_weights_are_light_and_a_shuffled_one_does_not():
    result = {row["name"]: row for row in equal_bytes.summary(recorded(1.0), LEVELS)["levels"]}
    row = result["ε 0.1"]
    value, low, high = row["signals"]["cheap pass"]["ratio"]
    assert low <= value <= high < 0.7
    assert row["signals"]["cheap pass, shuffled"]["ratio"][0] > 1
    assert 0.05 < row["signals"]["cheap pass"]["again"] < 0.2
    assert row["bytes"] == 21 and row["most_again"] == pytest.approx(10 / 101)
    useless = {x["name"]: x for x in equal_bytes.summary(recorded(1.0, useful=False), LEVELS)["levels"]}
    assert useless["ε 0.1"]["signals"]["cheap pass"]["ratio"][0] > 1


def test_a_single_pass_follows_a_signal_without_reading_the_weights_again():
    signal = np.zeros((TEXTS, STEPS - 1))
    signal[:, :10] = 1.0
    outcome = recorded(1000.0).single_pass(equal_bytes.Rule("ε 0.1", DENSE, 0.5), signal)
    part = 10 / (STEPS - 1)
    np.testing.assert_allclose(outcome.bytes_read, 1000 + 20 + part * 80)
    np.testing.assert_allclose(outcome.again, part)
    row = {x["name"]: x for x in equal_bytes.summary(recorded(1.0), LEVELS)["levels"]}["ε 0.01"]
    # Steps are independent: the one before says nothing.
    late, shuffled = (row["signals"][name]["ratio"] for name in equal_bytes.LATE)
    assert late[1] < shuffled[0] < late[2]


def test_weights_alone_may_forbid_a_second_pass():
    rows = equal_bytes.summary(recorded(1e6), LEVELS)["levels"]
    assert all(set(row["signals"]) <= {*equal_bytes.LATE} for row in rows)
    assert all(row["most_again"] < min(equal_bytes.SHARES) for row in rows)
    results = results_of({"1 row": equal_bytes.summary(recorded(1e6), LEVELS)})
    assert {line[6] for line in report.equal_bytes(results)[2]} == {"none: the weights"}
    assert any("exceed the bytes of every ε" in line for line in report.verdict(results))


def results_of(cells: dict) -> dict:
    """The results of a run with one context."""
    cell = {
        "weights": 1.0,
        "dense": 100.0,
        "passes": {name: [x / 100, 0.1] for name, x in POSITIONS.items()},
        "quartiles": {"8 pages": measure.harm(passes(), "8 pages")},
        "equal_bytes": cells,
    }
    about = {"cpu": "a processor", "model": "the embedded model", "date": "2026-01-01", "commit": None}
    return {**about, "texts": TEXTS, "steps": STEPS, "belief_temperature": 1.0, "contexts": {"2048": cell}}


def test_the_report_says_whether_the_bars_are_met():
    results = results_of({"1 row": equal_bytes.summary(recorded(1.0), LEVELS)})
    for title, head, lines in report.tables(results):
        assert title and lines and all(len(line) == len(head) for line in lines)
    assert any("The bar of 0.7 is met at ε 0.01, ε 0.1" in line for line in report.notes(results))
    results["contexts"]["2048"]["quartiles"]["8 pages"]["cheap pass"]["ratio"] = (4.9, 4.0, 6.0)
    assert report.verdict(results)[-1].startswith("The bar is missed everywhere")


def test_first_passes_read_a_sixteenth_and_an_eighth():
    both = Passes({name: np.zeros(1) for name in pass_names(measure.LIMITS, measure.BUDGETS)}, {}, {})
    assert measure.first_passes(both, 2048) == ["8 pages", "16 pages"]
    assert measure.first_passes(both, 7936) == ["31 pages", "62 pages"]


@pytest.mark.parametrize("pages", measure.BUDGETS)
def test_a_budget_chooses_most_of_its_pages_by_attention(pages):
    rules = budget(pages).rules
    assert rules.min_pages == pages and rules.recent_pages >= 1
    assert rules.sink_pages + rules.recent_pages <= pages / 2


def test_a_position_costs_what_the_cache_holds():
    class Decoder(NamedTuple):
        shape: ModelShape

    shape = ModelShape(layers=1, heads=1, kv_heads=1, head_dim=64, vocabulary=8, hidden=4, weights=100)
    params = {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float16)}
    sizes = sizes_of(Subject(Decoder(shape), params))
    assert sizes == Sizes(weights=200.0, position=2 * 64 * 4)


def test_the_divergence_is_that_of_the_distributions():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 3, 7)).astype(np.float32)
    p, q = (np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in (x, y))
    np.testing.assert_allclose(divergence_from(x, y), (p * np.log(p / q)).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(divergence_from(x, x), 0, atol=1e-6)
