import contextlib
import io
import json
import os
import re
import subprocess
import sys

import pytest

from entropic_jax import __version__
from entropic_jax.serving.cli import COMMANDS
from entropic_jax.serving.commands.generate import DEFAULT_PROMPT
from entropic_jax.serving.options.model import EMBEDDED


@pytest.fixture
def stdin(monkeypatch, tmp_path):
    """`stdin(bytes)` makes standard input a file with these bytes."""

    def put(data: bytes) -> None:
        path = tmp_path / "stdin"
        path.write_bytes(data)
        monkeypatch.setattr(sys, "stdin", opened.enter_context(path.open()))

    with contextlib.ExitStack() as opened:
        yield put


def test_plain_text_is_all_there_is(script, entropic):
    script("def ", "f():", "\n", "    pass")
    assert entropic("generate", "--prompt", "x") == (0, "def f():\n    pass\n", "")


def test_fields_reach_the_request(script, entropic):
    generator = script("a")
    entropic(
        "generate",
        "--prompt=x",
        "--max-tokens=3",
        "--temperature=0",
        "--top-k=4",
        "--top-p=0.5",
        "--min-p=0.1",
        "--typical-p=0.9",
        "--repetition-penalty=1.5",
        "--presence-penalty=-1",
        "--frequency-penalty=2",
        "--logit-bias=7=-1.5",
        "--logit-bias=8=-inf",
        "--seed=5",
        "--stop=a",
        "--stop=b",
        "--ignore-eos",
        "--model=some/where",
        "--dtype=bfloat16",
    )
    (request,) = generator.requests
    assert (request.prompt, request.max_tokens, request.seed, request.stop) == ("x", 3, 5, ("a", "b"))
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.0, 4, 0.5, 0.1)
    assert (request.typical_p, request.repetition_penalty) == (0.9, 1.5)
    assert (request.presence_penalty, request.frequency_penalty) == (-1.0, 2.0)
    assert request.logit_bias == {7: -1.5, 8: -float("inf")}
    assert request.ignore_eos
    ((path, dtype),) = generator.loaded
    assert (str(path), dtype) == (os.path.join("some", "where"), "bfloat16")


def test_the_models_defaults_hold_where_nothing_is_given(script, entropic):
    generator = script("a")
    entropic("generate", "--prompt", "x")
    entropic("generate", "--prompt", "x")
    first, second = generator.requests
    assert (first.temperature, first.top_p, first.max_tokens) == (0.75, 1.0, 256)
    assert first.seed != second.seed
    assert generator.loaded[0] == (EMBEDDED, None)


