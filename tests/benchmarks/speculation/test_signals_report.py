"""The tables of stopping signals, and the sentence that credits a signal."""

from typing import Any

import numpy as np

from benchmarks.speculation.signals import report
from benchmarks.speculation.signals.names import (
    COMPILED,
    DRAFT_ENTROPY,
    EVERY,
    FIXED,
    HEAD,
    LAW,
    MATCH,
    ORACLE,
    PREVIOUS,
    SHUFFLED,
    SUFFIX,
)


def results(signal: float, shuffled: float, spread: float = 0.01) -> dict[str, Any]:
    """Results in which rules take so many seconds for each second of a fixed length, give or take."""
    rng, cells = np.random.default_rng(0), []
    for drafter, name in ((HEAD, DRAFT_ENTROPY), (SUFFIX, MATCH)):
        for context in (512, 2048):
            fixed = rng.uniform(1, 3, 12)
            times = {FIXED: 1.0, name: signal, SHUFFLED: shuffled, LAW: 1.0, ORACLE: 0.5, PREVIOUS: 1.1}
            seconds = {
                rule: (fixed * (factor + (rule != FIXED) * spread * rng.normal(size=12))).tolist()
                for rule, factor in times.items()
            }
            rules = {"seconds": seconds, "chosen": {FIXED: [[4, 0, False, False], [6, 0, False, False]]}}
            cells.append(
                {
                    "drafter": drafter,
                    "context": context,
                    "temperature": 1.0,
                    "texts": list(range(12)),
                    "looped": 1,
                    "tokens": 128,
                    "tested": 900,
                    "acceptance": [0.8, 0.7, 0.9],
                    "edges": [-2.0, -1.0, -0.5],
                    "quartiles": [[0.5, 0.4, 0.6], [0.7, 0.6, 0.8], [0.8, 0.7, 0.9], [1.0, 0.9, 1.0]],
                    "auc": {name: [0.7, 0.6, 0.8], SHUFFLED: [0.5, 0.4, 0.6]},
                    "rules": {COMPILED: rules, EVERY: rules},
                    "passes": {"replayed": 30, "engine": 30},
                }
            )
    run_of = {"cpu": "a processor", "threads": 2, "jax": "0", "model": "embedded", "dtype": "float32"}
    return {**run_of, "date": "2026-01-01", "commit": None, "costs_of": "a processor", "cells": cells}


def test_all_tables_render():
    measured = results(0.9, 1.0)
    for _, header, rows in report.tables(measured):
        assert rows and all(len(row) == len(header) for row in rows)
    first = report.quartiles(measured)[2][0]
    assert first[7] == "0.50, 1.00, 2.00"  # nats, of the likeliest quarter first
    assert first[8] == "1.00 (0.90–1.00)"
    assert any("2 of 4" not in note and "4 of 4" in note for note in report.notes(measured))


def test_a_signal_is_credited_only_if_it_beats_fixed_lengths_and_itself_shuffled():
    assert "gains 11" in report.verdict(results(0.9, 1.0), COMPILED)
    for signal, shuffled in ((0.9, 0.9), (1.0, 1.1), (1.0, 1.0)):
        text = report.verdict(results(signal, shuffled), EVERY)
        assert "gains" not in text and text.count("no gain") == 2


def test_intervals_of_a_rule_are_of_its_ratio():
    measured = results(0.8, 1.0)
    gain = report.gain(measured["cells"][0], COMPILED, DRAFT_ENTROPY, FIXED)
    assert gain is not None and gain.low < 1.25 < gain.high and gain.high - gain.low < 0.05
    assert report.gain(measured["cells"][0], COMPILED, MATCH, FIXED) is None
    # The same texts at a second temperature are not more texts.
    twice = report.pooled([measured["cells"][0]] * 2, COMPILED, DRAFT_ENTROPY, FIXED)
    np.testing.assert_allclose(twice, gain)
    over = report.pooled(measured["cells"][:2], COMPILED, DRAFT_ENTROPY, FIXED)
    assert over is not None and over.high - over.low < 0.05
