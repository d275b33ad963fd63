"""Programs that others can stand in for are in memory only while they are used, and never compiled again."""

import threading

import pytest

from entropic_jax.serving.engine import program_memory
from entropic_jax.serving.engine.draft_choice import LEARNING_LAUNCHES, LONGEST_WAIT, DraftChoice
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.engine.program_compiler import ProgramCompiler
from entropic_jax.serving.engine.program_memory import KEPT_SECONDS, PATIENCE, ProgramMemory
from tests.serving.test_engine import collect, engine_request, model, prompt  # noqa: F401  (fixture)
from tests.serving.test_engine_warmup import until

OPTIONS = dict(max_num_seqs=16, max_model_len=128, block_size=4, max_steps=4, speculate="suffix")
OPTIONS |= dict(num_speculative_tokens=3)


def decode(width: int, drafts: bool = False) -> tuple:
    return ("decode", width, None, False, drafts)


SMALL, MIDDLE, LARGE = decode(1), decode(4), decode(16)


def test_programs_of_the_pinnedest_and_the_most_rows_stay():
    memory = ProgramMemory((1, 4, 16), True)
    assert not any(map(memory.is_optional, (SMALL, LARGE, decode(1, True), ("prefill", 1, 17, False))))
    assert all(map(memory.is_optional, (MIDDLE, decode(4, True), decode(16, True))))
    assert not ProgramMemory((1, 4, 16), False).is_optional(MIDDLE)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_program_is_due_after_enough_launches_that_miss_it(drafts):
    memory, key = ProgramMemory((1, 4, 16), True), decode(4, drafts)
    assert not memory.misses(key) and memory.leave_out(key) and memory.is_out(key)
    for _ in range(PATIENCE[drafts] - 1):
        assert memory.misses(key) and memory.misses(key)  # which counts once a launch
        assert memory.launched(LARGE, 0.0) == [] == memory.launched(LARGE, 0.0)
    memory.misses(key)
    assert memory.launched(LARGE, 0.0) == [key]
    assert memory.require(key) and not memory.require(key)  # it is being loaded
    assert memory.is_out(key) and not memory.leave_out(key)
    memory.enter(key, True, 0.0)
    assert not memory.misses(key) and memory.launched(LARGE, 0.0) == []


def test_launches_long_ago_do_not_count():
    memory = ProgramMemory((1, 4, 16), True)
    memory.leave_out(MIDDLE)
    times = [0.0] * (PATIENCE[False] - 1) + [KEPT_SECONDS] * PATIENCE[False]
    due = [memory.misses(MIDDLE) and memory.launched(LARGE, timestamp) for timestamp in times]
    assert due == [[]] * (len(times) - 1) + [[MIDDLE]]


def test_the_program_that_has_waited_longest_leaves_first():
    memory, other = ProgramMemory((1, 4, 16), True), decode(4, True)
    assert memory.drop(1e9) == (None, None)
    for key, timestamp in ((MIDDLE, 0.0), (other, 1.0)):
        memory.require(key)
        memory.enter(key, True, timestamp)
    memory.launched(MIDDLE, 5.0)
    assert memory.drop(2.0) == (None, KEPT_SECONDS - 1)
    assert memory.drop(5.0 + KEPT_SECONDS) == (other, 0.0)
    assert memory.is_out(other) and not memory.is_out(MIDDLE)
    assert memory.drop(5.0 + KEPT_SECONDS) == (MIDDLE, 0.0) and memory.require(MIDDLE)
    memory.enter(decode(16, True), False, 0.0)  # it is not in the cache
    assert memory.drop(1e9) == (None, None)


def test_a_try_of_slower_drafts_is_put_off_without_their_program():
    choice = DraftChoice()
    choice.postpone(4)
    for _ in range(LEARNING_LAUNCHES):
        assert choice.drafts(4, 0.0)
        choice.record(4, True, 1.0, 1.0)
    for _ in range(LONGEST_WAIT):
        choice.record(4, False, 2.0, 1.0)
    assert choice.drafts(4, 0.0) and choice.tries(4, True)
    choice.postpone(4)
    for _ in range(LONGEST_WAIT):
        assert not choice.drafts(4, 0.0)
        choice.record(4, False, 2.0, 1.0)
    assert choice.drafts(4, 0.0)


def test_a_forgotten_program_is_compiled_again():
    compiled, changed = [], threading.Event()
    compiler = ProgramCompiler(
        lambda key, _: compiled.append(key), {MIDDLE: ()}, 1, lambda failure: changed.set()
    )
    for number in range(1, 3):
        assert compiler.prefer(MIDDLE) and changed.wait(10)
        assert compiler.prefer(MIDDLE) and compiled == [MIDDLE] * number
        changed.clear()
        compiler.forget(MIDDLE)
    assert compiler.stop(10)


def decoding(engine: LLMEngine) -> set[tuple]:
    """Rows of the decode programs in memory, and whether they draft tokens."""
    return {(key[1], key[4]) for key in list(engine.programs._compiled) if key[0] == "decode"}


@pytest.mark.exhaustive
def test_an_engine_has_the_programs_in_memory_that_it_uses(model, tmp_path, monkeypatch):  # noqa: F811
    pinned, more = {(1, False), (16, False), (1, True)}, {(4, False), (4, True)}
    requests = [
        engine_request(f"{i}", [7, 8, 9] * 4 + [i], max_tokens=40, seed=i, temperature=0.1) for i in range(3)
    ]

    def together(engine):
        return [collect(stream)[0] for stream in [engine.submit(request) for request in requests]]

    reference = LLMEngine(model, EngineOptions(**OPTIONS))  # without a cache of programs
    assert reference.warmup.ended.wait(300)
    everything, expected = decoding(reference), together(reference)
    assert everything == pinned | more | {(16, True)}
    reference.close()
    monkeypatch.setenv("ENTROPIC_PROGRAM_CACHE", str(tmp_path))
    monkeypatch.setattr(program_memory, "PATIENCE", {False: 2, True: 2})
    for compiles in (True, False):
        engine = LLMEngine(model, EngineOptions(**OPTIONS))
        assert engine.warmup.ended.wait(300) and decoding(engine) == pinned
        compilations = engine.programs.compilations
        assert compiles == (compilations > 0)
        collect(engine.submit(requests[0]))
        assert decoding(engine) == pinned  # one row misses none
        until(lambda engine=engine: together(engine) == expected and decoding(engine) >= pinned | more)
        with monkeypatch.context() as patch:
            patch.setattr(program_memory, "KEPT_SECONDS", 0.0)
            collect(engine.submit(engine_request("alone", prompt(5))))  # wakes the engine's thread
            until(lambda engine=engine: decoding(engine) == pinned)
        assert together(engine) == expected
        assert engine.programs.compilations == compilations and engine.compilations == 0
        engine.close()
