"""Speculation beside other engines: drafting engines, the turns that they take, and their tables."""

import argparse
import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.harness.baselines import drafting_engines
from benchmarks.harness.baselines.drafting_engines import DraftingLlamaCpp, DraftingOurs, Tuned
from benchmarks.harness.baselines.float32_model import write_float32
from benchmarks.harness.baselines.pool import EngineError
from benchmarks.harness.tables import markdown
from benchmarks.speculation.peers import measure, report
from entropic_jax.serving.options.model import EMBEDDED
from entropic_jax.speculation import PassCosts
from tests.clocks import replace_clock


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    pytest.importorskip("ml_dtypes")
    return write_float32(EMBEDDED, tmp_path_factory.mktemp("work"), (0, 5))


def test_the_draft_model_has_some_of_the_layers(work):
    from safetensors.numpy import load_file

    short, full = (load_file(path / "model.safetensors") for path in (work / "huggingface", EMBEDDED))
    assert {name.split(".")[2] for name in short if ".layers." in name} == {"0", "1"}
    assert {name for name in full if ".layers." not in name} <= short.keys()
    for name, weight in short.items():
        source = name.replace(".layers.1.", ".layers.5.")
        assert np.array_equal(weight, full[source].astype(np.float32))
    config = json.loads((work / "huggingface" / "config.json").read_text("utf-8"))
    assert (config["num_hidden_layers"], config["torch_dtype"]) == (2, "float32")


def copying_prompt() -> np.ndarray:
    code = np.random.default_rng(0).integers(10, 4000, 24)
    return np.concatenate([code, code[:8]])[None].astype(np.int32)


@pytest.mark.exhaustive
def test_ours_with_drafts_has_the_tokens_of_plain_decoding(work):
    texts = {}
    for name in ("off", "suffix"):
        engine = DraftingOurs(work, 2, "float32", name)
        engine.costs = PassCosts(
            (1, 2, 4, 8, 16), (1.0, 1.01, 1.02, 1.04, 1.08), (1, 2, 4, 8, 16), (0.0,) * 5
        )
        engine.open(1, 32 + 120)
        first = engine.prefill(copying_prompt())
        rest = engine.decode(120 - first.size)
        texts[name] = [*first[0], *rest[0]]
        assert len(texts[name]) == 120
        assert (engine.passes == rest.size) == (name == "off")
    assert texts["off"] == texts["suffix"]


class CountingLlamaCpp(DraftingLlamaCpp):
    """A model that continues each token by the next larger one, modulo 7, and whose cache is checked."""

    def __init__(self, drafter) -> None:
        self.library = SimpleNamespace(llama_get_memory=lambda context: None, llama_memory_seq_rm=self.remove)
        self.context, self.drafter, self.kept, self.fed = None, drafter, 4, 0
        self.text = np.zeros(64, np.intc)
        self.text[:5], self.length = [2, 3, 4, 5, 6], 4

    def remove(self, memory, row, begin, end) -> None:
        self.kept = begin

    def _feed(self, tokens, positions, rows, with_logits):
        assert positions[0] == self.kept and np.array_equal(np.diff(positions), np.ones(len(tokens) - 1))
        self.fed += len(tokens)
        return (tokens + 1) % 7


@pytest.mark.parametrize(
    ("drafter", "passes"),
    [
        (lambda text: (text[-1] + 1 + np.arange(3)) % 7, 5),
        (lambda text: np.array([(text[-1] + 1) % 7, 99, 99]), 10),
        (lambda text: np.array([99]), 20),
        (lambda text: np.array([], np.intc), 20),
    ],
    ids=["right", "first right", "wrong", "none"],
)
def test_a_lookup_does_not_change_the_tokens(drafter, passes):
    engine = CountingLlamaCpp(drafter)
    assert [*engine.decode(6)[0], *engine.decode(14)[0]] == [(n + 7) % 7 for n in range(20)]
    assert engine.length == engine.kept == 24
    engine = CountingLlamaCpp(drafter)
    engine.decode(20)
    assert engine.passes == passes


