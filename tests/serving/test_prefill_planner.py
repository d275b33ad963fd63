"""Which prompts a prefill chunk holds, how long it is, and who waits for it; nothing is compiled."""

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from entropic_jax.serving.engine import prefill_planner
from entropic_jax.serving.engine.launch_planner import SECONDS_OF_CHUNK, LaunchPlanner
from entropic_jax.serving.engine.launch_shapes import chunk_shapes
from entropic_jax.serving.engine.prefill_planner import LONGEST_PASSED_OVER, PrefillCosts, PrefillPlanner
from entropic_jax.serving.engine.sequence import DECODE, PREFILL
from tests.clocks import replace_clock

SHAPE = SimpleNamespace(weights=1000, layers=2, heads=4, head_dim=8)
SHAPES = chunk_shapes(512, 512)


def prompt(length: int, *, begun: int = 0, waited: float = 0.0, priority: int = 0, scored: bool = True):
    """A sequence in prefill that has got a row, or its last chunk, so many seconds ago."""
    timestamp = time.perf_counter() - waited
    return SimpleNamespace(
        prefill_tokens=tuple(range(length + 1)),
        num_prefilled=begun,
        prefill_time=timestamp if begun else 0.0,
        admitted_time=timestamp,
        engine_request=SimpleNamespace(priority=priority),
        prompt_scored=scored,
        stage=PREFILL,
        row=length % 7,
        epoch=0,
    )


def planner(shapes=SHAPES, rate: float | None = None) -> PrefillPlanner:
    """A planner; with `rate`, one that has seen chunks of every shape at so many seconds an operation."""
    longest = max(shapes, key=lambda shape: shape[1])
    sizes = SimpleNamespace(
        rows=8, shapes=SimpleNamespace(chunks=shapes, segment=None, longest_chunk=longest)
    )
    always = lambda key: True
    programs = SimpleNamespace(decoder=SimpleNamespace(shape=SHAPE), available=always, require=always)
    result = PrefillPlanner(programs, sizes)
    if rate is not None:
        for shape in shapes:
            for _ in range(2):  # the first is not counted
                result.costs.record(shape, [0], False, rate * result.costs.operations(shape, [0]))
    return result


def order(*sequences) -> list:
    """The sequences in the order in which chunks of 16 tokens take them."""
    subject, taken, left = planner(((1, 16),)), [], [*sequences]
    while left:
        taken.append(subject.chunk(left, None)[1][0].sequence)
        left.remove(taken[-1])
    return taken


def test_the_least_left_goes_first():
    long, short, almost = prompt(8000), prompt(64), prompt(8000, begun=7990)
    assert order(long, short, almost) == [almost, short, long]


def test_no_prompt_is_passed_over_for_long(monkeypatch):
    late, long, short = prompt(9000, begun=16, waited=1.0), prompt(8000, waited=0.5), prompt(64)
    assert order(short, long, late) == [late, long, short]
    clock = SimpleNamespace(seconds=100.0)
    for module in (prefill_planner, sys.modules[__name__]):
        replace_clock(monkeypatch, module, "perf_counter", lambda: clock.seconds)
    subject, flood = planner(((1, 16),)), prompt(8000)
    while subject.chunk([prompt(8), flood], None)[1][0].sequence is not flood:
        clock.seconds += 0.001  # short prompts come all the time
        assert clock.seconds < 101
    assert clock.seconds - 100 == pytest.approx(LONGEST_PASSED_OVER, abs=0.002)


def test_stated_priority_precedes_both():
    urgent, late, short = prompt(8000, priority=-1), prompt(9000, waited=9.0), prompt(8)
    assert order(short, late, urgent) == [urgent, late, short]


def test_a_chunk_takes_the_time_it_may():
    unbounded = planner(rate=1e-8).chunk([prompt(8000)], None)[0]
    assert unbounded.tokens.shape == (1, 513)
    for begun in (0, 4000, 7000):
        subject = planner(rate=1e-8)
        seconds = 1.5 * subject.costs.seconds((1, 128), [begun], False)
        assert subject.chunk([prompt(8000, begun=begun)], seconds)[0].tokens.shape == (1, 129)
    shortest = planner(rate=1.0).chunk([prompt(8000)], 1e-6)[0]
    assert shortest.tokens.shape == (1, 17)
    assert planner().chunk([prompt(8000)], 1e-6)[0].tokens.shape == (1, 513)  # nothing is known yet


def test_a_chunk_is_noted_in_its_sequence():
    sequence = prompt(20)
    chunk, scheduled, scored = planner(((1, 16),)).chunk([sequence], None)
    assert (sequence.num_prefilled, sequence.stage, scored) == (16, PREFILL, False)
    assert chunk.tokens.tolist() == [[*range(17)]] and scheduled[0][1:] == (0, 0, 16)
    chunk, scheduled, _ = planner(((1, 16),)).chunk([sequence], None)
    assert (sequence.num_prefilled, sequence.stage) == (20, DECODE) and scheduled[0][1:] == (0, 16, 20)
    assert chunk.num_tokens.tolist() == [4] and chunk.total.tolist() == [20]


def test_scored_prompts_have_chunks_of_their_own():
    plain, scored = prompt(64), prompt(8, scored=False)
    _, scheduled, is_scored = planner().chunk([plain, scored], None)
    assert [chunk.sequence for chunk in scheduled] == [scored] and is_scored


def test_chunks_of_scored_prompts_and_others_alternate():
    subject, kinds = planner(((1, 16),)), []
    left = [prompt(8, scored=False, waited=9.0) for _ in range(4)] + [prompt(9, waited=1.0), prompt(30)]
    while left:
        kinds.append(subject.chunk(left, None)[2])
        left = [sequence for sequence in left if sequence.stage == PREFILL]
    assert kinds == [True, False, True, False, True, False, True]


