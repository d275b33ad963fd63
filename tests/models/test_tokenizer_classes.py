"""Tokenizer classes that replace parts of tokenizer.json: which do, and that they do as in transformers 5."""

import logging
import random

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers

from entropic_jax.models import ModelError, Tokenizer, tokenizer_classes
from entropic_jax.models.families import FAMILIES
from entropic_jax.models.tokenizer_classes import COHERE, GEMMA, GPT, LLAMA, NEOX, QWEN
from tests.models import test_tokenizer_files as files
from tests.models.test_tokenizer import byte_fallback, byte_level

CLASSES = [GEMMA, QWEN, COHERE, GPT, NEOX, LLAMA, "CodeGenTokenizer", "PreTrainedTokenizer", None]
MODEL_TYPES = ["gemma", "gemma3", "qwen2", "qwen3", "cohere2", "phi", "starcoder2", "olmoe", "llama", "phi3"]
PIECES = [
    *"abA !?▁é",
    "  ",
    "\n",
    "\t",
    "e\u0301",
    "ﬁ",
    "日本",
    "😀",
    "123",
    "'s",
    "'S",
    " b",
    "\r\n",
    "\xa0",
]
PIECES += ["<s>", "</s>", "<unk>", "<pad>", "<x>", "<y>", "[INST]"]
NORMALIZERS = [
    normalizers.NFKC(),
    normalizers.Lowercase(),
    normalizers.Replace(" ", "▁"),
    normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
]
PRE_TOKENIZERS = [
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.Digits(True),
    pre_tokenizers.Metaspace(),
    pre_tokenizers.Split(" ", "isolated"),
    pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(use_regex=False)]),
]


def unusual(rng):
    """A tokenizer whose parts may be those of another class."""
    backend = rng.choice([byte_fallback, byte_level])()
    if rng.random() < 0.5:
        backend.normalizer = rng.choice(NORMALIZERS)
    if rng.random() < 0.5:
        backend.pre_tokenizer = rng.choice(PRE_TOKENIZERS)
    if rng.random() < 0.3:
        backend.add_tokens([AddedToken("<x>", special=rng.random() < 0.5, lstrip=rng.random() < 0.3)])
    return backend


def random_settings(rng):
    """A tokenizer_config.json with a class of `CLASSES`."""
    name = rng.choice(CLASSES)
    settings = files.random_settings(rng, name + rng.choice(["", "Fast"])) if name else {}
    if name == "PreTrainedTokenizer":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if settings.get("add_prefix_space") is None and name not in (LLAMA, None):
        settings.pop("add_prefix_space", None)
    return settings | ({"add_bos_token": rng.random() < 0.5} if rng.random() < 0.3 else {})


def test_random_files_are_read_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    compared = 0
    for seed in range(250):
        rng, directory = random.Random(seed), tmp_path / str(seed)
        directory.mkdir()
        settings, model_type = random_settings(rng), rng.choice(MODEL_TYPES)
        others = {"tokenizer_config": settings, "config": {"model_type": model_type}}
        files.write(directory, unusual(rng), **others)
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        try:
            ours = Tokenizer.from_directory(directory)
        except ModelError as error:
            if "Unk token" not in str(error):
                raise
            with pytest.raises(Exception, match="Unk token"):
                theirs("A \ufdd0 b")
            continue
        assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token), others
        for _ in range(12):
            text = "".join(rng.choices(PIECES, k=rng.randrange(1, 14)))
            ids = theirs(text)["input_ids"]
            assert ours.encode(text) == ids, (seed, text, others)
            assert ours.decode(ids, skip_special=False) == theirs.decode(ids), (seed, text, others)
        compared += 1
    assert compared > 150


def test_classes_of_model_types_are_those_of_transformers():
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    theirs = {
        name: auto.TOKENIZER_MAPPING_NAMES.get(name) for name in {f.model_type for f in FAMILIES.values()}
    }
    registered = {n: t for n, t in theirs.items() if t in tokenizer_classes.TOKENS and t != LLAMA}
    assert {n: t for n, t in tokenizer_classes.REGISTERED.items() if n in theirs} == registered
    for name, kind in tokenizer_classes.REGISTERED.items():
        assert auto.TOKENIZER_MAPPING_NAMES[name] == kind


@pytest.mark.parametrize(
    ("settings", "model_type", "pieces"),
    [
        ({}, "qwen3", ["1", "2", "a"]),
        ({"tokenizer_class": "CohereTokenizerFast"}, "llama", ["1", "2", "a"]),
        ({"tokenizer_class": GPT}, "starcoder2", ["12", "a"]),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "qwen3", ["12a"]),
    ],
)
def test_digits_are_split_as_the_class_does(settings, model_type, pieces, tmp_path):
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    files.write(tmp_path, backend, tokenizer_config=settings, config={"model_type": model_type})
    pre_tokenizer = Tokenizer.from_directory(tmp_path).backend.pre_tokenizer
    assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str("12a")] == pieces


def test_gemma_s_class_spells_what_is_unknown_in_bytes(tmp_path):
    backend = byte_fallback()
    backend.normalizer, backend.decoder = None, decoders.ByteLevel()
    files.write(tmp_path, backend, tokenizer_config={"tokenizer_class": GEMMA})
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("a Ab")
    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["a", "▁", "<0x41>", "b"]
    assert tokenizer.decode(ids) == "a Ab" and tokenizer.bos_token == "<bos>"


def warnings_of(directory, caplog, backend, **others):
    files.write(directory, backend, **others)
    with caplog.at_level(logging.WARNING, "entropic_jax.models"):
        Tokenizer.from_directory(directory)
    return [record.getMessage() for record in caplog.records]


def test_a_warning_names_the_rules_that_are_replaced(tmp_path, caplog):
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    (message,) = warnings_of(tmp_path, caplog, backend, tokenizer_config={"tokenizer_class": GPT})
    assert "the rules of class GPT2Tokenizer replace its pre_tokenizer" in message


@pytest.mark.parametrize("name", [GPT, "CodeLlamaTokenizer"])
def test_no_warning_but_for_other_rules(name, tmp_path, caplog):
    backend = byte_level()
    backend.normalizer, backend.pre_tokenizer = None, pre_tokenizers.ByteLevel(False, trim_offsets=False)
    messages = warnings_of(tmp_path, caplog, backend, tokenizer_config={"tokenizer_class": name})
    assert [("CodeLlama" in message) for message in messages] == ([] if name == GPT else [True])
