"""Programs of offline generation: requests of usual lengths share them, and later engines read them."""

import pytest

from entropic_jax import models
from entropic_jax.serving import executable_cache
from entropic_jax.serving.offline import programs
from entropic_jax.serving.offline.engine import Engine
from entropic_jax.serving.request import Request
from tests.shallow_model import shallow_model

pytestmark = pytest.mark.slow


def text(engine: Engine, most_tokens: int) -> str:
    request = Request(prompt="import numpy", max_tokens=most_tokens, temperature=0.0)
    return "".join(token.text for token in engine.stream(request))


def test_a_longer_text_needs_no_other_program(monkeypatch):
    read = []
    monkeypatch.setattr(programs, "begin_reading", lambda *launch: read.append(launch) or (lambda: None))
    compiled = counted(monkeypatch)
    engine = Engine(models.load(shallow_model(), progress=False))
    for most_tokens in (20, 400, 900):
        text(engine, most_tokens)
    assert len(compiled) == 2 and len(read) == 1  # for the prompt and for the text


def counted(monkeypatch) -> list:
    """Every program that is compiled from here on."""
    names, load_or_compile = [], programs.load_or_compile
    counting = lambda *launch: names.append(launch[0].func.__name__) or load_or_compile(*launch)
    monkeypatch.setattr(programs, "load_or_compile", counting)
    return names


def test_a_later_engine_reads_the_decode_program_beside_the_prompt(tmp_path, monkeypatch):
    monkeypatch.setenv(executable_cache.VARIABLE, str(tmp_path))
    model = models.load(shallow_model(), progress=False)
    compiled = counted(monkeypatch)
    first = text(Engine(model), 12)
    assert compiled == ["prefill", "generate"] and first
    del compiled[:]
    engine = Engine(model)
    assert text(engine, 12) == first
    assert compiled == ["prefill"] and not engine._programs._begun
    for file in tmp_path.rglob("*.program"):
        file.write_bytes(b"damaged")
    assert text(Engine(model), 12) == first