def test_alternation_heeds_the_stated_priority():
    subject = planner(((1, 16),))
    crowd = [prompt(64, priority=1), prompt(64, priority=-1, scored=False)]
    assert [subject.chunk(crowd, None)[2] for _ in range(3)] == [True] * 3


def test_a_shape_that_is_missing_is_asked_for_while_another_serves():
    subject, compiled, requested = planner(), {(1, 512)}, []

    def require(key: tuple) -> bool:
        shape = (key[1], key[2] - 1)
        if shape not in compiled:
            requested.append(shape)
        return shape in compiled

    subject.programs.require = require
    subject.programs.available = lambda key: (key[1], key[2] - 1) in compiled
    prompts = lambda number: [prompt(5, scored=False) for _ in range(number)]
    assert subject.chunk(prompts(30), None)[0].tokens.shape == (1, 513) and requested == [(16, 16)]
    compiled.add((16, 16))
    chunk, scheduled, _ = subject.chunk(prompts(30), None)
    assert chunk.tokens.shape == (16, 17) and len(scheduled) == 16 and requested == [(16, 16)]
    assert subject.chunk(prompts(1), None)[0].tokens.shape == (16, 17) and requested[1:] == [(1, 16)]


def test_costs_follow_the_operations():
    costs, flops = PrefillCosts(SHAPE), 4 * 2 * 4 * 8
    assert costs.operations((1, 16), [0]) == 16 * 2000 + 16 * 8 * flops
    assert costs.operations((2, 16), [100]) == 32 * 2000 + 16 * (100 + 16) * flops
    assert costs.seconds((1, 16), [0], False) is None
    costs.record((1, 16), [0], False, 9.0)  # may have waited for its program
    assert costs.seconds((1, 16), [0], False) is None
    costs.record((1, 16), [0], False, 1.0)
    assert costs.seconds((1, 16), [0], False) == pytest.approx(1.0)
    far = costs.operations((1, 16), [5000]) / costs.operations((1, 16), [0])
    assert costs.seconds((1, 16), [5000], False) == pytest.approx(far) and far > 10
    twice = costs.operations((1, 32), [0]) / costs.operations((1, 16), [0])
    assert costs.seconds((1, 32), [0], False) == pytest.approx(twice)  # by the rate of the other shape
    assert costs.seconds((1, 32), [0], True) == pytest.approx(twice)
    for _ in range(2):
        costs.record((1, 16), [0], True, 3.0)
    assert costs.seconds((1, 16), [0], True) == pytest.approx(3.0)


def test_chunks_grow_to_the_time_that_they_may_take():
    subject, sizes = planner(), []
    seconds = lambda shape: 0.002 + 1e-9 * subject.costs.operations(shape, [0])  # with an overhead
    for _ in range(3):
        subject.costs.record((1, 16), [0], False, 0.1)  # a machine that was busy
    for _ in range(30):
        shape = (1, subject.chunk([prompt(8000)], 0.02)[0].tokens.shape[1] - 1)
        subject.costs.record(shape, [0], False, seconds(shape))
        sizes.append(shape[1])
    assert sizes[0] == 16 and sizes[-1] == 256 and sizes == sorted(sizes)
    assert seconds((1, 256)) < 0.02 < seconds((1, 512))


def launches(rows: int = 8, chunked: bool = True) -> LaunchPlanner:
    result = LaunchPlanner.__new__(LaunchPlanner)
    result.sizes, result.chunked, result.last_decode = (
        SimpleNamespace(rows=rows),
        chunked,
        time.perf_counter(),
    )
    result.seconds_while_waiting, result.prefills = 0.1, planner(rate=1e-8)
    return result


def test_the_time_of_a_chunk_is_bounded_beside_decoding_rows():
    assert launches().seconds_of_chunk(0, 3, False) is None
    assert launches().seconds_of_chunk(1, 3, False) == SECONDS_OF_CHUNK
    assert launches().seconds_of_chunk(5, 3, False) == 0.1 == launches().seconds_of_chunk(1, 1, True)
    assert launches(chunked=False).seconds_of_chunk(5, 3, False) is None


def test_decoding_waits_only_for_prompts_that_are_almost_complete():
    short, long = [prompt(64)] * 7, [prompt(64)] * 6 + [prompt(8000)]
    subject = launches()
    subject.prefills = planner(rate=1e-9)
    assert subject.prefills.seconds_left(short) < 0.4 < subject.prefills.seconds_left(long)
    assert subject.defer_decode(1, short, False)
    assert not subject.defer_decode(1, long, False)
    assert not subject.defer_decode(1, short[:3], False)  # there are free rows
    assert subject.defer_decode(1, short[:3], True)
    assert not subject.defer_decode(0, short, False)
    subject.last_decode -= 1.0
    assert not subject.defer_decode(1, short, False)
    assert subject.defer_decode(1, short, False)  # from now on


def test_decode_steps_are_no_part_of_a_chunk():
    subject = launches()
    subject.costs = SimpleNamespace(step_seconds=lambda width, speculates: 0.01)
    recorded = []
    subject.prefills = SimpleNamespace(record=lambda *arguments: recorded.append(arguments))
    program = SimpleNamespace(width=4, speculates=False)
    launch = SimpleNamespace(program=program, chunks=["a"], chunk_shape=(1, 16), scored=False)
    subject.record_prefill(launch, 0.061, 3)
    subject.record_prefill(launch, 0.061)
    assert [arguments[:3] for arguments in recorded] == [(["a"], (1, 16), False)] * 2
    assert np.allclose([arguments[3] for arguments in recorded], [0.03, 0.06])
