"""Warm-up of the engine: requests run with the first programs, and wait for those they need only."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from entropic_jax.serving.engine import allocator
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.engine.programs import Programs
from entropic_jax.serving.http.metrics import Metrics
from entropic_jax.serving.options.control_options import Control
from tests.serving.test_engine import (  # noqa: F401  (fixtures)
    collect,
    engine_request,
    model,
    nothing_is_left,
    prompt,
)

OPTIONS = dict(max_num_seqs=2, max_num_batched_tokens=16, block_size=4, max_steps=4, warmup="min")
pytestmark = pytest.mark.slow


class HeldCompiler:
    """Compiles a program only once it is allowed to; remembers the order in which programs were begun."""

    def __init__(self, monkeypatch) -> None:
        self.begun: list[tuple] = []
        self.allowed: Callable[[tuple], bool] = lambda key: False
        self.changed = threading.Condition()
        compile_program = Programs.compile

        def held(programs, key, arguments):
            with self.changed:
                self.begun.append(key)
                assert self.changed.wait_for(lambda: self.allowed(key), 120)
            return compile_program(programs, key, arguments)

        monkeypatch.setattr(Programs, "compile", held)

    def allow(self, predicate: Callable[[tuple], bool]) -> None:
        with self.changed:
            self.allowed = predicate
            self.changed.notify_all()


@pytest.fixture
def held(model, monkeypatch) -> Iterator[tuple[LLMEngine, HeldCompiler]]:  # noqa: F811
    compiler = HeldCompiler(monkeypatch)
    engine = LLMEngine(model, EngineOptions(**OPTIONS, compile_workers=4))
    yield engine, compiler
    compiler.allow(lambda key: True)
    engine.close()
    nothing_is_left(engine)


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def gauge(engine: LLMEngine, name: str) -> float:
    text = Metrics(engine, "model", "vllm").text().decode()
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"vllm:{name}{{")))


def test_requests_run_with_the_first_programs(held):
    engine, compiler = held
    streams = [engine.submit(engine_request(f"r{i}", prompt(20, i), seed=i)) for i in range(3)]
    assert gauge(engine, "num_requests_waiting") == 3 and not engine.serves() and not engine.ready()
    compiler.allow(lambda key: key in engine.warmup.first)
    results = [collect(stream) for stream in streams]  # one after the other: there is one program of one row
    assert [last.finish_reason for _, last in results] == ["length"] * 3
    assert engine.serves() and not engine.ready()
    assert set(engine.programs._compiled) == {*engine.warmup.first}
    assert set(compiler.begun[:3]) == {*engine.warmup.first}
    assert gauge(engine, "num_requests_waiting") == 0
    compiler.allow(lambda key: True)
    assert engine.warmup.ended.wait(300) and engine.ready() and engine.compilations == 0
    together = [engine.submit(engine_request(f"r{i}", prompt(20, i), seed=i)) for i in range(3)]
    assert [collect(stream)[0] for stream in together] == [tokens for tokens, _ in results]


def test_a_request_that_waits_for_its_program_holds_up_no_other(held):
    engine, compiler = held
    compiler.allow(lambda key: key in engine.warmup.first)
    pruned = engine.submit(engine_request("pruned", prompt(20), Control("full-lossy")))
    cancelled = engine.submit(engine_request("cancelled", prompt(20), Control("full-lossy")))
    late = engine.submit(engine_request("late", prompt(20), Control("full-lossy"), timeout=0.3))
    for number in range(2):
        _, last = collect(engine.submit(engine_request(f"plain {number}", prompt(9, number))))
        assert last.finish_reason == "length"
    cancelled.cancel()
    assert collect(cancelled)[1].finish_reason == "abort"
    assert collect(late)[1].timed_out
    assert engine.snapshot()["waiting"] == 1
    compiler.allow(lambda key: True)
    _, last = collect(pruned)
    assert last.finish_reason == "length"


def test_a_missing_program_is_compiled_next(model, monkeypatch):  # noqa: F811
    compiler = HeldCompiler(monkeypatch)
    engine = LLMEngine(model, EngineOptions(**OPTIONS, compile_workers=1))
    until(lambda: len(compiler.begun) == 1)
    scored = engine.submit(engine_request("scored", prompt(20), prompt_logprobs=1, presence_penalty=1.0))
    queue = engine.programs.compiler._queue
    until(lambda: ("apply", True) in queue[:2] and any(key[0] == "prefill" and key[3] for key in queue[:2]))
    compiler.allow(lambda key: True)
    assert collect(scored)[1].finish_reason == "length"
    engine.close()
    nothing_is_left(engine)


def test_a_program_that_cannot_be_compiled_ends_every_request(model, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Programs, "compile", lambda *_: 1 / 0)
    engine = LLMEngine(model, EngineOptions(**OPTIONS))
    until(lambda: engine.failure() is not None)
    assert isinstance(engine.failure(), ZeroDivisionError) and not engine.serves()
    engine.close()


def test_close_waits_no_longer_than_it_may(held):
    engine, compiler = held
    until(lambda: len(compiler.begun) >= 3)
    waiting = engine.submit(engine_request("waiting", prompt(20)))
    start = time.monotonic()
    assert not engine.close(timeout=0.5)
    assert 0.4 < time.monotonic() - start < 5
    assert collect(waiting)[1].finish_reason == "abort"


def test_scored_prompts_share_launches_once_their_programs_are_compiled(model, monkeypatch):  # noqa: F811
    sizes = dict(max_num_seqs=16, max_num_batched_tokens=64, block_size=4, max_steps=4)
    engine = LLMEngine(model, EngineOptions(**sizes, warmup="min"))
    assert engine.warmup.ended.wait(600)
    launched, launch = [], engine.programs.prefill

    def prefill(device_state, chunk, scored):
        launched.append((chunk.tokens.shape[0], scored))
        return launch(device_state, chunk, scored)

    trimmed: list[None] = []
    monkeypatch.setattr(allocator, "trim", lambda: trimmed.append(None))
    monkeypatch.setattr(engine.programs, "prefill", prefill)
    pause = lambda value: engine._in_engine(lambda: setattr(engine.scheduler, "paused", value)).result()

    def crowd(seed: int) -> list[list[float]]:
        pause(True)
        names = [f"scored {number}" for number in range(12)]
        streams = [
            engine.submit(engine_request(name, prompt(9, n), prompt_logprobs=0, max_tokens=1))
            for n, name in enumerate(names)
        ]
        plain = engine.submit(engine_request("plain", prompt(9, seed), max_tokens=1))
        pause(False)
        scores = [[token.logprob for delta in stream for token in delta.prompt[1:]] for stream in streams]
        assert collect(plain)[1].finish_reason == "length"
        return scores

    first = crowd(50)  # by the one program of the warm-up, while another is compiled
    assert launched.count((1, True)) > 0
    until(lambda: engine.programs.is_compiled(("prefill", 4, 17, True)))
    until(lambda: trimmed, 20)  # memory is given back after late compilations, too
    launched.clear()
    second = crowd(51)
    assert len([scored for _, scored in launched if scored]) == 3 and (4, True) in launched
    assert [scored for _, scored in launched].index(False) < 2  # nobody else waits for the crowd
    for earlier, other in zip(first, second, strict=True):
        assert earlier == pytest.approx(other, abs=1e-3)
    engine.close()
    nothing_is_left(engine)
