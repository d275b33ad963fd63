"""The end of the warm-up: it is reported once passes are timed, and once."""

import threading
from types import SimpleNamespace

import pytest

from entropic_jax.serving.engine.warmup import Warmup


@pytest.mark.parametrize("failure", [None, ValueError("costs")])
def test_a_warm_up_is_complete_once_passes_are_timed(failure):
    events, compiled = [], set()

    def end():
        events.append("timed")
        if failure is None:
            warmup.ended.set()
        return failure

    warmup = SimpleNamespace(
        ended=threading.Event(),
        _lock=threading.Lock(),
        _keys=[("a",), ("b",)],
        _programs=SimpleNamespace(is_compiled=compiled.__contains__, compiler=None),
        serves=True,
        _progress=lambda done, total: events.append((done, total)),
        _notify=events.append,
        _end=end,
    )
    for key in (("a",), ("b",), ("later",)):
        compiled.add(key)
        Warmup._compiled(warmup, None)
        if failure is not None and len(compiled) == 2:
            assert events == [(1, 2), None, "timed", failure]
            return
    assert events == [(1, 2), None, "timed", (2, 2), None, None]


def test_programs_that_serve_a_request_are_compiled_before_others_begin():
    queued, compiled = [], set()
    warmup = object.__new__(Warmup)
    warmup.ended, warmup._lock = threading.Event(), threading.Lock()
    warmup.first, warmup._later = [("a",), ("b",)], [("c",), ("d",)]
    warmup._keys = [*warmup.first, *warmup._later]
    warmup._progress, warmup._notify = lambda *_: None, lambda _: None
    compiler = SimpleNamespace(enqueue=queued.extend)
    warmup._programs = SimpleNamespace(is_compiled=compiled.__contains__, compiler=compiler)
    compiled.add(("b",))
    warmup._compiled(None)
    assert queued == [] and not warmup.serves
    compiled.add(("a",))
    warmup._compiled(None)
    assert queued == [("c",), ("d",)] and warmup.serves
    compiled.add(("c",))
    warmup._compiled(None)
    assert queued == [("c",), ("d",)]
