"""Files beside tokenizer.json: tokens that they add, classes that replace its rules, sizes, hostile parts."""

import json
import random
import time

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from entropic_jax.models import ModelError, Tokenizer, tokenizer_classes
from entropic_jax.models.families import FAMILIES
from entropic_jax.serving.http.served_model import ServedModel
from entropic_jax.serving.request import RequestError
from tests.models.test_tokenizer import byte_fallback, byte_level

TEXTS = [
    "a b</s>",
    "<s>[INST] a b [/INST]",
    "a <x> b<y>c <z>",
    " a<pad>b <img>c",
    "a  b",
    "<s>  a",
    "z<unk>é",
]
TOKENS = ["<s>", "</s>", "<unk>", "<pad>", "<x>", "<y>", "<z>", "a", "[INST]", "<img>", "b"]
FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
CONFIG, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
GENERAL, LLAMA = ("PreTrainedTokenizerFast", "mistral"), ("LlamaTokenizerFast", "llama")


def write(directory, backend, **files):
    """Writes a tokenizer and JSON files, whose names have `_json` for `.json`."""
    backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name.removesuffix('_json')}.json").write_text(json.dumps(content))
    return directory


def differences(directory):
    """What is not as in transformers: ids, texts, added tokens, names."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.from_directory(directory)
    pairs = {"bos": (ours.bos_token, theirs.bos_token), "eos": (ours.eos_token, theirs.eos_token)}
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        pairs |= {
            f"ids of {text}": (ours.encode(text), ids),
            f"text of {text}": (ours.decode(ids, skip_special=False), theirs.decode(ids)),
        }
    added = ours.backend.get_added_tokens_decoder(), theirs.added_tokens_decoder
    pairs["added"] = tuple({n: (t.content, t.special) for n, t in tokens.items()} for tokens in added)
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def random_token(rng, **others):
    token = rng.choice(TOKENS)
    if rng.random() < 0.6:
        return token
    return {"content": token, **{flag: rng.random() < 0.4 for flag in FLAGS}, **others}


def random_settings(rng, kind):
    """A tokenizer_config.json that names and lists tokens."""
    typed = {"__type": "AddedToken"}
    several = lambda: [random_token(rng, **typed) for _ in range(rng.randrange(3))]
    settings = {
        **{f"{name}_token": random_token(rng, **typed) for name in ("bos", "eos", "unk", "pad", "cls")},
        "image_token": rng.choice(TOKENS),
        "additional_special_tokens": several(),
        "extra_special_tokens": rng.choice([several(), {"x": rng.choice(TOKENS), "img_token": "<img>"}]),
        "added_tokens_decoder": {
            str(number): {"content": rng.choice(TOKENS), **{f: rng.random() < 0.4 for f in FLAGS}}
            | {"special": rng.random() < 0.6}
            for number in rng.sample(range(330), 4)
        },
        "legacy": rng.choice([True, False, None]),
        "add_prefix_space": rng.choice([True, False, None]),
        "sep_token": None,
    }
    return {n: v for n, v in settings.items() if rng.random() < 0.3} | {"tokenizer_class": kind}


def random_names(rng):
    """A special_tokens_map.json."""
    names = {f"{name}_token": random_token(rng) for name in ("bos", "eos", "unk", "pad")}
    names |= {f"{kind}_special_tokens": rng.choices(TOKENS, k=2) for kind in ("additional", "extra")}
    return {name: value for name, value in names.items() if rng.random() < 0.4}


@pytest.mark.parametrize(("kind", "model_type"), [GENERAL, LLAMA])
def test_random_files_are_read_as_in_transformers(kind, model_type, tmp_path):
    pytest.importorskip("transformers")
    for seed in range(120):
        rng, directory = random.Random(seed), tmp_path / str(seed)
        directory.mkdir()
        backend = rng.choice([byte_fallback, byte_level])()
        if rng.random() < 0.3:
            backend.add_tokens([AddedToken("<x>", special=rng.random() < 0.5)])
        files = {"tokenizer_config": random_settings(rng, kind), "config": {"model_type": model_type}}
        if rng.random() < 0.4:
            files["special_tokens_map"] = random_names(rng)
        if rng.random() < 0.3:
            files["added_tokens"] = {rng.choice(TOKENS): n for n in rng.sample(range(330), 3)}
        assert differences(write(directory, backend, **files)) == {}, (seed, files)


@pytest.mark.parametrize(("legacy", "after_a_token"), [(False, 94), (True, 259)])
def test_llama_s_class_has_a_space_before_a_text_alone(legacy, after_a_token, tmp_path):
    """What tokenizer.json says of it, a space after every special token, is replaced."""
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "legacy": legacy}
    write(tmp_path, byte_fallback(), tokenizer_config=settings, config={"model_type": "llama"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("<s>[INST]")[:2] == [1, after_a_token]
    assert tokenizer.encode("a")[0] == tokenizer.token_id("▁a") and differences(tmp_path) == {}
    (tmp_path / "again").mkdir()
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.from_directory(tmp_path / "again").encode("<s>[INST]") == tokenizer.encode("<s>[INST]")


@pytest.mark.parametrize("model_type", sorted({f.model_type for f in FAMILIES.values()}))
def test_model_types_that_read_tokenizer_json_alone(model_type):
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    general = auto.TOKENIZER_MAPPING_NAMES.get(model_type) in ("TokenizersBackend", "MistralCommonBackend")
    assert (model_type in tokenizer_classes.TOKENIZER_JSON_ALONE) == general


def test_tokens_of_every_file_are_added(tmp_path):
    settings = {"tokenizer_class": GENERAL[0], "pad_token": "<pad>", "image_token": "<img>"}
    names = {"eos_token": {"content": "</s>", "lstrip": False}, "additional_special_tokens": ["<x>"]}
    files = {"tokenizer_config": settings, "special_tokens_map": names, "added_tokens": {"<y>": 500}}
    last = byte_level().get_vocab_size()
    write(tmp_path, byte_level(), config={"model_type": "mistral"}, **files)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert [tokenizer.token_id(t) for t in ("<y>", "<pad>", "<img>", "<x>")] == [*range(last, last + 4)]
    assert tokenizer.eos_token == "</s>" and differences(tmp_path) == {}


FILES = {
    "decoder": ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, CONFIG, "added_tokens_decoder"),
    "no content": ({"tokenizer_config": {"added_tokens_decoder": {"1": {}}}}, CONFIG, "added_tokens_decoder"),
    "extra": ({"tokenizer_config": {"extra_special_tokens": [1]}}, CONFIG, "extra_special_tokens"),
    "flag": ({"tokenizer_config": {"eos_token": {"content": "a", "lstrip": 3}}}, CONFIG, "eos_token"),
    "of a model": ({"tokenizer_config": {"model_specific_special_tokens": 1}}, CONFIG, "model_specific_spec"),
    "map": ({"special_tokens_map": {"bos_token": 1}}, NAMES, "bos_token"),
    "added": ({"added_tokens": {"<x>": "1"}}, ADDED, "'<x>'"),
}


@pytest.mark.parametrize("name", FILES)
def test_fields_of_other_types_are_refused(name, tmp_path):
    files, file, field = FILES[name]
    write(tmp_path, byte_level(), **files)
    with pytest.raises(ModelError, match=rf"/{file}: {field}\S* must "):
        Tokenizer.from_directory(tmp_path)


def test_half_of_a_surrogate_pair_is_refused(tmp_path):
    write(tmp_path, byte_level(), tokenizer_config={"image_token": "\ud800"})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: strings must be Unicode; got '\\ud800'"):
        Tokenizer.from_directory(tmp_path)


def described(**parts):
    backend = tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1}, "a"))
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


DOUBLE = normalizers.Replace(" ", "  ")
GROWING = {
    "normalizer": normalizers.Sequence([DOUBLE] * 32),
    "normalizer, nested": normalizers.Sequence(
        [normalizers.Sequence([DOUBLE] * 6), normalizers.Prepend("a" * 20)]
    ),
    "normalizer, expression": normalizers.Sequence([normalizers.Replace(tokenizers.Regex("x*"), "y" * 2000)]),
    "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 8),
    "decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 32),
}


@pytest.mark.parametrize("name", GROWING)
def test_parts_that_multiply_a_text_are_refused(name, tmp_path):
    field = name.partition(",")[0]
    write(tmp_path, described(**{field: GROWING[name]}))
    begin = time.monotonic()
    with pytest.raises(ModelError, match=rf"tokenizer\.json: {field} must make a text at most 1000 times"):
        Tokenizer.from_directory(tmp_path)
    assert time.monotonic() - begin < 1


def test_a_decoder_that_panics_is_refused(tmp_path):
    write(tmp_path, described(decoder=decoders.Strip("a", 10**12, 10**12)))
    with pytest.raises(
        ModelError, match=r"tokenizer\.json is not readable by tokenizers: index out of bounds"
    ):
        Tokenizer.from_directory(tmp_path)


def test_parts_of_real_models_are_read(tmp_path):
    spaces = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    parts = {
        "normalizer": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), spaces]),
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]),
    }
    write(tmp_path, described(**parts))
    assert Tokenizer.from_directory(tmp_path) is not None


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_large_files_are_refused_unread(name, tmp_path):
    write(tmp_path, byte_level())
    with (tmp_path / name).open("ab") as file:
        file.truncate(3 * 10**9)
    with pytest.raises(ModelError, match=rf"{name} must be at most \d+ bytes; got 3000000000"):
        Tokenizer.from_directory(tmp_path)


BACKTRACKING = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")


@pytest.mark.parametrize("length", [40, 6000])
def test_an_expression_that_gives_up_on_a_text_is_an_error_about_the_text(length, tmp_path):
    """`tokenizers` bounds the tries of a match, and panics."""
    write(tmp_path, described(pre_tokenizer=BACKTRACKING))
    tokenizer = Tokenizer.from_directory(tmp_path)
    begin = time.monotonic()
    with pytest.raises(ModelError, match=r"tokenizer\.json can split; got '.*retry-limit"):
        tokenizer.encode("a" * length + "b")
    assert time.monotonic() - begin < 20
    assert tokenizer.encode("b") == [1]


def test_a_prompt_that_an_expression_gives_up_on_is_refused(tmp_path):
    write(tmp_path, described(pre_tokenizer=BACKTRACKING))
    served = ServedModel(("name",), "path", Tokenizer.from_directory(tmp_path), 64, 2)
    with pytest.raises(RequestError, match="input: text must be one that") as refusal:
        served.encode("a" * 40 + "b", name="input")
    assert refusal.value.param == "input"
