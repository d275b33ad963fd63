"""Chat templates that have names: which are read, which is chosen, and what transformers does."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from entropic_jax.models import ModelError, Tokenizer, gguf_tokenizer
from entropic_jax.models.sentencepiece_model import sentencepiece_tokenizer
from entropic_jax.serving.cli import parser
from entropic_jax.serving.commands import serve_setup
from entropic_jax.serving.request import RequestError
from entropic_jax.serving.request.chat_template import DEFAULT_TEMPLATE, named_template, render, set_template

from .test_sentencepiece_model import model_of
from .test_tokenizer import byte_level

HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "clock"}}]
FOLDER = "additional_chat_templates"
LIST = "tokenizer_config.json"
NAMES = ("default", "tool_use", "rag")


def template(name: str, source: str) -> str:
    return f"{source} {name}: {{{{ messages[0].content }}}}{{{{ ' %d' % (tools | length) if tools }}}}"


def write(directory: Path, listed: tuple[str, ...], files: tuple[str, ...]) -> None:
    """A tokenizer with templates in its settings and in files; the name "" is chat_template.jinja."""
    byte_level().save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    if listed:
        settings["chat_template"] = [{"name": name, "template": template(name, "list")} for name in listed]
    (directory / LIST).write_text(json.dumps(settings))
    (directory / FOLDER).mkdir()
    for name in files:
        path = directory / FOLDER / f"{name}.jinja" if name else directory / "chat_template.jinja"
        path.write_text(template(name, "file"))


CASES = {
    "a list": (NAMES, ()),
    "a list with a default": (("default",), ()),
    "a file and a folder": ((), ("", "tool_use")),
    "files before a list": (NAMES, ("", "rag")),
    "a folder before a list": (NAMES, ("default", "tool_use")),
    "a folder's default": ((), ("", "default")),
    "a file": ((), ("",)),
    "no default": (("tool_use",), ()),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tools", [None, TOOLS, []], ids=["no tools", "tools", "an empty list"])
def test_the_template_is_that_of_transformers(case, tools, tmp_path):
    transformers = pytest.importorskip("transformers")
    write(tmp_path, *CASES[case])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    try:
        expected = theirs.apply_chat_template(HELLO, tokenize=False, tools=tools)
    except ValueError:
        with pytest.raises(ModelError, match="a conversation requires"):
            tokenizer.chat(HELLO, tools=tools)
        return
    assert tokenizer.chat(HELLO, tools=tools) == expected


@pytest.mark.parametrize("case", CASES)
def test_saved_templates_come_back(case, tmp_path):
    write(tmp_path, *CASES[case])
    tokenizer = Tokenizer.from_directory(tmp_path)
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    actual = Tokenizer.from_directory(tmp_path / "saved")
    assert actual.chat_template == tokenizer.chat_template
    assert actual.named_templates == tokenizer.named_templates


def test_a_template_that_is_stated_replaces_all(tmp_path):
    write(tmp_path, NAMES, ())
    tokenizer = Tokenizer.from_directory(tmp_path)
    set_template(tokenizer, "stated")
    assert render(tokenizer, HELLO, tools=TOOLS) == render(tokenizer, HELLO) == "stated"


def test_without_a_default_conversations_without_tools_have_the_plain_template(tmp_path):
    write(tmp_path, ("tool_use",), ())
    tokenizer = Tokenizer.from_directory(tmp_path)
    set_template(tokenizer)
    assert tokenizer.chat_template == DEFAULT_TEMPLATE
    assert render(tokenizer, HELLO, tools=TOOLS) == "list tool_use: hi 1"


def test_a_template_by_its_name(tmp_path):
    write(tmp_path, NAMES, ())
    assert named_template(tmp_path, "rag") == template("rag", "list")
    assert named_template(tmp_path, "default") == template("default", "list")
    assert named_template(tmp_path, "other") is named_template(tmp_path, "../rag") is None
    assert named_template(tmp_path / "nowhere", "rag") is None
    options = parser().parse_args(["serve", "--model", str(tmp_path), "--chat-template", "rag"])
    assert serve_setup.text_side_of(options).template == template("rag", "list")
    options.chat_template = "other"
    with pytest.raises(RequestError, match="--chat-template must be a readable file; got other"):
        serve_setup.text_side_of(options)


def test_what_is_no_text_is_named(tmp_path):
    write(tmp_path, (), ("", "rag"))
    (tmp_path / FOLDER / "rag.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"rag\.jinja must be UTF-8"):
        Tokenizer.from_directory(tmp_path)


def test_templates_next_to_a_model_of_sentencepiece(tmp_path):
    write(tmp_path, NAMES, ())
    (tmp_path / "tokenizer.model").write_bytes(model_of())
    tokenizer = sentencepiece_tokenizer(tmp_path)
    assert tokenizer.chat(HELLO) == "list default: hi"
    assert tokenizer.chat(HELLO, tools=TOOLS) == "list tool_use: hi 1"
    (tmp_path / "chat_template.jinja").write_text(template("", "file"))
    assert sentencepiece_tokenizer(tmp_path).chat(HELLO, tools=TOOLS) == "file : hi 1"


def test_templates_in_a_gguf_file(monkeypatch):
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "i"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * len(pieces),
        "tokenizer.chat_template": template("default", "file"),
        "tokenizer.chat_template.tool_use": template("tool_use", "file"),
        "tokenizer.chat_templates": ["tool_use"],
    }
    monkeypatch.setattr(gguf_tokenizer, "GGUFFile", lambda path: SimpleNamespace(metadata=metadata))
    tokenizer = gguf_tokenizer.gguf_tokenizer(Path("model.gguf"))
    assert tokenizer.chat(HELLO) == "file default: hi"
    assert tokenizer.chat(HELLO, tools=TOOLS) == "file tool_use: hi 1"
