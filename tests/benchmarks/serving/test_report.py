"""The tables of the serving benchmark match its rows."""

import pytest

from benchmarks.harness.tables import markdown
from benchmarks.serving import report
from benchmarks.serving.workload import TextPrompts
from entropic_jax.serving.bench.arrivals import Arrival
from entropic_jax.serving.bench.prompts import Prompts
from entropic_jax.serving.options.model import EMBEDDED

RATES = {"ours, served": (300, 330), "ours": (330, 300), "transformers": (100, 110)}
RESULTS = {
    "cpu": "a processor",
    "threads": 2,
    "date": "2026-01-01",
    "load_average": 0.1,
    "utilisation": 0.9,
    "versions": {"ours": "entropic_jax"},
    "failures": {"llama_cpp.server": "it is not installed"},
    "studies": {
        "throughput": [
            {"engine": engine, "repetition": i, "rate": rate}
            for engine, rates in RATES.items()
            for i, rate in enumerate(rates)
        ],
        "latency": [{"length": 128, "repetition": 0, "served": 15.0, "bare": 10.0}],
        "load": [
            {
                **dict(limits="512 for all", policy=policy, repetition=i, rate=2.0, bound=4000.0, equal=1.0),
                **dict(mean=mean, p95=3 * mean, longest_wait=mean, within=0.5),
                **dict(length_mean=40.0, length_p50=20.0, length_p99=300.0),
            }
            for policy, means in (("fcfs", (1000.0, 1000.0)), ("predicted", (800.0, 900.0)))
            for i, mean in enumerate(means)
        ],
    },
}


def test_ratios_are_of_the_same_repetition():
    grids = {title: rows for title, _, rows in report.tables(RESULTS)}
    served, bare, static = grids["64 requests at a time"]
    assert served[1:] == ["315 (300–330)", ""]
    assert bare[2] == "1 (0.909–1.1)×"
    assert static == ["transformers, static batches", "105 (100–110)", "3 (3–3)×"]
    assert grids["First token of a lone request, p50"] == [
        ["128", "15 (15–15)", "10 (10–10)", "1.5 (1.5–1.5)"]
    ]
    fcfs, predicted = grids["Under load: more sequences than rows"]
    assert fcfs[:4] == ["512 for all", "fcfs", "1 (1–1)", ""]
    assert predicted[1:4] == ["predicted", "0.85 (0.8–0.9)", "0.85 (0.8–0.9)"]


def test_a_failure_is_reported():
    text = markdown(report.tables(RESULTS), report.notes(RESULTS), "")
    assert "llama_cpp.server failed: it is not installed" in text
    assert "90% of what first come" in text


@pytest.mark.parametrize("index", [0, 5])
def test_prompts_as_text_are_the_same_prompts(index):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    source = tokenizer.encode("def add(a, b):\n    return a + b\n" * 50, add_special_tokens=False).ids
    prompts, arrival = Prompts(source, 3), Arrival(0.0, 40, 1)
    text = TextPrompts(prompts, EMBEDDED)(index, arrival)
    assert tokenizer.decode(prompts(index, arrival)) == text
    assert 35 <= len(tokenizer.encode(text, add_special_tokens=False).ids) <= 45
