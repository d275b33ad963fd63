"""The command line on a model directory with random weights."""

import json

import pytest

from entropic_jax import models
from entropic_jax.models.text_towers import TOWERS


@pytest.mark.slow
def test_json_and_plain_text_agree(entropic, directory):
    common = ("generate", "--model", directory, "--prompt", "abc", "--seed", "3", "--max-tokens", "20")
    status, out, err = entropic(*common, "--json")
    assert (status, err) == (0, "")
    tree = json.loads(out)
    assert tree["usage"]["prompt_tokens"] == 4
    assert tree["usage"]["completion_tokens"] == len(tree["token_ids"]) <= 20
    assert {"entropy", "varentropy", "surprisal", "temperature", "entropic_time"} <= tree["trace"].keys()
    assert all(len(values) == len(tree["token_ids"]) for values in tree["trace"].values())
    assert entropic(*common) == (0, tree["text"] + "\n", "")


@pytest.mark.slow
def test_a_batch_is_what_its_lines_are_alone(entropic, directory, tmp_path):
    lines = [
        {"prompt": "abc", "seed": 3, "max_tokens": 12},
        {"messages": [{"role": "user", "content": "hello"}], "seed": 4, "max_tokens": 5, "temperature": 0},
        {"prompt": "x" * 200, "seed": 5},
    ]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    status, out, _ = entropic("generate", "--model", directory, "--batch-file", str(file))
    assert status == 1  # the last prompt does not fit
    first, second, third = map(json.loads, out.splitlines())
    assert third["finish_reason"] == "error"
    assert "between 1 and 127 tokens; got 201" in third["error"]
    alone = ("--model", directory, "--json", "--seed")
    out = entropic("generate", *alone, "3", "--prompt", "abc", "--max-tokens", "12")[1]
    assert json.loads(out)["token_ids"] == first["token_ids"]
    chat = ("--chat", "--prompt", "hello", "--max-tokens", "5", "--temperature", "0")
    assert json.loads(entropic("generate", *alone, "4", *chat)[1])["token_ids"] == second["token_ids"]


def test_stop_string_ends_the_text(entropic, directory):
    common = (
        "generate",
        "--model",
        directory,
        "--prompt",
        "abc",
        "--seed",
        "3",
        "--max-tokens",
        "20",
        "--json",
    )
    full = json.loads(entropic(*common, "--preset", "off")[1])  # drafts change no token
    stop = full["text"][5:7]
    stopped = json.loads(entropic(*common, "--stop", stop)[1])
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == full["text"].split(stop, 1)[0]
    assert stopped["token_ids"] == full["token_ids"][: len(stopped["token_ids"])]


def test_a_prompt_that_does_not_fit(entropic, directory):
    status, _, err = entropic("generate", "--model", directory, "--prompt", "x" * 200)
    assert status == 2
    assert "between 1 and 127 tokens; got 201" in err


def test_a_directory_without_a_model(entropic, tmp_path):
    status, _, err = entropic("generate", "--model", str(tmp_path), "--prompt", "x")
    assert status == 2
    assert "config.json is missing" in err
    assert err.count("\n") == 1


def test_models_describes_it_and_lists_architectures(entropic, directory, monkeypatch):
    from pathlib import Path

    monkeypatch.setattr("entropic_jax.serving.commands.models.EMBEDDED", Path(directory))
    status, out, _ = entropic("models")
    assert status == 0
    embedded, architectures, towers = out.split("\n\n")
    assert embedded.startswith("embedded\n")
    assert "LlamaForCausalLM" in embedded
    assert architectures.split() == ["architectures", *sorted(models.FAMILIES)]
    assert towers.splitlines()[1:] == [f"  {name}" for name in sorted(TOWERS)]