def test_json_is_one_object(script, entropic):
    script("a", "b")
    status, out, _ = entropic("generate", "--prompt", "xyz", "--json", "--seed", "3")
    assert status == 0
    tree = json.loads(out)
    assert tree["text"] == "ab"
    assert tree["token_ids"] == [1, 2, 0]
    assert tree["finish_reason"] == "stop"
    assert tree["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert tree["trace"]["entropy"] == [0.0, 0.5, 1.0]
    assert tree["trace"]["surprisal"] == [None] * 3
    assert tree["seed"] == 3


def test_limit_of_tokens(script, entropic):
    script("a", "b", "c")
    tree = json.loads(entropic("generate", "--prompt", "x", "--json", "--max-tokens", "2")[1])
    assert (tree["text"], tree["finish_reason"]) == ("ab", "length")


def test_stop_string_ends_the_text(script, entropic):
    script("one\n", "\n", "two")
    assert entropic("generate", "--prompt", "x", "--stop", "\n\n")[1] == "one\n"


def test_chat_template(script, entropic):
    generator = script("a")
    entropic("generate", "--chat", "--prompt", "hello")
    assert generator.requests[0].prompt == "<user>hello"


def test_prompt_from_a_file_loses_its_last_line_break(script, entropic, tmp_path):
    generator = script("a")
    file = tmp_path / "prompt"
    file.write_text("ä\n\n")
    entropic("generate", "--prompt-file", str(file))
    assert generator.requests[0].prompt == "ä\n"


@pytest.mark.parametrize("arguments", [(), ("--prompt-file", "-")])
def test_prompt_from_standard_input(script, entropic, stdin, arguments):
    generator = script("a")
    stdin(b"def f(\n")
    entropic("generate", *arguments)
    assert generator.requests[0].prompt == "def f("


def test_without_any_prompt_the_embedded_model_has_one(script, entropic, monkeypatch):
    generator = script("a")
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert entropic("generate")[0] == 0
        assert generator.requests[0].prompt == DEFAULT_PROMPT
        status, _, err = entropic("generate", "--model", "other")
    assert status == 2
    assert "a prompt is required: give --prompt" in err


def batch(tmp_path, *lines):
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


def test_batch(script, entropic, tmp_path):
    generator = script("a", "b")
    file = batch(
        tmp_path,
        {"prompt": "one", "id": "first", "max_tokens": 1, "stop": "x"},
        "",
        {"prompt": [1, 2], "seed": 9, "logit_bias": {"3": 1}},
        {"messages": [{"role": "user", "content": "hi"}]},
    )
    status, out, err = entropic("generate", "--batch-file", file, "--seed", "5", "--temperature", "0.5")
    assert (status, err) == (0, "")
    first, second, third = map(json.loads, out.splitlines())
    assert (first["id"], first["index"], first["text"], first["finish_reason"]) == ("first", 0, "a", "length")
    assert "id" not in second
    assert [line["seed"] for line in (first, second, third)] == [5, 9, 7]
    assert [r.temperature for r in generator.requests] == [0.5] * 3
    assert [r.prompt for r in generator.requests] == ["one", (1, 2), "<user>hi"]
    assert third["usage"]["completion_tokens"] == len(third["trace"]["entropy"]) == 3


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('{"prompt": "x", "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        ('{"prompt": "x", "prompt": "x"}', "prompt"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
        ('{"prompt": "x", "logit_bias": {"7": 1, "7": 2}}', "7"),
    ],
)
def test_a_line_states_each_key_once(script, entropic, tmp_path, line, name):
    file = tmp_path / "twice.jsonl"
    file.write_text(json.dumps({"prompt": "x"}) + "\n" + line)
    status, out, err = entropic("generate", "--batch-file", str(file))
    assert status != 0 and not out
    assert f"line 2 must state '{name}' once; got it 2 times" in " ".join(err.split())