def test_the_fastest_setting_is_kept(monkeypatch):
    clock = [0.0]
    replace_clock(monkeypatch, drafting_engines, "perf_counter", lambda: clock[0])

    class Engine(Tuned):
        settings = ({"number": 2}, {"number": 5, "size": 3}, {"number": 10})
        prompts: tuple = ()

        def use(self, setting):
            self.number = setting["number"]

        def prefill(self, prompts):
            self.prompts += (prompts.tolist(),)
            return np.zeros(2)

        def decode(self, steps):
            assert steps == 6
            first = len(self.prompts) <= 3  # in which the second would be the slowest
            clock[0] += 50.0 if first and self.number == 5 else abs(self.number - 5) + 1.0
            return np.zeros(steps)

    engine = Engine()
    engine.tune(np.array([[1], [2]]), 8)
    assert engine.number == 5 and engine.detail == "number 5, size 3"
    assert engine.prompts == ([[1]],) * 3 + ([[2]],) * 3


OPTIONS = argparse.Namespace(
    model=EMBEDDED, context=64, prompts=2, tokens=12, repeat=2, threads=2, limit=1.0, draft_layers=[0, 5]
)


class FakePool:
    """Engines that count from the last token of the prompt; `openvino-draft` fails on its second text."""

    def __init__(self, directory) -> None:
        self.directory, self.interpreters, self.versions = directory, {}, {"ours": "1"}
        self.last, self.calls = {}, []

    def call(self, name, method, *arguments):
        self.calls.append((name, method))
        if method == "prefill":
            self.last[name] = int(np.load(arguments[0])[0, -1])
            if name == "openvino-draft" and self.calls.count((name, method)) == 2:
                raise EngineError("out of memory")
            first = 2 if name == "ours-suffix" else 1
            return {"tokens": [[self.last[name] + 1 + i for i in range(first)]]}
        if method == "decode":
            tokens = [self.last[name] + 1 + 12 - arguments[0] + i for i in range(arguments[0])]
            if name == "llamacpp-lookup":
                tokens[3] = 0
            seconds = {"ours-auto": 0.5, "ours-suffix": 1.0}.get(name, 2.0)
            return {
                "tokens": [tokens],
                "seconds": seconds,
                "passes": 4 if "-" in name else None,
                "detail": "",
            }
        return {"detail": "num_pred_tokens 5", "tokens": None}


@pytest.fixture
def results(tmp_path, monkeypatch):
    prepared = []
    pool = SimpleNamespace(prepare=prepared.append)
    monkeypatch.setattr(measure, "EnginePool", lambda *arguments: pool)
    engines = FakePool(tmp_path)
    options = argparse.Namespace(**vars(OPTIONS), engines=list(measure.ENGINES))
    measured = measure.measure(engines, options, lambda text: None)
    assert prepared == ["openvino"], "the draft model is converted"
    described = {"cpu": "", "threads": 2, "model": "m", "date": "2026-01-01", "commit": "0123abc"}
    return {**described, "context": 64, "tokens": 12, "draft_layers": [0, 5], "versions": {}, **measured}


def test_rates_are_of_the_tokens_after_the_first_event(results):
    (_, header, rows), (_, _, agreement) = report.tables(results)
    assert all(len(row) == len(header) for row in rows)
    by_name = {row[0]: row[2:] for row in rows}
    assert by_name["ours-off"] == ["6 (6–6)", "1", "4.00 (4.00–4.00)", "2.75"]
    assert by_name["ours-suffix"] == ["10 (10–10)", "1.82 (1.82–1.82)", "2.20 (2.20–2.20)", "2.50"]
    assert by_name["ours-auto"] == ["22 (22–22)", "4.00 (4.00–4.00)", "1", "2.75"]
    assert by_name["openvino"][1:] == ["1", "4.00 (4.00–4.00)", "1.00"]
    tokens = {row[0]: row[1:] for row in agreement}
    assert tokens["ours-suffix"] == ["2 of 2", "–", "4 of 4"]
    assert tokens["llamacpp-lookup"] == ["0 of 2", "4", "4 of 4"]


def test_a_failure_is_reported_and_settings_are_tried_on_other_prompts(results):
    assert results["failures"] == {"openvino-draft": "out of memory"}
    text = markdown(report.tables(results), report.notes(results), "")
    assert "openvino-draft failed: out of memory" in text
    tuned = {name for name, chosen in results["settings"].items() if chosen}
    assert tuned == {"openvino-lookup", "openvino-draft", "llamacpp-lookup"}


def test_looping_texts_are_left_out():
    looping = {"texts": [{"loops": True}, {"loops": False}]}
    assert report.kept_texts(looping) == [1]
    assert report.kept_texts({"texts": [{"loops": True}]}) == [0]


@pytest.mark.parametrize(
    ("text", "other", "first"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2)],
)
def test_the_first_difference(text, other, first):
    assert measure.first_difference(text, other) == first
