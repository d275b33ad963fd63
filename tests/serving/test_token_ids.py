"""`entropic generate` and `LLM` refuse token ids outside the vocabulary, as the HTTP API does."""

import json

import pytest

from entropic_jax import LLM, SamplingParams
from tests.serving.test_llm import SIZES
from tests.shallow_model import shallow_model

OPTIONS = {"--stop-token-ids": "{}", "--logit-bias": "{}=1.5"}


@pytest.mark.parametrize("form", ["text", "json", "batch"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_token_id_outside_the_vocabulary_is_refused_by_the_options_name(
    entropic, directory, tmp_path, option, form
):
    (lines := tmp_path / "lines").write_text('{"prompt": "x"}\n')
    source = ("--batch-file", str(lines)) if form == "batch" else ("--prompt", "x")
    command = ("generate", "--model", directory, "--preset=off", "--max-tokens=1", *source)
    command += ("--json",) * (form == "json")
    status, out, err = entropic(*command, f"{option}={OPTIONS[option].format(258)}")
    assert (status, out) == (2, "")
    assert err.endswith(f"error: {option} must hold token ids between 0 and 257; got 258\n"), err
    if form == "text":
        assert entropic(*command, f"{option}={OPTIONS[option].format(257)}")[0] == 0


def test_a_line_of_a_batch_with_such_a_token_id_fails_alone(entropic, directory, tmp_path):
    lines = [{"prompt": "x", "stop_token_ids": [token]} for token in (257, 300)]
    (path := tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)))
    command = ("generate", "--model", directory, "--preset=off", "--max-tokens=1", "--batch-file", str(path))
    status, out, _ = entropic(*command)
    assert status == 1
    first, second = map(json.loads, out.splitlines())
    assert first["finish_reason"] == "length"
    assert second["finish_reason"] == "error"
    assert second["error"] == "stop_token_ids must hold token ids between 0 and 257; got 300"


@pytest.fixture(scope="module")
def llm():
    with LLM(shallow_model(), preset="off", seed=0, **SIZES) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "allowed_token_ids"])
def test_a_token_id_outside_the_vocabulary_is_refused_by_name(llm, name):
    vocabulary = llm._engine.model.config.vocab_size
    for token, accepted in ((vocabulary - 1, True), (vocabulary, False)):
        params = SamplingParams(max_tokens=1, **{name: {token: 1.0} if name == "logit_bias" else [token]})
        if accepted:
            assert len(llm.generate("x", params)) == 1
            continue
        message = rf"^{name} must hold token ids between 0 and {vocabulary - 1}; got {vocabulary}$"
        with pytest.raises(ValueError, match=message):
            llm.generate("x", params)
