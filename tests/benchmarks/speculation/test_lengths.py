"""Fixed draft lengths draft, verify and emit what they should; the tables name the best of them."""

from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.speculation.lengths import report
from benchmarks.speculation.lengths.fixed import FixedLength, arms, endless, fixed
from benchmarks.speculation.lengths.measure import workloads
from entropic_jax import allocate, chain, generate, parameters, start
from entropic_jax.speculation import Cascade, PassCosts, make_speculator
from tests.speculation.test_head import headed
from tests.tiny import prompts

SIZES = 1, 2, 4, 8, 16
COSTS = PassCosts(SIZES, (1.0, 1.1, 1.2, 1.4, 1.9), SIZES, (0.0,) * 5, (5.0, 1e-3), 0, (5.0, 0.0))
TOKENS = 20


def run(speculator: Any) -> tuple[list[int], list[int]]:
    """A text, and the tokens that were verified in each of its passes."""
    decoder, params = headed()
    state = start(
        decoder,
        params,
        chain(),
        allocate(decoder.shape, 1, 128, page_size=8),
        prompts(20),
        key=jax.random.key(7),
        max_tokens=TOKENS,
        sample=parameters(1, temperature=0.7),
        speculator=speculator,
    )
    _, trace = generate(decoder, params, chain(), state, 64, speculator=speculator)
    emitted = np.asarray(trace.emitted[:, 0])
    first = ~np.asarray(trace.from_draft)[emitted, 0]
    return np.asarray(trace.token)[emitted, 0].tolist(), np.asarray(trace.num_drafted)[emitted, 0][
        first
    ].tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "length"),
    [("pruned", 3), ("head", 6), ("auto", 2)],
)
def test_a_fixed_length_is_verified_in_every_pass_though_the_law_would_draft_nothing(name, length):
    plain, _ = run(None)
    text, verified = run(fixed(name, length, COSTS, True))
    assert text == plain
    # The last passes have no room for as many tokens; a suffix match may offer fewer.
    assert verified[0] == length and set(verified[:-length]) <= {length}
    if name == "pruned":
        law, drafted = run(make_speculator(name, 1, 15, COSTS))
        assert law == plain and not any(drafted)  # a step costs five passes


def test_a_fixed_length_has_a_pass_of_just_its_size():
    for length in (1, 3, 6, 15):
        law = fixed("suffix", length, COSTS, False).law
        assert isinstance(law, FixedLength) and law.widths[-1] == length + 1


def test_an_endless_cascade_has_the_drafters_of_the_other():
    cascade = make_speculator("auto", 1, 15, COSTS, True).drafter
    without = endless(cascade)
    assert isinstance(without, Cascade) and without.law is cascade.law
    for drafter, before in zip(without.drafters, cascade.drafters, strict=True):
        assert isinstance(drafter, type(before)) and drafter.most_tokens == 15


def test_the_arms_are_plain_decoding_the_law_and_the_lengths():
    names = arms("auto", [1, 4], COSTS, True)
    assert list(names) == ["off", "law", "1", "4"] and names["off"] is None


def measured(of_law: tuple[float, float], **lengths: tuple[float, float]) -> dict[str, Any]:
    """Results of two workloads, with the seconds of every arm in each of them."""
    rates = []
    for number, workload in enumerate(workloads([64, 512])[:2]):
        seconds = {"off": 10.0, "law": of_law[number]}
        seconds |= {name[1:]: values[number] for name, values in lengths.items()}
        for prompt in range(3):
            counts = {"tokens": 8, "passes": 4, "drafted": 4, "accepted": 2, "equal": 8}
            of_arms = {arm: {"seconds": value, **counts} for arm, value in seconds.items()}
            loops = prompt == 2
            if loops:
                of_arms["law"] = of_arms["law"] | {"seconds": 99.0}
            rates.append(
                {"drafter": "auto", **workload._asdict(), "prompt": prompt, "loops": loops, "arms": of_arms}
            )
    run_of = {"cpu": "a processor", "threads": 2, "jax": "0", "model": "embedded", "dtype": "float32"}
    return {**run_of, "date": "2026-01-01", "commit": None, "rates": rates}


def test_the_law_is_compared_with_the_best_length_of_each_workload_and_of_the_mix():
    results = measured((5.0, 5.0), _2=(4.0, 9.0), _4=(8.0, 5.5))
    _, _, rows = report.against_best(results)
    assert [row[4] for row in rows] == ["2", "4"] and [row[5] for row in rows] == ["0.800", "1.100"]
    assert [row[-1] for row in rows] == ["no", "yes"]
    (row,) = report.mix(results)[2]
    assert row[1] == "2.00" and row[2] == "1.300 (2)" and row[3] == "1.300 (2)"
    assert row[-1] == "yes"
    (row,) = report.mix(measured((5.0, 5.0), _2=(4.0, 5.5)))[2]
    assert row[2] == "0.950 (2)" and row[-1] == "no"


def test_texts_that_loop_are_left_out_and_all_tables_render():
    results = measured((5.0, 5.0), _2=(4.0, 9.0))
    for _, header, rows in report.tables(results):
        assert rows and all(len(row) == len(header) for row in rows)
    assert "5.00" not in str(report.speeds(results)) and report.notes(results)
