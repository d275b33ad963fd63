"""The incremental detokenizer gives the same text as the tokenizer."""

from pathlib import Path

import numpy as np
import pytest

from entropic_jax.models.tokenizer import Tokenizer
from entropic_jax.serving.engine.detokenizer import ByteLevelDetokenizer, detokenizer_factory
from entropic_jax.serving.options.model import EMBEDDED


@pytest.fixture(scope="module", params=["embedded", "bytes"])
def tokenizer(request, directory) -> Tokenizer:
    path = EMBEDDED if request.param == "embedded" else Path(directory)
    return Tokenizer.from_directory(path)


def joined(stream, tokens) -> str:
    return "".join([*map(stream.push, tokens), stream.flush()])


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x  # ½ of it\n", "naïve 日本語 🙂🙃 \x00\x7f", ""])
def test_texts_come_back_piece_by_piece(tokenizer, text):
    make = detokenizer_factory(tokenizer)
    assert isinstance(make(), ByteLevelDetokenizer)
    tokens = tokenizer.encode(text, special=False)
    assert joined(make(), tokens) == text
    pieces = [make().push(token) for token in tokens[:1]]
    assert text.startswith("".join(pieces))


def test_any_tokens_decode_as_the_tokenizer_decodes_them(tokenizer):
    make, rng = detokenizer_factory(tokenizer), np.random.default_rng(0)
    for length in (1, 2, 5, 40):
        for _ in range(40):
            tokens = rng.integers(0, tokenizer.vocabulary, length).tolist()
            assert joined(make(), tokens) == tokenizer.decode(tokens)
