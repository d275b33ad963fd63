"""Fill in the middle: `suffix` of completions, in the formats of code models."""

import copy
import dataclasses

import httpx2
import pytest
import tokenizers

from entropic_jax import models
from entropic_jax.serving.request.infilling import FORMATS, infilling_of

from .live import refused, serving

PATH = "/v1/completions"
GAP = {"prompt": "def add(", "suffix": "\n    return a + b\n", "max_tokens": 60, "temperature": 0, "seed": 0}


def with_tokens(tokenizer: models.Tokenizer, *names: str) -> models.Tokenizer:
    """A copy of a tokenizer with the special tokens of formats."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    for name in names:
        form = FORMATS[name]
        backend.add_special_tokens([form.begin, form.suffix, form.middle, *form.ends])
    return models.Tokenizer(backend, copy.deepcopy(tokenizer.settings))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pipes", "<|fim_prefix|>a b<|fim_suffix|> c<|fim_middle|>"),
        ("starcoder", "<fim_prefix>a b<fim_suffix> c<fim_middle>"),
        ("deepseek", "<｜fim▁begin｜>a b<｜fim▁hole｜> c<｜fim▁end｜>"),
    ],
)
def test_a_prompt_is_what_the_model_card_states(served, name, text):
    tokenizer = with_tokens(served.tokenizer, name)
    form = infilling_of(tokenizer)
    tokens = form.prompt(tokenizer.encode("a b", False), " c", special=False)
    assert tokens == tokenizer.encode(text, special=False)
    assert tokenizer.decode(tokens, skip_special=False) == text
    tokenizer.backend.add_special_tokens(["<bos>"])
    begun = models.Tokenizer(tokenizer.backend, {"bos_token": "<bos>", "add_bos_token": True})
    assert infilling_of(begun).prompt([5], " c", True)[:3] == [begun.token_id("<bos>"), form.begin, 5]


def test_a_tokenizer_that_adds_spaces_adds_none_to_the_suffix():
    """CodeLlama: `▁<PRE>`, the prefix as a text, `▁<SUF>`, the suffix as the rest of a text, `▁<MID>`."""
    pieces = ["▁", "a", "b", "☺", "<unk>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>")
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer = with_tokens(models.Tokenizer(backend), "codellama")
    form = infilling_of(tokenizer)
    tokens = form.prompt(tokenizer.encode("a", False), "b a", special=True)
    names = [tokenizer.backend.id_to_token(i) for i in tokens]
    assert names == ["▁<PRE>", "▁", "a", "▁<SUF>", "b", "▁", "a", "▁<MID>"]
    assert [tokenizer.backend.id_to_token(i) for i in form.ends] == ["▁<EOT>"]


def test_models_without_the_tokens_have_no_format(served):
    assert infilling_of(served.tokenizer) is None
    backend = tokenizers.Tokenizer.from_str(served.tokenizer.backend.to_str())
    backend.add_special_tokens(["<fim_prefix>", "<fim_suffix>"])
    assert infilling_of(models.Tokenizer(backend)) is None


@pytest.fixture(scope="module")
def filling(served):
    """A server whose model writes some tokens and then one that ends the middle of a text."""
    pytest.importorskip("llguidance", reason="the extra `serve` is not installed")
    from entropic_jax.serving.http.frontend import Frontend
    from entropic_jax.serving.http.settings import Settings

    from .scripted_engine import ScriptedEngine

    tokenizer = with_tokens(served.tokenizer, "pipes")
    model = dataclasses.replace(served, tokenizer=tokenizer, vocabulary=tokenizer.vocabulary)
    engine = ScriptedEngine(model, "a, b):<|file_sep|> another file")
    with serving(Frontend(engine, model, Settings(port=0))) as running:
        running.engine, running.model = engine, model
        yield running


def test_a_gap_is_filled(filling):
    answer = httpx2.post(filling.url + PATH, json=GAP).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a, b):", "stop")
    assert choice["stop_reason"] == filling.model.tokenizer.token_id("<|file_sep|>")
    request = filling.engine.engine_requests[-1].request
    text = filling.model.tokenizer.decode(request.prompt, skip_special=False)
    assert text.endswith("<|fim_prefix|>def add(<|fim_suffix|>\n    return a + b\n<|fim_middle|>")
    assert answer["usage"]["prompt_tokens"] == len(request.prompt)
    stated = filling.model.tokenizer.encode("def add(", special=False)
    httpx2.post(filling.url + PATH, json={**GAP, "prompt": stated, "stop_token_ids": [7]}).raise_for_status()
    of_tokens = filling.engine.engine_requests[-1].request
    assert of_tokens.prompt == request.prompt and set(of_tokens.stop_token_ids) == {
        7,
        *request.stop_token_ids,
    }


def test_an_empty_suffix_is_none(filling, live):
    for server in (filling, live):
        httpx2.post(server.url + PATH, json={**GAP, "suffix": ""}).raise_for_status()
        request = server.engine.engine_requests[-1].request
        assert list(request.prompt) == server.model.encode("def add(") and not request.stop_token_ids


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("truncate_prompt_tokens", 3)])
def test_fields_that_exclude_a_suffix(filling, name, value):
    error = refused(httpx2.post(filling.url + PATH, json={**GAP, name: value}), 400)
    assert error["param"] == name and error["message"] == f"{name} must be absent with suffix; got {value}"


def test_texts_that_are_too_long(filling):
    error = refused(httpx2.post(filling.url + PATH, json={**GAP, "suffix": "x y " * 300}), 400)
    assert "maximum context length of 256 tokens" in error["message"]
