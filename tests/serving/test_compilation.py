"""The notice that programs are being compiled: once, where a person or a log sees it."""

import io
import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from entropic_jax.serving.engine.warmup import CompilationCount
from entropic_jax.serving.executable_cache import compilation
from entropic_jax.serving.executable_cache.compilation import (
    COMPILED,
    LOG,
    LONG,
    NOTICE,
    Notice,
    compile_program,
)
from entropic_jax.serving.llm.progress import GenerationBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(compilation, "sys", SimpleNamespace(stderr=stream))
    monkeypatch.setattr(LOG, "level", logging.WARNING)  # as in a script that configures no log
    LOG.manager._clear_cache()
    return stream


def test_a_compilation_is_announced_once_on_a_terminal(terminal, monkeypatch):
    monkeypatch.setattr(compilation, "notice", Notice())
    double = compile_program(lambda x: 2 * x, (np.float32(1),), ())
    assert float(double(np.float32(3))) == 6 and terminal.getvalue() == f"entropic_jax: {NOTICE}\n"
    compile_program(lambda x: 3 * x, (np.float32(1),), ())
    assert terminal.getvalue().count("\n") == 1


def test_a_log_at_info_has_it_in_place_of_the_terminal(terminal, caplog):
    with caplog.at_level(logging.INFO, LOG.name):
        Notice().say()
    assert [record.getMessage() for record in caplog.records] == [NOTICE] and not terminal.getvalue()


def test_elsewhere_nothing_is_printed(capsys, caplog):
    with caplog.at_level(logging.WARNING, LOG.name):
        Notice().say()
    assert capsys.readouterr() == ("", "")


def test_what_jax_compiles_by_itself_is_announced_once_it_takes_long(terminal, monkeypatch):
    listeners = []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", listeners.append)
    notice = Notice()
    notice.watch()
    notice.watch()
    (listen,) = listeners
    listen("/jax/other", 9 * LONG)
    listen(COMPILED, 0.6 * LONG)
    assert not terminal.getvalue()
    listen(COMPILED, 0.6 * LONG, fun_name="prefill")
    listen(COMPILED, LONG)
    assert terminal.getvalue() == f"entropic_jax: {NOTICE}\n"


def test_jax_records_the_event(monkeypatch):
    seen = []
    listener = lambda event, seconds, **_: seen.append(event)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        jax.jit(lambda x: x + 17).lower(np.float32(1)).compile()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert COMPILED in seen


def test_the_bar_says_that_programs_are_being_compiled_and_how_many_are_left(monkeypatch):
    notice, seen = Notice(), []
    compiled = CompilationCount(notice)
    monkeypatch.setattr(compilation, "notice", notice)
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    with GenerationBar(2, True, compiled) as bar:

        def watched(x):
            bar.update()
            seen.append(bar.doing)
            return x

        compile_program(watched, (np.float32(1),), ())
        compiled(3, 12)
        compile_program(lambda x: watched(x), (np.float32(1),), ())
        bar.advance(5)
        seen.append(bar.doing)
    assert seen == ["compiling program 1", "compiling, 9 left", "generating"]
    assert "generating" in stream.getvalue() and "1/2" in stream.getvalue()


def test_without_a_terminal_one_line_says_that_programs_are_being_compiled(monkeypatch):
    notice = Notice()
    monkeypatch.setattr(compilation, "notice", notice)
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    for shown in (False, True, True):
        with GenerationBar(1, shown, CompilationCount(notice)) as bar:
            bar.update()
            with notice.compiling():
                bar.update()
                bar.update()
        assert stream.getvalue() == (f"entropic_jax: {compilation.NOTICE}\n" if shown else "")


def test_a_hidden_bar_writes_nothing(monkeypatch):
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    with GenerationBar(1, False, CompilationCount(Notice())) as bar:
        bar.advance(3)
    assert not stream.getvalue()
