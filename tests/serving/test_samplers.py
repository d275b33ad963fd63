"""`entropic generate` with complete samplers: streamed text equals returned text, alone or in a batch."""

import json
import shutil

import pytest

from entropic_jax.calibration import load_calibration, save_calibration
from entropic_jax.serving.options.model import EMBEDDED
from tests.marks import exhaustive

SAME = ("--prompt", "abc", "--seed", "3", "--max-tokens", "20")
SAMPLERS = {
    "released": ("--preset", "entropix-as-released"),
    "rows": ("--preset", "entropix", "--branches", "1", "--clarification", " ..."),
    "branches": ("--preset", "entropix", "--branches", "3"),
    "dslider": ("--preset", "dslider"),
}


@pytest.fixture
def exploring(directory, tmp_path):
    """A model with random weights and a calibration under which every step explores."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    record = load_calibration(EMBEDDED)
    entropy, little = (0.01, 0.02, 0.05, 0.1, 9.0, 10.0, 11.0), tuple(1e-6 * n for n in range(7))
    save_calibration(record._replace(quantiles=entropy, varentropy_quantiles=little), tmp_path)
    return str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dslider", *exhaustive("rows", "released", "branches")])
def test_streamed_and_returned_alone_and_in_company(entropic, exploring, tmp_path, name):
    common = ("generate", "--model", exploring, *SAMPLERS[name])
    status, out, err = entropic(*common, *SAME, "--json")
    assert (status, err) == (0, "")
    tree = json.loads(out)
    assert len(tree["token_ids"]) == tree["usage"]["completion_tokens"] <= 20
    assert all(len(values) == len(tree["token_ids"]) for values in tree["trace"].values())
    assert entropic(*common, *SAME) == (0, tree["text"] + "\n", "")
    if name == "released":
        return  # which decides once for the batch
    lines = [
        {"prompt": "abc", "seed": 3, "max_tokens": 20},
        {"prompt": "x" * 200},
        {"prompt": "de", "seed": 1},
    ]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps({"max_tokens": 9, **line}) for line in lines))
    status, out, _ = entropic(*common, "--batch-file", str(file))
    first, second, third = map(json.loads, out.splitlines())
    assert first["token_ids"] == tree["token_ids"]
    assert second["finish_reason"] == "error" and len(third["token_ids"]) <= 9
    stop = tree["text"][5:7]
    stopped = json.loads(entropic(*common, *SAME, "--json", "--stop", stop)[1])
    assert stopped["finish_reason"] == "stop" and stopped["text"] == tree["text"].split(stop, 1)[0]


@pytest.mark.exhaustive
def test_branches_make_a_difference_and_greedy_is_greedy(entropic, exploring):
    run = lambda *arguments: json.loads(
        entropic("generate", "--model", exploring, *arguments, *SAME, "--json")[1]
    )
    texts = {branches: run("--preset", "entropix", "--branches", branches)["token_ids"] for branches in "13"}
    assert texts["1"] != texts["3"]
    greedy = run("--preset", "entropix", "--temperature", "0")["token_ids"]
    assert greedy == run("--temperature", "0")["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--preset", "micro", "--branches", "2"),
            "--branches needs the preset entropix; got the preset micro",
        ),
        (
            ("--preset", "dslider", "--law", "exact"),
            "--law must not be set with the preset dslider; got 'exact'",
        ),
        (("--preset", "entropix"), "--preset must not be entropix for a model without calibration.json"),
        (
            ("--preset", "entropix", "--branches", "0"),
            "--branches must be an integer between 1 and 64; got 0",
        ),
    ],
)
def test_what_cannot_be(entropic, directory, arguments, message):
    status, _, err = entropic("generate", "--model", directory, *arguments, *SAME)
    assert status == 2 and message in err
