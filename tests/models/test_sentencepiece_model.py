"""`tokenizer.model` without tokenizer.json: the ids of SentencePiece, and refusals."""

import json
import struct

import pytest

from entropic_jax.models import ModelError
from entropic_jax.models.model import read_tokenizer
from entropic_jax.models.sentencepiece_model import sentencepiece_tokenizer

TEXT = "The cats' 1234 mats sat\n\n  on naïve ÅÄ mats, we'll see: 多 <x> and a  b c\n" * 4
LINES = [*TEXT.splitlines(), "", "  lead", "trail  ", "é😀 x\n\ny", "\ttab", "<x>a", "<s> is no token</s>"]


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_are_those_of_sentencepiece(prefix, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        user_defined_symbols=[] if prefix else ["<x>"],
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = read_tokenizer(tmp_path)
    assert ours is not None and (ours.bos_token, ours.eos_token) == ("<s>", "</s>")
    for line in LINES[:-1]:
        ids = theirs.encode(line)
        assert ours.encode(line) == [theirs.bos_id(), *ids], line
        assert ours.decode(ids) == theirs.decode(ids), line
    assert ours.encode("a</s>")[-1] == theirs.eos_id()  # a control token, as in other tokenizers


def varint(value):
    result = b""
    while value > 127:
        result += bytes([value & 127 | 128])
        value >>= 7
    return result + bytes([value])


def field(number, value):
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value % 2**64)


def model_of(trainer=None, normalizer=None, extra=()):
    """A model by the published layout: unknown, BOS, EOS, the bytes, and some pieces."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *extra]
    pieces += [(f"<0x{i:02X}>", 0.0, 6) for i in range(256)]
    pieces += [("▁", -9.0, 1), ("a", -8.0, 1), ("b", -7.0, 1), ("ab", -1.0, 1), ("▁a", -2.0, 1)]
    message = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + field(3, kind)) for text, score, kind in pieces
    )
    trainer = {3: 2, 35: 1, **(trainer or {})}
    normalizer = {3: 1, 4: 0, **(normalizer or {})}
    for number, values in ((2, trainer), (3, normalizer)):
        message += field(number, b"".join(field(n, value) for n, value in values.items()))
    return message


def test_settings_of_the_directory(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model_of())
    assert sentencepiece_tokenizer(tmp_path).encode("ab") == [1, *encoded(["▁", "ab"])]
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = {"add_bos_token": False, "bos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = sentencepiece_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == encoded(["▁", "ab"])
    assert tokenizer.chat([{"role": "user", "content": "ab"}]) == "</s>ab"


def test_tokens_of_other_files_are_added(tmp_path):
    """Their ids follow those of the model's pieces, as in transformers."""
    (tmp_path / "tokenizer.model").write_bytes(model_of())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<y>": 900, "<x>": 800}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<y>", "pad_token": "<z>"}))
    (tmp_path / "chat_template.jinja").write_text("ab{{ eos_token }}")
    tokenizer = sentencepiece_tokenizer(tmp_path)
    assert [tokenizer.token_id(t) for t in ("<x>", "<y>", "<z>")] == [264, 265, 266]
    assert tokenizer.encode("ab<y>") == [1, *encoded(["▁", "ab"]), 265] and tokenizer.eos_token == "<y>"
    assert tokenizer.chat([]) == "ab<y>"


def encoded(names):
    return [259 + ["▁", "a", "b", "ab", "▁a"].index(name) for name in names]


def test_without_a_beginning_of_text(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model_of({41: -1}))
    tokenizer = sentencepiece_tokenizer(tmp_path)
    assert tokenizer.bos_token is None and tokenizer.encode("ab") == encoded(["▁", "ab"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (model_of({3: 1}), "must be of type BPE, or tokenizer.json must stand next to it"),
        (model_of({35: 0}), "must fall back to bytes"),
        (model_of(normalizer={2: b"abc"}), "must have no table of characters"),
        (model_of(normalizer={4: 1}), "must keep spaces that repeat"),
        (model_of(extra=[("<x>", 0.0, 4)]), "must have no symbols of the user next to a space in front"),
        (model_of(extra=[("<s>", 0.0, 3)]), "its pieces must be different texts"),
        (model_of()[:-3], "it ends within a field"),
        (b"", "must not be empty"),
        (b"\xff" * 40, "a number has too many bytes"),
        (b"\x0b" * 40, "it ends within a field"),
        (field(1, 5), "its parts must be messages"),
        (field(1, field(1, b"\xff")), "must be a model of SentencePiece"),
        (field(1, field(2, b"a")), "a piece must have a text and a score"),
    ],
)
def test_refusals(data, message, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ModelError) as raised:
        read_tokenizer(tmp_path)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert str(tmp_path / "tokenizer.model") in str(raised.value)
