"""Read-ahead: a process loads what the one before it has used, once, and nothing else."""

import threading

import chex
import numpy as np
import pytest

from entropic_jax import entropy
from entropic_jax.serving import executable_cache
from entropic_jax.serving.executable_cache import load_or_compile, read_ahead
from entropic_jax.serving.executable_cache.read_ahead import ReadAhead

LOGITS = np.linspace(-3.0, 3.0, 32, dtype=np.float32).reshape(2, 16)


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Begin a process, as far as read-ahead can tell; returns the threads that load each program in it."""
    monkeypatch.setenv("ENTROPIC_PROGRAM_CACHE", str(tmp_path))
    load = executable_cache.load_program

    def begin() -> list[threading.Thread]:
        loads: list[threading.Thread] = []

        def counted(*arguments):
            loads.append(threading.current_thread())
            return load(*arguments)

        monkeypatch.setattr(executable_cache, "load_program", counted)
        monkeypatch.setattr(
            executable_cache,
            "AHEAD",
            ReadAhead(lambda file: counted(file, (executable_cache.default_device(),))),
        )
        return loads

    return begin


def statistics():
    """The program, and whether it was compiled."""
    program, compiled = load_or_compile(entropy.entropy_statistics, (LOGITS,))
    return program(LOGITS), compiled


def test_programs_of_the_process_before_are_read_ahead(process):
    process()
    read_ahead("work")
    expected, compiled = statistics()
    assert compiled
    loads = process()
    read_ahead("other work")
    assert not loads
    read_ahead("work")
    result, compiled = statistics()
    chex.assert_trees_all_equal(result, expected)
    assert not compiled and len(loads) == 1 and loads[0] is not threading.current_thread()
    assert not statistics()[1] and loads[1:] == [threading.current_thread()], "taken once"


def test_a_process_that_uses_another_program_notes_its_own(process, tmp_path):
    process()
    read_ahead("work")
    statistics()
    (used,) = tmp_path.rglob("*.used")
    before = used.stat().st_mtime_ns
    process()
    read_ahead("work")
    statistics()
    assert used.stat().st_mtime_ns == before
    process()
    read_ahead("work")
    load_or_compile(entropy.entropy_statistics, (LOGITS[:1],))
    loads = process()
    read_ahead("work")
    assert not statistics()[1] and threading.current_thread() in loads, "it was not read ahead"


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[1]", '["missing.program"]', '["../../etc/passwd"]'])
def test_a_list_or_a_file_that_cannot_be_used_is_ignored(process, tmp_path, text):
    process()
    read_ahead("work")
    statistics()
    (used,) = tmp_path.rglob("*.used")
    used.write_text(text, "utf-8")
    process()
    read_ahead("work")
    assert not statistics()[1]
