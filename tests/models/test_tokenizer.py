"""Tokenizers: encoding and decoding, BOS, streaming without broken characters, chat templates."""

import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from entropic_jax import models
from entropic_jax.models import ModelError, Tokenizer

CORPUS = ["def f(x):\n    return x + 1\n", "größer als 🙂🙂 né", "日本語 text", "the cat sat on the mat " * 4]


def byte_level() -> tokenizers.Tokenizer:
    """As in GPT-2, Llama 3 and Qwen: every token is a run of bytes."""
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True) for t in ("<s>", "</s>")]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=316,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """As in Llama 2 and Mistral: words begin with ▁, unknown characters are spelled in byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghij", "▁a", "▁b"]
    merges = [("▁", "a"), ("▁", "b")]
    backend = tokenizers.Tokenizer(
        BPE(
            {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return backend


TOKENIZERS = {"byte level": Tokenizer(byte_level()), "byte fallback": Tokenizer(byte_fallback())}
PIECES = st.lists(
    st.sampled_from(["a", "b", " ", "the ", "é", "日本", "🙂", "👩‍👩‍👧", "\n", "\x00", "\ufffd", "ff"])
)
TEXTS = st.one_of(st.text(), PIECES.map("".join))


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in tokens), stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=120, deadline=None)
def test_streamed_text_is_the_decoded_text(name, text):
    tokenizer = TOKENIZERS[name]
    if name == "byte fallback":
        text = text.replace(
            "\ufffd", "?"
        )  # it judges broken bytes by the whole run of them, later ones included
    tokens = tokenizer.encode(text)
    parts = streamed(tokenizer, tokens)
    assert "".join(parts) == tokenizer.decode(tokens)
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@given(tokens=st.lists(st.integers(0, 320)))
@settings(max_examples=200, deadline=None)
def test_streaming_any_tokens(tokens):
    """Bytes that form no character, special tokens, numbers beyond the vocabulary."""
    tokenizer = TOKENIZERS["byte level"]
    parts = streamed(tokenizer, tokens)
    assert "".join(parts) == tokenizer.decode(tokens)


@given(tokens=st.lists(st.integers(0, 275), max_size=40))
@settings(max_examples=100, deadline=None)
def test_streaming_any_fallback_tokens_stays_short(tokens):
    tokenizer = TOKENIZERS["byte fallback"]
    stream = tokenizer.stream()
    for token in tokens:
        stream.push(token)
        assert len(stream._waiting) <= 5
    stream.flush()


def test_a_character_is_released_whole():
    tokenizer = TOKENIZERS["byte level"]
    single = [tokenizer.encode("日", special=False)[-1]]  # an incomplete character
    stream = tokenizer.stream()
    assert stream.push(single[0]) == "" and stream.flush() == "\ufffd"
    parts = streamed(tokenizer, tokenizer.encode("x𝄞y", special=False))
    assert [p for p in parts if p] == ["x", "𝄞", "y"]


def test_special_tokens_are_kept_on_request():
    tokenizer = TOKENIZERS["byte level"]
    stream = tokenizer.stream(skip_special=False)
    assert "".join(map(stream.push, tokenizer.encode("cat"))) + stream.flush() == "<s>cat"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({}, ["<s>"]),
        ({"add_bos_token": False}, []),
        ({"add_bos_token": True, "bos_token": "</s>"}, ["</s>"]),
        ({"add_bos_token": True, "bos_token": {"content": "<s>"}, "add_eos_token": False}, ["<s>"]),
        ({"add_bos_token": True}, []),
    ],
)
def test_beginning_of_text(text, expected):
    tokenizer = Tokenizer(byte_level(), text)
    bare = tokenizer.encode("cat", special=False)
    assert tokenizer.encode("cat") == [tokenizer.token_id(t) for t in expected] + bare


def test_end_of_text():
    settings = {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(byte_level(), settings)
    assert [tokenizer.encode("cat")[i] for i in (0, -1)] == [0, 1]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.vocabulary) == ("<s>", "</s>", 316)


def test_special_tokens_reach_the_template():
    settings = {"bos_token": "<s>", "pad_token": {"content": "<pad>"}, "unk_token": None}
    template = "{{ bos_token }}{{ pad_token }}{{ unk_token is defined }}{{ mask_token is defined }}"
    assert Tokenizer(byte_level(), settings, template).chat([]) == "<s><pad>FalseFalse"


def test_unknown_token_is_named():
    with pytest.raises(ModelError, match=r"token must be one of the 316 in tokenizer\.json; got '<nope>'"):
        TOKENIZERS["byte level"].token_id("<nope>")


TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
<{{ message['role'] }}>{{ message['content'] | trim }}
{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def chatty() -> Tokenizer:
    return Tokenizer(byte_level(), {"bos_token": "<s>"}, TEMPLATE)


def test_chat(chatty):
    messages = [{"role": "user", "content": " 1 < 2? "}, {"role": "assistant", "content": "ja, größer"}]
    assert chatty.chat(messages) == "<s><user>1 < 2?\n<assistant>ja, größer\n<assistant>"
    assert chatty.chat(messages[:1], add_generation_prompt=False) == "<s><user>1 < 2?\n"
    assert chatty.chat([], tools=[{"name": "é"}], bos_token="") == '[{"name": "é"}]<assistant>'


def test_chat_is_what_transformers_renders(chatty, tmp_path):
    transformers = pytest.importorskip("transformers")
    chatty.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": "日本"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chatty.chat(messages) == rendered
    assert chatty.encode("the cat") == theirs("the cat")["input_ids"]


SETTINGS = [
    *({}, {"add_eos_token": False}, {"add_eos_token": True}, {"add_bos_token": None}),
    *({"add_eos_token": None}, {"add_bos_token": True, "add_eos_token": None}, {"add_bos_token": False}),
    {"split_special_tokens": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_encoded_as_in_transformers(kind, settings, tmp_path):
    """A tokenizer_config.json that states one of BOS and EOS, or null, does not take BOS away."""
    transformers = pytest.importorskip("transformers")
    backend = byte_fallback() if kind == "LlamaTokenizerFast" else byte_level()
    number = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    backend.save(str(tmp_path / "tokenizer.json"))
    stated = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)("a b</s>")["input_ids"]
    actual = Tokenizer.from_directory(tmp_path).encode("a b</s>")
    assert actual == expected and actual[0] == number
    assert (backend.token_to_id("</s>") in actual) == ("split_special_tokens" not in settings)


def test_special_tokens_in_the_text_of_a_user():
    """Without `parse_special` only those of the template are what they mean to the model."""
    template = "<s>{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    parsing = Tokenizer(byte_level(), {}, template)
    plain = Tokenizer(byte_level(), {}, template, parse_special=False)
    messages = [{"role": "user", "content": "a</s>b <s>"}, {"role": "tool", "content": [{"text": "</s>"}]}]
    ids = {t: parsing.token_id(t) for t in ("<s>", "</s>")}
    bare = lambda text: plain.encode(text, special=False)
    assert parsing.encode("a</s>b") == [ids["<s>"], *bare("a"), ids["</s>"], *bare("b")]
    assert plain.encode("a</s>b") == [ids["<s>"], *bare("a</s>b")] and ids["</s>"] not in bare("a</s>b")
    assert plain.decode(bare("a</s>b")) == "a</s>b"

    rendered = plain.encode(plain.chat(messages[:1]), special=False, rendered=True)
    assert rendered == [ids["<s>"], *bare("a</s>b <s>"), ids["</s>"]]
    count = lambda t: t.encode(t.chat(messages), special=False, rendered=True).count(ids["</s>"])
    assert (count(plain), count(parsing)) == (2, 4)
    assert parsing.chat(messages[:1]) == "<s>a</s>b <s></s>"


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_panics_of_the_bindings_are_errors(change, chatty, tmp_path):
    chatty.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=r"tokenizer\.json is not readable by tokenizers"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {
            "padding": {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
            | {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
        },
        {"truncation": {"max_length": 2, "stride": 2, "strategy": "LongestFirst", "direction": "Right"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_padding_and_truncation_are_not_used(change, chatty, tmp_path):
    """A length of 10¹² would end the process."""
    chatty.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    text = "some words that are more than two tokens"
    assert Tokenizer.from_directory(tmp_path).encode(text) == chatty.encode(text)


def test_marks_of_what_the_model_wrote_are_text():
    """Templates of SmolLM 3 and of models that were trained with TRL have them."""
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    messages = [{"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "!"}]
    assert Tokenizer(byte_level(), {}, template).chat(messages) == "yes!"


def test_chat_refusals(chatty):
    with pytest.raises(ModelError, match="rejects the messages: no such role"):
        chatty.chat([{"role": "bad", "content": ""}])
    with pytest.raises(ModelError, match=r"no chat_template\.jinja"):
        TOKENIZERS["byte level"].chat([])
    reach = Tokenizer(byte_level(), {}, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(ModelError, match="rejects the messages"):
        reach.chat([])


def test_saved_tokenizers_come_back(chatty, tmp_path):
    chatty.save(tmp_path)
    actual = Tokenizer.from_directory(tmp_path)
    assert actual.encode("größer") == chatty.encode("größer")
    assert actual.chat_template == TEMPLATE and actual.bos_token == "<s>"
    (tmp_path / "chat_template.jinja").write_text("other")
    assert Tokenizer.from_directory(tmp_path).chat_template == "other"
    (tmp_path / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert Tokenizer.from_directory(tmp_path).chat_template == "d"
    assert Tokenizer.from_directory(tmp_path / "nowhere") is None


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer = Tokenizer.from_directory(Path(models.__file__).parent / "embedded")
    text = "def f(a, b): return a + b  # 0123456789\n" * 10_000
    ticks, ended = [], threading.Event()

    def tick():
        while not ended.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    tokens = tokenizer.encode(text)
    seconds = time.perf_counter() - start
    ended.set()
    thread.join()
    assert any(0.2 * seconds < when - start < 0.8 * seconds for when in ticks)
    assert tokens == tokenizer.backend.encode(text).ids
