"""Generated arrivals have the requested statistics; traces are read in their published formats."""

import json

import numpy as np
import pytest

from entropic_jax.serving.bench.arrivals import (
    PUBLISHED,
    Arrival,
    Lengths,
    draw_lengths,
    drawn,
    drawn_like,
    fitting_factor,
    read_trace,
    scaled,
    times,
)
from entropic_jax.serving.bench.prompts import Prompts, random_tokens
from entropic_jax.serving.request import RequestError


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_their_mean_and_variation(cv):
    seconds = times(100_000, 5.0, cv, np.random.default_rng(0))
    gaps = np.diff(seconds)
    assert seconds[0] == 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)
    assert gaps.min() >= 0


def test_poisson_gaps_are_exponential():
    gaps = np.diff(times(100_000, 1.0, 1.0, np.random.default_rng(1)))
    for level in (0.1, 0.5, 0.9):
        assert np.quantile(gaps, level) == pytest.approx(-np.log(1 - level), rel=0.03)


def test_a_clock():
    assert times(4, 2.0, 0, np.random.default_rng(0)).tolist() == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("which", ["prompt", "output"])
def test_drawn_lengths_have_the_published_statistics(name, which):
    law = getattr(PUBLISHED[name], which)
    lengths = draw_lengths(law, 200_000, np.random.default_rng(0))
    assert lengths.min() >= 1
    # Where κ is small, few lengths are near the median, and a sample has it less exactly.
    assert np.median(lengths) == pytest.approx(law.median, rel=0.08)
    assert lengths.mean() == pytest.approx(law.mean, rel=0.03)
    assert np.quantile(lengths, 0.99) == pytest.approx(law.p99, rel=0.03)


def test_statistics_that_contradict_each_other():
    with pytest.raises(ValueError, match=r"mean must be nearer to the median, .*; got 900"):
        draw_lengths(Lengths(10, 900, 100), 10, np.random.default_rng(0))


def test_like_a_trace():
    arrivals = drawn_like("azure-conversation", 20_000, None, None, 0)
    gaps = np.diff([arrival.time for arrival in arrivals])
    assert 1 / gaps.mean() == pytest.approx(5.5, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(1.1, rel=0.05)
    assert drawn_like("azure-code", 50, 3.0, None, 0)[-1].time <= 50 / 3
    assert drawn_like("azure-code", 50, 3.0, None, 4) == drawn_like("azure-code", 50, 3.0, None, 4)


def test_lengths_between_bounds():
    arrivals = drawn(2000, 1.0, 1.0, (3, 5), (7, 7), 0)
    assert {a.prompt_tokens for a in arrivals} == {3, 4, 5}
    assert {a.output_tokens for a in arrivals} == {7}


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:50.6805900,879,0
"""


def test_azure_trace(tmp_path):
    file = tmp_path / "conv.csv"
    file.write_text(AZURE)
    arrivals = read_trace(file)
    assert [a.time for a in arrivals] == pytest.approx([0, 4, 4.314579], abs=1e-5)
    assert [a[1:3] for a in arrivals] == [(374, 44), (879, 1), (396, 109)]
    assert len(read_trace(file, count=2)) == 2
    assert read_trace(file, rate=1.0)[-1].time == pytest.approx(2)


def test_mooncake_trace_shares_prefixes(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 3]},
        {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [4, 1]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    arrivals = read_trace(file)
    assert [(a.time, a.prompt_tokens, a.output_tokens) for a in arrivals] == [
        (0, 1100, 52),
        (1, 1300, 5),
        (1, 600, 5),
    ]
    for factor, shared in ((1.0, 1024), (0.25, 256)):
        prompts = Prompts(random_tokens(1000, 0), 0, factor)
        a, b, c = (prompts(i, arrival) for i, arrival in enumerate(scaled(arrivals, factor, None)))
        assert [len(a), len(b), len(c)] == [round(n * factor) for n in (1100, 1300, 600)]
        assert a[:shared] == b[:shared]
        assert a[shared:] != b[shared : len(a)]
        assert c[: shared // 2] != a[: shared // 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold at least one request"),
        (
            "a,b\n1,2\n",
            "line 2 must have the columns TIMESTAMP, ContextTokens, GeneratedTokens; 'TIMESTAMP' is missing",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "GeneratedTokens; Invalid isoformat"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,2\n",
            "line 2: lengths must be above 0; got (0, 2)",
        ),
        (
            '{"timestamp": 1}\n',
            "an object with timestamp, input_length, output_length and hash_ids; 'input_length' is missing",
        ),
        ("{\n", "line 1"),
    ],
)
def test_a_wrong_trace_names_its_line(tmp_path, text, said):
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(RequestError) as caught:
        read_trace(file)
    assert said in str(caught.value)


def test_what_is_scaled_fits():
    arrivals = [Arrival(0, 1000 * (i + 1), 100) for i in range(100)]
    factor = fitting_factor(arrivals, 2048)
    fitted = scaled(arrivals, factor, 2048)
    assert 0.01 < factor < 0.03
    assert max(a.prompt_tokens + a.output_tokens for a in fitted) <= 2048
    assert scaled(arrivals, 1e-9, None)[0][1:3] == (1, 1)
    assert scaled([Arrival(0, 50, 5000)], 1.0, 100)[0][1:3] == (1, 99)
    assert fitting_factor(arrivals, 10**9) == 1


def test_prompts_repeat_with_their_seed_only():
    source, arrival = random_tokens(500, 0), Arrival(0, 30, 1)
    assert Prompts(source, 1)(3, arrival) == Prompts(source, 1)(3, arrival)
    assert Prompts(source, 1)(3, arrival) != Prompts(source, 1)(4, arrival)
    assert Prompts(source, 1)(3, arrival) != Prompts(source, 2)(3, arrival)
    assert len(Prompts(source[:7], 0)(0, arrival)) == 30
    assert min(source) >= 31 and max(source) < 500