def test_a_failed_request_does_not_stop_the_batch(script, entropic, tmp_path):
    script("a")
    status, out, _ = entropic(
        "generate", "--batch-file", batch(tmp_path, {"prompt": "broken"}, {"prompt": "x"})
    )
    broken, fine = map(json.loads, out.splitlines())
    assert status == 1
    assert (broken["finish_reason"], broken["error"]) == ("error", "the logits are not finite")
    assert fine["text"] == "a"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "must be a JSON object; got {"),
        ([1], "must be an object with either `prompt` or `messages`; got [1]"),
        ({"max_tokens": 3}, "`prompt` or `messages`"),
        ({"prompt": "a", "messages": []}, "`prompt` or `messages`"),
        ({"prompt": "a", "topp": 1}, "must only have the keys prompt, max_tokens"),
        ({"prompt": "a", "top_p": 2}, "top_p must be a number above 0 and at most 1; got 2"),
        ({"prompt": 3}, "prompt must be a string or a list of token ids; got 3"),
        (
            {"messages": "hi"},
            "messages must be a list of one or more objects with `role` and `content`; got 'hi'",
        ),
        (
            {"messages": [{"role": "user"}]},
            "messages must be a list of one or more objects with `role` and `content`; got [{'role'",
        ),
        (
            {"messages": []},
            "messages must be a list of one or more objects with `role` and `content`; got []",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content must be Unicode; got"),
        ({"prompt": "x", "id": float("nan")}, "line 2: id must be finite JSON; got nan"),
    ],
)
def test_a_wrong_line_is_named_before_anything_runs(script, entropic, tmp_path, line, said):
    generator = script("a")
    status, out, err = entropic("generate", "--batch-file", batch(tmp_path, {"prompt": "x"}, line))
    assert (status, out, generator.requests) == (2, "", [])
    assert "line 2" in err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "-1"], "--temperature must be a number between 0 and 1000; got -1"),
        (["--temperature", "hot"], "--temperature must be a number between 0 and 1000; got hot"),
        (["--temperature", "nan"], "--temperature must be a number between 0 and 1000; got nan"),
        (["--top-p", "0"], "--top-p must be a number above 0 and at most 1; got 0"),
        (["--max-tokens", "0"], "--max-tokens must be an integer between 1 and 2147483647; got 0"),
        (["--max-tokens", "1.5"], "--max-tokens must be an integer between 1 and 2147483647"),
        (["--logit-bias", "a=b"], "--logit-bias must be ID=VALUE, as 17=-2.5; got a=b"),
        (["--logit-bias=-3=1"], "error: --logit-bias must be a mapping of up to 300 token ids to numbers"),
        (
            ["--stop", ""],
            "error: --stop must be a string of 1 to 1024 characters; got ''",
        ),
        (["--dtype", "int4"], "error: --dtype must be one of auto, float32, bfloat16, float16; got int4"),
        (
            ["--prompt-file", "missing.txt"],
            "--prompt-file must be a readable file; got missing.txt (No such file",
        ),
        (
            ["--batch-file", "missing.txt"],
            "--batch-file must be a readable file; got missing.txt (No such file",
        ),
        (["--batch-file", "a", "--prompt", "b"], "--prompt must not be combined with --batch-file"),
        (["--top-k"], "error: --top-k must have a value"),
        (["--ignore-eos=1"], "error: --ignore-eos must have no value; got 1"),
        (["--cache-budget", "x"], "error: --cache-budget must be an integer; got x"),
        (["--tempera", "1"], "unrecognized arguments: --tempera"),
        (["--prompt", "x" * 1001], "prompt must have at most 1000 tokens; got 1001"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(script, entropic, arguments, said):
    script("a")
    prompt = [] if {"--prompt", "--prompt-file", "--batch-file"} & {*arguments} else ["--prompt", "x"]
    status, _, err = entropic("generate", *prompt, *arguments)
    assert status == 2
    assert said in err
    assert err.startswith(("entropic generate: error: ", "entropic: error: "))
    assert err.count("\n") == 1


def test_text_that_is_not_utf8(script, entropic, stdin):
    script("a")
    stdin(b"ab\xff")
    status, _, err = entropic("generate")
    assert status == 2
    assert "must be text in UTF-8; got" in err and "at byte 2" in err


def test_a_model_that_cannot_be_loaded(script, entropic, monkeypatch):
    script("a")

    def load(*_):
        raise ValueError("config.json is missing")

    monkeypatch.setattr("entropic_jax.serving.offline.generation.load", load)
    status, _, err = entropic("generate", "--prompt", "x", "--model", "nowhere")
    assert (status, err) == (2, "entropic generate: error: --model nowhere: config.json is missing\n")


def test_a_fault_of_ours_is_not_hidden(script, entropic, monkeypatch):
    generator = script("a")
    monkeypatch.setattr(type(generator), "stream", lambda self, request: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        entropic("generate", "--prompt", "x")


def test_interrupt(script, entropic):
    script("a", "b", "c", interrupt_after=2)
    assert entropic("generate", "--prompt", "x") == (130, "ab", "")


def test_broken_pipe_is_quiet(script, monkeypatch, capfd):
    from entropic_jax.serving.cli import main

    script(*["a"] * 100)
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))
    assert main(["generate", "--prompt", "x"]) == 141
    sys.stdout.close()
    assert capfd.readouterr().err == ""


def test_text_that_the_encoding_lacks_is_replaced(script, monkeypatch):
    from entropic_jax.serving.cli import main

    script("ä", "b")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii", write_through=True))
    assert main(["generate", "--prompt", "x"]) == 0
    assert raw.getvalue() == b"?b\n"


def test_help_needs_no_heavy_import():
    code = (
        "import sys, entropic_jax.serving.cli\n"
        "entropic_jax.serving.cli.parser().format_help()\n"
        "heavy = ('jax', 'numpy', 'rich', 'entropic_jax.models', 'entropic_jax.loop')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_version(entropic):
    assert entropic("--version") == (0, f"entropic_jax {__version__}\n", "")


def test_help_lists_every_command(entropic):
    status, out, _ = entropic("--help")
    assert status == 0 and out.startswith("usage: entropic")
    assert all(re.search(rf"^ +{command}\s", out, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(entropic, command):
    status, out, _ = entropic(command, "--help")
    assert status == 0
    assert out.startswith(f"usage: entropic {command}")
