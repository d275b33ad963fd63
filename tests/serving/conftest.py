"""Fixtures of the command-line tests: a scripted generator, and a real one with random weights."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from entropic_jax import models
from entropic_jax.serving.cli import main
from entropic_jax.serving.offline import generation
from entropic_jax.serving.options.model import EMBEDDED
from entropic_jax.serving.request import Request, RequestError
from entropic_jax.serving.request.transcript import Completion, Token, Transcript

EOS = 0
BEGIN, END = "<begin>", "<end>"


class Characters:
    """Token n is the text of entry n - 1 of the script; a token that ends with "…" waits for the next."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces, self.waiting = pieces, ""

    def push(self, token: int) -> str:
        text = self.waiting + self.pieces[token - 1]
        self.waiting = text if text.endswith("…") else ""
        return "" if self.waiting else text.replace("…", "")

    def flush(self) -> str:
        return self.waiting.replace("…", "\ufffd")


class Scripted:
    """Emits its pieces one token each, then ends the text or starts over."""

    def __init__(self, pieces: Sequence[str], interrupt_after: int | None = None) -> None:
        self.pieces, self.interrupt_after = pieces, interrupt_after
        self.requests: list[Request] = []
        self.defaults = {"temperature": 0.75}
        self.vocabulary = 1000

    def chat(self, messages) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def stream(self, request: Request) -> Iterator[Token]:
        yield from self._tokens(request, self._transcript(request))

    def batch(self, requests: Sequence[Request]) -> Iterator[Completion]:
        for request in requests:
            transcript = self._transcript(request)
            if request.prompt == "broken":
                transcript.finish("error", "the logits are not finite")
            else:
                list(self._tokens(request, transcript))
            yield transcript.completion()

    def _transcript(self, request: Request) -> Transcript:
        self.requests.append(request)
        if len(request.prompt) > 1000:
            raise RequestError(f"prompt must have at most 1000 tokens; got {len(request.prompt)}")
        return Transcript(request, Characters(self.pieces), len(request.prompt), {EOS})

    def _tokens(self, request: Request, transcript: Transcript) -> Iterator[Token]:
        time = count = 0
        script = [*range(1, len(self.pieces) + 1), EOS]
        while transcript.finish_reason is None:
            if count == self.interrupt_after:
                raise KeyboardInterrupt
            token = script[count % (len(script) - request.ignore_eos)]
            entropy = 0.5 * (count % 11)
            time += 0.25
            count += 1
            metrics = {
                "entropy": entropy,
                "varentropy": entropy**2,
                "surprisal": float("inf"),
                "entropic_time": time,
            }
            yield from transcript.add(token, metrics)


@pytest.fixture
def script(monkeypatch):
    """`script("a", "b")` makes every model say "ab"; returns the generator, which keeps its requests."""

    def install(*pieces: str, **options) -> Scripted:
        generator = Scripted(pieces, **options)
        generator.loaded = []
        load = lambda path, dtype, *_: generator.loaded.append((path, dtype)) or generator
        monkeypatch.setattr(generation, "load", load, raising=False)
        monkeypatch.setattr(
            "entropic_jax.serving.options.compilation_cache.remember_compilations", lambda: None
        )
        return generator

    return install


@pytest.fixture
def entropic(capsys):
    """`entropic("generate", …)` runs the command line in this process; returns status, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    logger = logging.getLogger("entropic_jax")  # a server in this process may have configured it
    handlers, level = logger.handlers[:], logger.level
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    yield run
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> str:
    """A byte-level Llama with random weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate([BEGIN, END, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BEGIN, END])
    settings = {"bos_token": BEGIN, "eos_token": END, "add_bos_token": True}
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    config = models.Config(
        architecture="LlamaForCausalLM",
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=(1,),
    )
    tokenizer = models.Tokenizer(backend, settings, template)
    path = tmp_path_factory.mktemp("model")
    models.save(dataclasses.replace(models.initialise(config, 0), tokenizer=tokenizer), path)
    return str(path)


@pytest.fixture(scope="session")
def served():
    """The text side of the embedded model, without its weights."""
    import json

    from entropic_jax.serving.http.served_model import describe

    pytest.importorskip("llguidance", reason="the extra `serve` is not installed")
    folder = EMBEDDED
    config = models.Config(
        architecture="LlamaForCausalLM",
        vocab_size=4096,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=(1,),
    )
    settings = json.loads((folder / "generation_config.json").read_text())
    model = models.Model(config, {}, models.Tokenizer.from_directory(folder), settings)
    return describe(model, str(folder), ("embedded", "default"), 256)


@pytest.fixture(scope="module")
def scripted_server(served, request):
    """A server over a scripted engine; the tests of a module share it, and may set its `SERVER_SETTINGS`."""
    from entropic_jax.serving.http.frontend import Frontend
    from entropic_jax.serving.http.settings import Settings

    from .live import serving
    from .scripted_engine import ScriptedEngine

    engine = ScriptedEngine(served)
    changes = getattr(request.module, "SERVER_SETTINGS", {})
    settings = Settings(port=0, request_timeout=30.0, on_engine_failure="stay", **changes)
    frontend = Frontend(engine, served, settings)
    with serving(frontend) as running:
        running.engine, running.model = engine, served
        running.calling, running.tokens = frontend.tool_calling, engine.tokens
        yield running


@pytest.fixture
def live(scripted_server):
    """The same server, reset: its fastest pace, its text, its parser of tool calls."""
    engine = scripted_server.engine
    engine.prefill = engine.pace = 0.0
    engine.room, engine.is_ready, engine.failed = 10**6, True, None
    scripted_server.frontend.draining, scripted_server.frontend.tool_calling = False, scripted_server.calling
    engine.tokens = scripted_server.tokens
    engine.cancelled.clear()
    return scripted_server


@pytest.fixture(scope="session")
def real():
    """A server over the real engine and the embedded model; the tests of all clients share it."""
    pytest.importorskip("llguidance", reason="the extra `serve` is not installed")
    from .real_server import real_server

    with real_server(directory=EMBEDDED) as live:
        yield live
