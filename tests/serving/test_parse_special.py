"""`parse_special`: special tokens in prompts and messages as control tokens, or as plain text."""

import argparse
from pathlib import Path

import pytest

from entropic_jax import models
from entropic_jax.serving.commands import generate, serve_options
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.http.served_model import describe
from entropic_jax.serving.llm.prompts import tokenize_conversation
from entropic_jax.serving.offline import generation

USER = [{"role": "user", "content": "a<end>b"}]


@pytest.fixture
def plain(directory):
    """The text side of a served model, with special tokens as plain text."""
    model = models.load(directory, progress=False)
    model.tokenizer.parse_special = False
    return describe(model, directory, ("m",), 128, "<begin>{{ messages[0].content }}<end>")


def test_messages(plain):
    """Control tokens of the template count, those of a message do not; the message can be continued."""
    content = plain.encode("a<end>b", special=False)
    assert 1 not in content and len(content) == len("a<end>b")
    text = plain.chat(USER)
    assert plain.encode(text, special=False, rendered=True) == [0, *content, 1]
    tokenized = tokenize_conversation(USER, plain.tokenizer)
    assert tokenized == ("<begin>a<end>b<end>", (0, *content, 1))
    continued = plain.chat(USER, continue_last=True)
    assert plain.encode(continued, special=False, rendered=True) == [0, *content]


def test_options(directory, monkeypatch):
    for add in (generate.add_arguments, serve_options.add_arguments):
        parser = argparse.ArgumentParser()
        add(parser)
        assert parser.parse_args([]).parse_special
        assert not parser.parse_args(["--no-parse-special"]).parse_special
    with pytest.raises(ValueError, match="parse_special must be true or false; got 'no'"):
        EngineOptions(parse_special="no")
    prompts = [generation.load(Path(directory), parse_special=flag).chat(USER) for flag in (True, False)]
    assert (prompts[0].count(1), prompts[1].count(1)) == (1, 0)
