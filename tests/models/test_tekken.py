"""`tekken.json` without tokenizer.json: the ids of merges by rank, and refusals."""

import base64
import collections
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from entropic_jax.models import ModelError
from entropic_jax.models.model import read_tokenizer

PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
PARTS = re.compile(r" ?[^\W\d_]+| ?\d| ?(?:[^\s\w]|_)+|\s+")  # the same for the letters below
TEXT = "the cats sat on the mats; naïve cats, we'll see 12 of them there, that they eat\n" * 3
SPECIAL = 30


def learned(count: int) -> list[bytes]:
    """The bytes, and so many pairs of tokens that are most frequent in the text."""
    tokens = [bytes([byte]) for byte in range(256)]
    parts = [[bytes([byte]) for byte in part.encode()] for part in PARTS.findall(TEXT)]
    for _ in range(count):
        pairs = collections.Counter(pair for part in parts for pair in itertools.pairwise(part))
        (first, second), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        tokens.append(first + second)
        parts = [merged(part, len(tokens) - 1, tokens) for part in parts]
    return tokens


def merged(part: list[bytes], rank: int, tokens: list[bytes]) -> list[bytes]:
    """A part in which pairs that form the token of that rank are one."""
    result: list[bytes] = []
    for token in part:
        if result and result[-1] + token == tokens[rank]:
            result[-1] += token
        else:
            result.append(token)
    return result


def ids_of(text: str, tokens: list[bytes]) -> list[int]:
    """The tokens of a text, by merging the pair of the lowest rank until there is none."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    ids: list[int] = []
    for part in PARTS.findall(text):
        pieces = [bytes([byte]) for byte in part.encode()]
        while True:
            pairs = itertools.pairwise(pieces)
            rank, place = min(
                ((ranks.get(a + b, 10**9), i) for i, (a, b) in enumerate(pairs)), default=(10**9, 0)
            )
            if rank == 10**9:
                break
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        ids += [SPECIAL + ranks[piece] for piece in pieces]
    return ids


def document(tokens: list[bytes], **changes: Any) -> dict[str, Any]:
    """A tekken.json with tokens beyond those that it uses, as such files have them."""
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate([*tokens, b"beyond"])
    ]
    config = {"pattern": PATTERN, "default_vocab_size": SPECIAL + len(tokens), "num_vocab_tokens": 0}
    return {"config": {**config, "default_num_special_tokens": SPECIAL}, "vocab": vocabulary, **changes}


def test_ids_are_those_of_merges_by_rank(tmp_path):
    tokens = learned(25)
    (tmp_path / "tekken.json").write_text(json.dumps(document(tokens)))
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None and (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    for text in (*TEXT.splitlines(), "", "  the  mats\n\n thé 345", "catssat", "x" * 40, "they'll 😀 eat"):
        ids = ids_of(text, tokens)
        assert tokenizer.encode(text) == [1, *ids], text
        assert tokenizer.decode(ids) == text
    assert max(ids_of(TEXT, tokens)) >= SPECIAL + 256, "nothing was merged"
    assert tokenizer.encode("the[INST]</s>")[-2:] == [3, 2]
    assert tokenizer.encode("<SPECIAL_29>") == [1, 29]


def test_special_tokens_that_the_file_names(tmp_path):
    named = [
        {"rank": 1, "token_str": "<s>"},
        {"rank": 2, "token_str": "</s>"},
        {"rank": 5, "token_str": "[A]"},
    ]
    (tmp_path / "tekken.json").write_text(json.dumps(document(learned(1), special_tokens=named)))
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("[A]<SPECIAL_3>") == [5, 3]


BYTES = [bytes([byte]) for byte in range(256)]
GOOD = document(BYTES)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no pattern": ({**GOOD, "config": {}}, "config must be an object with a pattern"),
    "sizes": (
        {**GOOD, "config": {**GOOD["config"], "default_vocab_size": 3}},
        "default_num_special_tokens from 3, below default_vocab_size; got 30 and 3",
    ),
    "a huge size": (
        {**GOOD, "config": {**GOOD["config"], "default_vocab_size": 10**9}},
        "default_vocab_size must be at most 1000000; got 1000000000",
    ),
    "few tokens": ({**GOOD, "vocab": GOOD["vocab"][:9]}, "vocab must be a list of at least 256 tokens"),
    "no base64": ({**GOOD, "vocab": [{"rank": 0, "token_bytes": "?"}] * 256}, "rank 0 and token_bytes at 0"),
    "another order": ({**GOOD, "vocab": GOOD["vocab"][::-1]}, "must have rank 0"),
    "a byte is missing": (document([b"ab", *BYTES[1:]]), "vocab must have different tokens, and each byte"),
    "a rank too high": ({**GOOD, "special_tokens": [{"rank": 30, "token_str": "x"}]}, "have a rank below 30"),
    "no begin": ({**GOOD, "special_tokens": []}, "different texts, <s> and </s> among them"),
    "a pattern": ({**GOOD, "config": {**GOOD["config"], "pattern": "("}}, "not readable by tokenizers"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_files_are_refused(name, tmp_path: Path):
    content, message = BAD[name]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / "tekken.json"))) as error:
        read_tokenizer(tmp_path)
    assert message in str(error.value)
