"""lm-evaluation-harness over HTTP and with transformers: equal scores on the same model and tasks."""

import json
import shutil

import pytest

from entropic_jax.serving.options.model import EMBEDDED

from .real_server import real_server
from .test_lm_eval import API, evaluate

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Over HTTP the harness keeps room for two tokens, adds no BOS, and takes one whose number is 0 for none.
REFERENCE = {
    "dtype": "float32",
    "device": "cpu",
    "max_length": 254,
    "add_bos_token": False,
    "prefix_token_id": 1,
    "batch_size": 1,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The embedded model with a chat template."""
    pytest.importorskip("transformers", reason="the extra `oracle` is not installed")
    pytest.importorskip("torch", reason="the extra `oracle` is not installed")
    folder = tmp_path_factory.mktemp("model")
    for path in EMBEDDED.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return folder


def samples_of(results, task):
    """What was answered, in the order of the task."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def compare(ours, reference, tasks):
    """Scores agree to 1e-3, texts exactly, and log-probabilities to 1e-3."""
    for task in tasks:
        scores = {name: x for name, x in reference["results"][task].items() if isinstance(x, float)}
        assert scores and ours["results"][task].keys() >= scores.keys()
        for name, score in scores.items():
            assert ours["results"][task][name] == pytest.approx(score, abs=1e-3), (task, name)
        for answers, expected in zip(samples_of(ours, task), samples_of(reference, task), strict=True):
            if task == "write":
                assert answers == expected
                continue
            for answer, other in zip(answers, expected, strict=True):
                value = lambda x: float(x[0] if isinstance(x, tuple | list) else x)
                assert value(answer) == pytest.approx(value(other), abs=1e-3, rel=1e-5)


def test_scores_of_completions(real, directory, tmp_path):
    tasks = ("choice", "write", "rolling")
    arguments = {**API, "base_url": f"{real.url}/v1/completions"}
    ours = evaluate(tmp_path, "local-completions", arguments, tasks)
    reference = evaluate(tmp_path, "hf", {**REFERENCE, "pretrained": str(directory)}, tasks)
    compare(ours, reference, tasks)


@pytest.mark.exhaustive
def test_scores_of_chat_completions(directory, tmp_path):
    options = {"apply_chat_template": True, "tasks": ("write",)}
    with real_server(directory=directory) as live:
        arguments = {"model": "embedded", "base_url": f"{live.url}/v1/chat/completions", "max_retries": 1}
        ours = evaluate(tmp_path, "local-chat-completions", arguments, **options)
    reference = evaluate(tmp_path, "hf", {**REFERENCE, "pretrained": str(directory)}, **options)
    compare(ours, reference, ("write",))
    assert any(text for (text,) in samples_of(ours, "write"))
