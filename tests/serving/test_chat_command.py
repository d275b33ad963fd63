"""`entropic chat`: over the scripted engine, over our server, and over another with OpenAI's API."""

import argparse
import http.server
import io
import json
import stat
import threading
from pathlib import Path

import pytest
from rich.console import Console
from rich.style import Style

from entropic_jax.serving.commands import chat_local
from entropic_jax.serving.commands.chat_backend import Piece, RemoteChat
from entropic_jax.serving.commands.chat_local import LocalChat
from entropic_jax.serving.commands.chat_session import Session, _write_history
from entropic_jax.serving.options.control_options import Control

from .scripted_engine import SCRIPT, ScriptedEngine


class OtherServer(http.server.BaseHTTPRequestHandler):
    """Chat completions without entropies; the message "fail" is refused, "cut" breaks off."""

    def do_GET(self):
        self.answer(200, {"object": "list", "data": [{"id": "other"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append((body, self.headers.get("authorization")))
        text = body["messages"][-1]["content"]
        if text == "fail":
            self.answer(400, {"error": {"message": "not today"}})
            return
        self.send_response(200)
        self.end_headers()
        chunk = lambda delta, reason=None: {"choices": [{"delta": delta, "finish_reason": reason}]}
        events = [
            chunk({"role": "assistant"}),
            chunk({"reasoning_content": "hm"}),
            chunk({"content": "You: "}),
        ]
        events += [{"error": {"message": "the roof fell in"}}] if text == "cut" else []
        for event in (*events, chunk({"content": text}, "stop"), {"choices": []}):
            self.wfile.write(b": comment\n\ndata: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, status, tree):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(tree).encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def other():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherServer)
    server.bodies = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def local(served, monkeypatch):
    """The scripted engine in place of a model."""
    engine = ScriptedEngine(served)
    start = lambda options, control, overrides: LocalChat(
        engine, served, control._replace(preset=control.preset or "off"), overrides
    )
    monkeypatch.setattr(chat_local, "start", start)
    return engine


@pytest.fixture
def talk(entropic, monkeypatch):
    def run(*lines, arguments=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return entropic("chat", *arguments)

    return run


def prompts(engine):
    return [engine.model.tokenizer.decode(r.request.prompt) for r in engine.engine_requests]


def test_a_conversation_with_an_engine(local, talk):
    lines = ("Hello", "", "More \\", "lines", "/reset", "Again", "/exit", "x")
    status, out, err = talk(*lines, arguments=("--seed", "0", "--system", "Be brief."))
    assert status == 0 and out.startswith(SCRIPT) and out.count("def add") > 1
    first, second, third = prompts(local)
    opening = "### System\nBe brief.\n\n### User\n"
    assert first == f"{opening}Hello\n\n### Assistant\n"
    assert second.startswith(first + SCRIPT) and "### User\nMore \nlines\n" in second
    assert third == f"{opening}Again\n\n### Assistant\n"
    assert "a new conversation begins" in err and local.closed is None
    requests = [request.request for request in local.engine_requests]
    assert [request.seed for request in requests] == [0, 1, 2] and requests[0].stop == ("\n### User",)


def test_presets(local, talk):
    status, _, err = talk("/preset", "/preset micro", "Hi", "/preset warm", "Hi", arguments=("--seed", "1"))
    assert [request.control.preset for request in local.engine_requests] == ["micro", "micro"]
    assert "preset: off (of off, micro)" in err
    assert "/preset must be one of off, micro; got warm" in err and status == 0


def test_commands(local, talk):
    _, out, err = talk("/help", "/rest", "/usr/bin is a folder")
    assert "there is no command /rest; did you mean /reset?" in err and "/preset" in err
    assert "def add" in out and "/usr/bin is a folder" in prompts(local)[0]


def test_a_conversation_that_is_too_long_is_refused_and_forgotten(local, talk):
    status, out, err = talk("x " * 300, "Hi", arguments=("--seed", "0"))
    assert status == 1 and "the conversation must have at most 255 tokens (/reset begins another); got" in err
    assert prompts(local) == ["### User\nHi\n\n### Assistant\n"] and "return" in out


def drawn(pieces, **options):
    class Fixed:
        name, preset = "fixed", None
        reply = staticmethod(lambda messages: iter(pieces))

    # Rich keeps the escape codes of a combined style, whichever terminal they were written for.
    Style._add.cache_clear()
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=90, **{"color_system": "truecolor", **options})
    Session(Fixed(), console=console)._answer("x")
    return out.getvalue()


def test_tokens_have_the_colour_of_their_entropy(monkeypatch):
    pieces = [Piece("calm", 0.1), Piece(" wild\x1b[2J", 9.0), Piece("", finish_reason="length")]
    text = drawn(pieces)
    assert "\x1b[38;2;224;0;148m wild␛[2J".replace("␛", "\u241b") in text and "calm" in text
    assert "mean entropy 4.55 nats · ended at max_tokens" in text
    for entropy in (1.0, 3.0, 9.0):
        assert "\x1b[38;5;" in drawn([Piece("x", entropy)], color_system="256")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[38" not in drawn(pieces)


def test_our_server_sends_entropies(live, talk):
    backend = RemoteChat(live.url, None, None, Control(preset="micro"), {"seed": 0})
    assert (backend.name == "embedded" and backend.presets() == ["off", "micro"]) or backend.presets()
    pieces = list(backend.reply([{"role": "user", "content": "Hi"}]))
    assert "".join(piece.text for piece in pieces).strip() == SCRIPT.strip()
    assert pieces[1].entropy == 0.5 and pieces[-1].finish_reason == "stop"
    assert live.engine.engine_requests[-1].control.preset == "micro"
    status, out, _ = talk("Hi", arguments=("--url", f"{live.url}/v1", "--temperature", "0.5", "--seed", "0"))
    assert status == 0 and "return a + b" in out
    assert live.engine.engine_requests[-1].request.temperature == 0.5
    assert live.engine.engine_requests[-1].control.preset == "off"


def test_any_server_with_openai_s_api(other, talk):
    url = f"http://127.0.0.1:{other.server_address[1]}"
    arguments = ("--url", url, "--api-key", "k", "--system", "S")
    status, out, err = talk("a", "fail", "cut", "b", "/preset micro", arguments=arguments)
    assert out == "You: a\nYou: \nYou: b\n" and status == 1
    assert f"{url} answered 400: not today" in err and "the roof fell in" in err
    assert "a preset needs a server of entropic_jax" in err
    body, key = other.bodies[-1]
    assert key == "Bearer k" and "entropic" not in body and body["model"] == "other"
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--url", "ftp://x"), "--url must be http://host:port or https://host; got ftp://x"),
        (("--url", "http://127.0.0.1:1"), "--url must be a running server; got http://127.0.0.1:1"),
        (("--url", "x", "--dtype", "float32"), "--dtype must not be set with --url; got float32"),
        (("--url", "x", "--method", "quest"), "--method must not be set with --url; got quest"),
        (("--url", "x", "--no-parse-special"), "--no-parse-special must not be set with --url"),
        (("--temperature", "-1"), "--temperature must be"),
    ],
)
def test_bad_options(talk, arguments, said):
    status, _, err = talk(arguments=arguments)
    assert status == 2 and said in err


@pytest.mark.parametrize("flag", ["--parse-special", "--no-parse-special"])
def test_special_tokens_in_messages(flag, talk, monkeypatch):
    """The engine gets the option, which it hands to the tokenizer."""
    stated = []

    def start_engine(_, options, **__):
        stated.append(options.parse_special)
        raise ValueError("no model")

    monkeypatch.setattr(chat_local, "start_engine", start_engine)
    status, _, err = talk(arguments=(flag,))
    assert status != 0 and "no model" in err and stated == [flag == "--parse-special"]


def test_an_api_key_without_a_server_is_refused():
    from entropic_jax.serving.request import RequestError

    with pytest.raises(RequestError, match="--api-key needs --url"):
        chat_local.start(argparse.Namespace(api_key="k"), Control(), {})


def test_only_its_user_reads_the_history(tmp_path):
    path = tmp_path / "folder" / "history"
    _write_history(lambda name: Path(name).write_text("x"), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
