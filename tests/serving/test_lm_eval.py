"""lm-evaluation-harness (`local-completions`), unmodified and offline, against a float64 reference."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
import pytest

from entropic_jax.calibration.teacher_forcing import teacher_forced
from entropic_jax.serving.offline.generation import load
from entropic_jax.serving.options.model import EMBEDDED
from entropic_jax.serving.request import Request

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
QUESTIONS = [
    {"text": "import numpy as", "choices": [" np", " pd", " plt"], "gold": 0},
    {"text": "def __init__(", "choices": ["self):", "cls):", "name):"], "gold": 0},
    {"text": "for i in", "choices": [" range(10):", " class", " import"], "gold": 0},
    {"text": "while", "choices": [" True:", " numpy"], "gold": 0},
]
TEXTS = [
    "import os\nimport sys\n\n\ndef main():\n    print(sys.argv)\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n" * 12,
]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{gold}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


API = {  # arguments of `local-completions`
    "model": "embedded",
    "tokenizer_backend": "remote",
    "num_concurrent": 1,
    "max_length": 256,
    "batch_size": 4,
    "max_retries": 1,
}


def evaluate(folder: Path, model: str, arguments: dict, tasks: Iterable[str] = TASKS, **options) -> dict:
    """The harness's results on tasks, which it reads from a folder."""
    lm_eval = pytest.importorskip("lm_eval", reason="the extra `clients` is not installed")
    from lm_eval.tasks import TaskManager

    for name in tasks:
        documents = [{"text": text} for text in TEXTS] if name == "rolling" else QUESTIONS
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        source = {"dataset_path": "json", "dataset_kwargs": files}
        config = {"task": name, "test_split": "test", **source, **TASKS[name]}
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(folder)),
        bootstrap_iters=0,
        log_samples=True,
        cache_requests=False,
        **options,
    )


@pytest.fixture(scope="module")
def results(real, tmp_path_factory):
    arguments = {**API, "base_url": f"{real.url}/v1/completions"}
    return evaluate(tmp_path_factory.mktemp("tasks"), "local-completions", arguments)


def likelihoods(model, sequences) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each sequence, the log-probability of every token but the first, and if it is the likeliest."""
    scores = [([], []) for _ in sequences]
    for number, logits, targets in teacher_forced(model.decoder, model.params, sequences):
        table = np.asarray(jax.nn.log_softmax(logits))
        for row, token in enumerate(targets):
            if token >= 0:
                scores[number][0].append(table[row, token])
                scores[number][1].append(token == table[row].argmax())
    return [(np.array(logprobs), np.array(greedy)) for logprobs, greedy in scores]


def test_multiple_choice(results, real):
    model, encode = real.engine.model, lambda text: real.model.encode(text, special=False)
    samples = sorted(results["samples"]["choice"], key=lambda sample: sample["doc_id"])
    right = 0
    for sample, question in zip(samples, QUESTIONS, strict=True):
        context = encode(question["text"])
        full_texts = [encode(question["text"] + choice) for choice in question["choices"]]
        reference = likelihoods(model, full_texts)
        options = [(float(value), greedy in (True, "True")) for value, greedy in sample["filtered_resps"]]
        sums = [logprobs[len(context) - 1 :].sum() for logprobs, _ in reference]
        assert [value for value, _ in options] == pytest.approx(sums, abs=1e-5)
        assert [greedy for _, greedy in options] == [g[len(context) - 1 :].all() for _, g in reference]
        right += int(np.argmax(sums) == question["gold"])
    assert results["results"]["choice"]["acc,none"] == pytest.approx(right / len(QUESTIONS), abs=1e-6)


def test_generation(results):
    generator = load(EMBEDDED)
    samples = sorted(results["samples"]["write"], key=lambda sample: sample["doc_id"])
    fields = {**generator.defaults, "temperature": 0.0, "max_tokens": 12, "stop": ("\n", "<|end_of_text|>")}
    encode = lambda text: generator.tokenizer.encode(text, special=False)
    requests = [Request(prompt=encode(question["text"]), **fields) for question in QUESTIONS]
    expected = [completion.text for completion in generator.batch(requests)]
    assert [sample["filtered_resps"][0] for sample in samples] == expected


def test_rolling_perplexity(results, real):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    total = characters = 0.0
    for text in TEXTS:
        windows = get_rolling_token_windows(
            token_list=real.model.encode(text, special=False),
            prefix_token=real.model.stop_tokens[0],  # the harness takes a BOS whose number is 0 for none
            max_seq_len=254,  # the harness keeps room for the token that it asks for, and one more
            context_len=1,
        )
        for before, piece in map(make_disjoint_window, windows):
            ((logprobs, _),) = likelihoods(real.engine.model, [[*before, *piece]])
            total += logprobs[-len(piece) :].sum()
        characters += len(text.encode())
    bits = -total / characters / math.log(2)
    assert results["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
