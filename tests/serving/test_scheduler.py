"""Decisions of the scheduler with everything around it replaced: nothing is compiled, no device is used."""

from collections import deque
from types import SimpleNamespace

import pytest

from entropic_jax.serving.engine.scheduler import Scheduler
from entropic_jax.serving.engine.sequence import DECODE, WAITING


class Calls(list):
    """Functions that note their names and arguments in this list."""

    def __getattr__(self, name: str):
        return lambda *arguments: self.append((name, *arguments))


def row(name: str, *, branches: bool = False, replays: bool = True) -> SimpleNamespace:
    sequence = SimpleNamespace(name=name, stage=DECODE, branches=branches, preemptions=0, row=3)
    sequence.prompt_scored, sequence.prompt_scores, sequence.saved_row = True, [], None
    sequence.needs_replay = lambda exact: replays
    return sequence


def scheduler(*occupied, room: int = 0) -> tuple[Scheduler, Calls]:
    """A scheduler whose rows can grow by `room` tokens, and the calls that it makes."""
    result, calls = Scheduler.__new__(Scheduler), Calls()
    result.batch = SimpleNamespace(
        occupied=[*occupied],
        decoding=[*occupied],
        prefilling=[],
        expected_drop=None,
        reserve=lambda running, tokens: tokens <= room,
        vacate=lambda sequence: calls.append(("vacate", sequence)),
        metrics_hooks=calls,
    )
    result.ranking = SimpleNamespace(
        rank=lambda sequences, rounds, drop: sorted(sequences, key=lambda s: s.name),
        note_first_row=calls.note_first_row,
    )
    result.programs = SimpleNamespace(save_row=lambda state, number: ("saved", number))
    result.device_state, result.rounds, result.exact = None, 2.5, True
    result.waiting, result.in_flight, result.preemptions = [], deque(), 0
    result.on_dequeue = calls.on_dequeue
    return result, calls


def test_the_last_in_rank_is_preempted():
    first, last, fixed = row("a"), row("b", replays=False), row("c", branches=True)
    subject, calls = scheduler(last, first, fixed)
    subject._preempt()
    assert calls == [("preempted", last), ("vacate", last)]
    assert subject.waiting == [last] and last.stage == WAITING
    assert (subject.preemptions, last.preemptions, first.preemptions) == (1, 1, 0)
    assert last.saved_row == ("saved", 3)  # replayed tokens need no copy of the row
    subject.batch.occupied = [first, fixed]
    subject._preempt()
    assert first.saved_row is None and subject.waiting == [last, first]
    subject.batch.occupied = [fixed, row("d", branches=True)]
    subject._preempt()
    assert subject.preemptions == 2  # sequences that branch keep their rows


def test_a_sequence_alone_needs_one_more_token():
    subject, calls = scheduler(row("a"), room=1)
    subject._preempt()
    assert calls == [] and subject.waiting == []
    with pytest.raises(RuntimeError, match="finds no page"):
        scheduler(row("a"), room=0)[0]._preempt()
    scheduler()[0]._preempt()  # all have ended


def test_a_first_admission_is_noted_once():
    subject, calls = scheduler()
    subject.waiting, sequence = [None, None], SimpleNamespace(admitted_time=None, num_prefilled=8)
    subject._note_first_admission(sequence)
    assert calls == [("note_first_row", sequence, 2.5, 2), ("on_dequeue",), ("admitted", sequence)]
    assert sequence.cached_tokens == 8 and sequence.admitted_time > 0


def test_what_is_due_is_compressed_before_decoding():
    subject, calls = scheduler(row("a"))
    subject._compress = calls.compress
    subject.planner = SimpleNamespace(
        defer_decode=lambda *arguments: calls.append(("defer", *arguments)) or True
    )
    launched = subject._decode(constrained=False)
    assert calls == [("compress",), ("defer", 1, 0, False)]
    assert launched.running == [] and launched.steps == 0 and launched.output is None
