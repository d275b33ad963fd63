"""Default sampling parameters of a server: where they come from, and what overrides them."""

import json
import os

import pytest

from entropic_jax.parameter_tables.sampling_params import PARAMETERS
from entropic_jax.serving.options import generation_config
from entropic_jax.serving.request import RequestError


def test_the_override_comes_before_the_config():
    defaults = generation_config.sampling_defaults(
        {"temperature": 0.8, "top_k": 40, "eos_token_id": 2},
        generation_config.override('{"temperature": 0.5, "stop": "END", "repetition_penalty": 1.1}'),
    )
    assert defaults == {"temperature": 0.5, "top_k": 40, "stop": ("END",), "repetition_penalty": 1.1}


def test_the_source_of_the_config(tmp_path):
    assert generation_config.read("auto") is None and generation_config.read("vllm") == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5}))
    assert generation_config.sampling_defaults(generation_config.read(str(tmp_path)) or {}) == {"top_p": 0.5}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(
        RequestError, match=r"--generation-config must be auto, vllm or a folder with .* not JSON"
    ):
        generation_config.read(str(tmp_path))
    with pytest.raises(RequestError, match=r"^generation_config.json: top_p must be .*; got 3"):
        generation_config.sampling_defaults({"top_p": 3})


@pytest.mark.parametrize(
    ("make", "reason"),
    [(os.mkfifo, "no regular file"), (lambda file: file.write_text("[" * 10**5), "not JSON")],
)
def test_a_config_that_cannot_be_read(tmp_path, make, reason):
    make(tmp_path / "generation_config.json")
    with pytest.raises(RequestError, match=f"--generation-config must be auto, .*{reason}"):
        generation_config.read(str(tmp_path))


def test_every_sampling_parameter_of_the_table_can_be_overridden():
    without = {"max_tokens", "seed", "n", "logprobs", "prompt_logprobs"}  # of a request alone
    assert set(generation_config.OVERRIDABLE) == set(PARAMETERS) - without
    for name in without:
        with pytest.raises(RequestError, match=f"^--override-generation-config has no parameter {name}; "):
            generation_config.override(json.dumps({name: 1}))


def test_a_server_samples_by_its_defaults(live, monkeypatch):
    import dataclasses

    import httpx2

    model = dataclasses.replace(live.model, defaults={"top_k": 7, "stop": ("@",)})
    monkeypatch.setattr(live.frontend, "model", model)
    for stated, top_k in (({}, 7), ({"top_k": 3}, 3)):
        body = {"prompt": "x", "max_tokens": 1, **stated}
        assert httpx2.post(f"{live.url}/v1/completions", json=body).status_code == 200
        request = live.engine.engine_requests[-1].request
        assert (request.top_k, request.stop) == (top_k, ("@",))
