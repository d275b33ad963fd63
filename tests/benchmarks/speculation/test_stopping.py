"""Stopping rules on records with a known answer: a signal is worth what it says about acceptance."""

import itertools

import numpy as np
import pytest

from benchmarks.harness.intervals import ratio_interval
from benchmarks.speculation.signals.stopping import (
    CAPS,
    Calibration,
    Drafts,
    Form,
    Rule,
    candidates,
    draft_lengths,
    evaluate,
    oracle,
    seconds,
)

K = 15
STEP, PASS, TOKEN = 0.3, 1.0, 0.1  # seconds: a draft step; a pass, and each token that it verifies


def text_of(seed: int, positions: int = 160, informative: bool = True) -> Drafts:
    """Drafts that agree with the text or not, token by token, at even odds of 0.95 and 0.3.

    The signal "odds" says which odds a token had if it is informative, and is noise otherwise.
    """
    rng = np.random.default_rng(seed)
    likely = rng.random((positions, K)) < 0.7
    agrees = rng.random((positions, K)) < np.where(likely, 0.95, 0.3)
    noise = rng.normal(size=(positions, K))
    values = likely + 0.1 * noise if informative else noise
    exchanged = values[rng.permutation(positions)]
    return Drafts(
        np.cumprod(agrees, 1).sum(1),
        np.full(positions, K),
        {"odds": values, "shuffled": exchanged},
        np.full(positions, STEP),
        np.broadcast_to(PASS + TOKEN * np.arange(K + 1), (positions, K + 1)),
    )


@pytest.mark.parametrize("informative", [True, False])
def test_a_signal_gains_over_fixed_lengths_and_over_itself_shuffled_if_it_is_informative(informative):
    texts = [text_of(seed, informative=informative) for seed in range(16)]
    fixed = evaluate(texts, None, Form()).seconds
    signal, shuffled = (evaluate(texts, name, Form()).seconds for name in ("odds", "shuffled"))
    over_fixed, over_shuffled = ratio_interval(fixed, signal), ratio_interval(shuffled, signal)
    if informative:
        assert over_fixed.low > 1.03 and over_shuffled.low > 1.03
    else:
        assert over_fixed.low <= 1 and over_shuffled.low <= 1
        assert over_fixed.value == pytest.approx(1, abs=0.05)
    assert (np.array([oracle(text) for text in texts]) <= np.minimum(fixed, signal) + 1e-9).all()


def test_the_seconds_of_a_rule_are_those_of_its_passes():
    text = text_of(3, positions=40)
    for rule in (Rule(0), Rule(3), Rule(15), Rule(7, 0.5), Rule(7, 0.5, keeps=True)):
        calibration = Calibration.fit([text], "odds")
        drafted, verified = (x[0] for x in draft_lengths(text, "odds", Form(), calibration, [rule]))
        position, spent, passes = 0, 0.0, 0
        while position < 40:
            number = verified[position]
            assert number <= drafted[position] <= min(rule.cap, 39 - position)
            spent += drafted[position] * STEP + PASS + TOKEN * number
            position += min(number, text.accepted[position]) + 1
            passes += 1
        assert position == 40
        assert seconds(text, drafted[None], verified[None])[0] == pytest.approx(spent)
        assert (passes == 40) == (rule.cap == 0)


def test_a_token_below_the_threshold_is_drafted_before_it_is_seen_unless_its_signal_is_known_before():
    text = text_of(5, positions=30)
    values = text.signals["odds"]
    calibration = Calibration.fit([text], "odds")
    rules = [Rule(15, 0.5), Rule(15, 0.5, keeps=True)]
    drafted, verified = draft_lengths(text, "odds", Form(), calibration, rules)
    passing = (np.minimum.accumulate(values, 1) >= 0.5).sum(1)
    np.testing.assert_array_equal(verified[0], np.minimum(passing, text.room))
    np.testing.assert_array_equal(drafted[0], np.minimum(passing + 1, text.room))
    np.testing.assert_array_equal(drafted[1], verified[1])
    np.testing.assert_array_equal(drafted[1], drafted[0])
    drafted, verified = draft_lengths(text, "odds", Form(known_before=True), calibration, rules[:1])
    np.testing.assert_array_equal(drafted, verified)
    np.testing.assert_array_equal(drafted[0], np.minimum(passing, text.room))


def test_the_oracle_is_the_best_of_all_choices():
    text = text_of(9, positions=9)
    # All drafts of at most three tokens, from every position.
    lengths = np.array(list(itertools.product(range(4), repeat=9)))
    lengths = np.minimum(lengths, text.room)
    best = seconds(text, lengths, lengths).min()
    capped = text._replace(offered=np.minimum(text.offered, 3))
    assert oracle(capped) == pytest.approx(best)
    assert oracle(text) <= best + 1e-9


def test_calibration_is_the_share_that_was_accepted_among_tested_tokens():
    texts = [text_of(seed, positions=2000) for seed in range(3)]
    calibration = Calibration.fit(texts, "odds")
    assert calibration(np.array(1.0)) == pytest.approx(0.95, abs=0.02)
    assert calibration(np.array(0.0)) == pytest.approx(0.3, abs=0.04)


def test_fixed_lengths_are_among_the_choices_of_every_signal():
    texts = [text_of(seed) for seed in range(2)]
    rules = candidates(texts, "odds", Form(), Calibration.fit(texts, "odds"))
    assert rules[: len(CAPS)] == [Rule(cap) for cap in CAPS]
    products = {rule.product for rule in rules}
    assert products == {False, True}
    without = candidates(
        texts, "odds", Form(known_before=True, products=False), Calibration.fit(texts, "odds")
    )
    assert not any(rule.product or rule.keeps for rule in without)


def test_a_rule_is_chosen_on_the_other_half_of_the_texts():
    # Every other text accepts everything, the rest nothing: what is chosen on one half fails on the other.
    all_or_none = [text_of(seed)._replace(accepted=np.full(160, K if seed % 2 else 0)) for seed in range(4)]
    result = evaluate(all_or_none, None, Form())
    assert [rule.cap for rule in result.rules] == [0, 15]
    assert result.seconds[0] == pytest.approx(160 * (PASS + 15 * (STEP + TOKEN)), rel=0.1)
    assert result.seconds[1] == pytest.approx(160 * PASS)
    with pytest.raises(ValueError, match="texts must be at least 2"):
        evaluate(all_or_none[:1], None, Form())
