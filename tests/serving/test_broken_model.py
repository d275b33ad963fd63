"""A model with NaN logits: each of its requests ends in an error, and the server stays up."""

import dataclasses
import json
import math

import pytest

from entropic_jax import models

ERROR = "the model computed logits that are not numbers"


@pytest.fixture(scope="module")
def broken(directory, tmp_path_factory) -> str:
    """The model of `directory`, changed to compute NaN after the letter x."""
    model = models.load(directory, "float32")
    letter = model.tokenizer.encode("x", special=False)[0]
    embedding = model.params["embed_tokens"]["weight"].at[letter].set(math.nan)
    params = {**model.params, "embed_tokens": {"weight": embedding}}
    path = tmp_path_factory.mktemp("broken")
    models.save(dataclasses.replace(model, params=params), path)
    return str(path)


@pytest.mark.slow
def test_json_of_one_request(entropic, broken):
    status, out, err = entropic("generate", "--model", broken, "--prompt", "x", "--json", "--preset", "off")
    tree = json.loads(out)
    assert (status, tree["finish_reason"], tree["token_ids"], tree["error"]) == (1, "error", [], ERROR)
    assert ERROR in err and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "preset"),
    [(["xa", "x"], "off"), (["x", "abc", "ax", "b"], "meso")],
    ids=["all", "some"],
)
def test_a_batch_file_goes_on(entropic, broken, tmp_path, prompts, preset):
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt, "max_tokens": 4}) for prompt in prompts))
    options = ("--batch-file", str(file), "--preset", preset, "--logit-bias", "89=-inf")
    status, out, _ = entropic("generate", "--model", broken, *options)
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 1 and len(lines) == len(prompts)
    for prompt, line in zip(prompts, lines, strict=True):
        failed = "x" in prompt
        assert (line["finish_reason"] == "error") == failed
        assert (line.get("error"), bool(line["token_ids"])) == (ERROR if failed else None, not failed)
