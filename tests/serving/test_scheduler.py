"""Decisions of the scheduler with everything around it replaced: nothing is compiled, no device is used."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from entropic_jax.serving.engine.scheduler import Scheduler
from entropic_jax.serving.engine.sequence import DECODE, PREFILL, WAITING
from entropic_jax.serving.engine.state_updates import Placement
from entropic_jax.serving.request import Request


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


def test_a_preempted_prompt_is_scored_from_its_beginning_unless_it_has_been():
    halfway, scored = row("b"), row("c")
    halfway.prompt_scored, halfway.prompt_scores, scored.prompt_scores = False, [-1.0], [-1.0, -2.0]
    subject, _ = scheduler(row("a"), halfway, scored)
    subject._preempt()
    assert scored.prompt_scores == [-1.0, -2.0]
    subject.batch.occupied = [row("a"), halfway]
    subject._preempt()
    assert halfway.prompt_scores == []


@pytest.mark.parametrize(("number", "admitted"), [(-1, None), (-1, 1.5), (3, 1.5)])
def test_a_request_leaves_the_queue_once(number, admitted):
    subject, calls = scheduler()
    sequence = SimpleNamespace(ended=False, row=number, admitted_time=admitted)
    subject.waiting, subject.batch.end = [sequence] if number < 0 else [], calls.end
    subject.end(sequence, "abort")
    dequeued = [("on_dequeue",)] if admitted is None else []
    assert subject.waiting == [] and calls == [*dequeued, ("end", sequence, "abort", None, False)]
    sequence.ended = True
    subject.end(sequence, "abort")
    assert len(calls) == len(dequeued) + 1


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
    launched = subject._decode(constrained=False, beside_chunk=False)
    assert calls == [("compress",), ("defer", 1, [], False)]
    assert launched.running == [] and launched.steps == 0 and launched.output is None


PROMPT = (11, 12, 13, 14, 15, 16, 17, 18, 19)  # two pages of four and a token


def place(
    prompt: tuple[int, ...] = PROMPT,
    pages: list[int] | None = None,
    generated: tuple[int, ...] = (),
    *,
    replays: bool = False,
    scored: bool = True,
    **request: float,
) -> tuple[bool, SimpleNamespace, list[Placement], Calls, list[tuple]]:
    """Places a sequence for which the block manager shares these pages, with a saved row.

    Returns:
        Whether there was room, the sequence, its placements, the calls, and the requests for pages.
    """
    subject, calls = scheduler()
    sequence, requested = row("a", replays=replays), []
    sequence.prompt, sequence.generated, sequence.prompt_scored = prompt, [*generated], scored
    sequence.request = Request(prompt="", max_tokens=5, **request)
    sequence.saved_row, sequence.admitted_time, sequence.page_hashes = "saved", 0.0, [*"abcdef"]
    sequence.stop_tokens, sequence.adapter = (3,), SimpleNamespace(number=0)
    sequence.row_gains = SimpleNamespace(values=None)

    def allocate(number, hashes, length, growing, updates, multiple, spare):
        requested.append((number, hashes, length, growing, multiple, spare))
        return pages

    subject.block_manager = SimpleNamespace(allocate=allocate)
    subject.sizes = SimpleNamespace(
        context=64, longest=60, page_size=4, chunk=8, spare=lambda branches, length, limit: limit - length
    )
    subject.updates, subject.apply_updates = SimpleNamespace(placements=[]), calls.apply_updates
    subject.programs.restore_row = calls.restore_row
    subject.collector = SimpleNamespace(send_prompt=calls.send_prompt)
    subject.batch.place, subject.batch.num_growing = calls.place, 2
    return subject._place(sequence, 1), sequence, subject.updates.placements, calls, requested


def test_a_prompt_whose_pages_are_shared_decodes_at_once():
    placed, sequence, (placement,), calls, requested = place(pages=[4, 5])
    assert placed and sequence.stage == DECODE and placement.prefilled
    assert (sequence.num_prefilled, sequence.num_scheduled, sequence.num_replayed) == (8, 0, 0)
    assert (placement.row, placement.token, placement.limit, placement.text) == (1, 19, 13, PROMPT)
    assert requested == [(1, ["a", "b"], 9, 2, 2, 13 - 9)]  # pages of the positions before the last token
    assert calls[0] == ("place", sequence, 1, 13)
    placed, sequence, (placement,), *_ = place(pages=[4])
    assert placed and sequence.stage == PREFILL and not placement.prefilled and sequence.num_prefilled == 4


def test_a_sequence_without_pages_changes_nothing():
    placed, sequence, placements, calls, _ = place(pages=None)
    assert (placed, placements, calls) == (False, [], []) and sequence.stage == DECODE


def test_a_row_is_no_longer_than_the_context():
    *_, (placement,), _, _ = place(prompt=tuple(range(58)), pages=[])
    assert placement.limit == 60


def test_preempted_tokens_are_prefilled_or_replayed():
    _, sequence, (placement,), calls, requested = place(pages=[], generated=(7, 8), presence_penalty=0.5)
    assert sequence.prefill_tokens == (*PROMPT, 7, 8) and sequence.num_replay_tokens == 0
    assert placement.token == 8 and placement.history == (PROMPT, [7, 8]) and requested[0][2] == 11
    assert calls[-2:] == [("apply_updates",), ("restore_row", None, 1, "saved")]
    _, sequence, (placement,), calls, requested = place(
        pages=[], generated=(7, 8), replays=True, presence_penalty=0.5
    )
    assert sequence.prefill_tokens == PROMPT and sequence.num_replay_tokens == 2
    assert placement.token == 19 and placement.history == (PROMPT, []) and requested[0][2] == 9
    assert [name for name, *_ in calls] == ["place"]  # steps make the row's control anew
    assert placement.text == (*PROMPT, 7, 8)
    assert place(pages=[])[2][0].history is None


def test_a_scored_prompt_of_one_token_is_sent_at_once():
    for prompt, scored, sent in (((5,), False, True), ((5,), True, False), (PROMPT, False, False)):
        _, sequence, _, calls, requested = place(prompt, [], scored=scored)
        assert (("send_prompt", sequence) in calls) == sent
        assert requested[0][1] == (["a", "b"] if scored and len(prompt) > 1 else [])  # scored by its prefill


def test_a_launch_ends_with_the_longest_row():
    subject, _ = scheduler()
    subject.batch.limit, subject.batch.length = np.array([20, 30, 99]), np.array([10, 5, 0])
    subject.batch.steps_in_flight, limits = np.array([2, 1, 0]), []
    subject.planner = SimpleNamespace(
        num_steps=lambda running, limit, *_, **__: limits.append(limit) or limit
    )
    subject.kv_compression = SimpleNamespace(limit_steps=lambda running, steps: steps)
    first, second = row("a"), row("b")
    first.row, second.row = 0, 1
    subject._num_steps([first], 0, {}, False)
    subject._num_steps([first, second], 0, {}, False)
    assert limits == [8, 24]


def admit(names: str, rows: int, *, paused: bool = False, room: str = "abc", unready: str = "") -> str:
    """The sequences that are placed, and those that wait afterwards, as in "ab c".

    Args:
        names: of the sequences that wait.
        rows: number of free rows.
        paused: whether the scheduler is.
        room: the sequences for which there are pages.
        unready: the sequences whose programs are not compiled.
    """
    subject, _ = scheduler()
    subject.batch.free_rows, subject.paused, placed = [*range(rows)], paused, []
    subject.waiting, subject.sizes = [row(name) for name in names], SimpleNamespace(rows=2)
    subject.planner = SimpleNamespace(can_run=lambda sequence, occupied: sequence.name not in unready)
    subject._place = lambda sequence, number: (
        sequence.name in room and not placed.append((sequence.name, number))
    )
    subject._admit()
    assert [number for _, number in placed] == [*range(len(placed))]
    assert subject.rounds == 2.5 + len(placed) / 2
    return f"{''.join(name for name, _ in placed)} {''.join(s.name for s in subject.waiting)}"


def test_rows_go_to_those_first_in_rank():
    assert admit("cab", rows=2) == "ab c"
    assert admit("cab", rows=3) == "abc "
    assert admit("cab", rows=0) == " cab"  # nothing is ranked without a free row
    assert admit("cab", rows=2, paused=True) == " cab"
    assert admit("cab", rows=3, room="ac") == "a bc"  # nobody overtakes the first that has no pages
    assert admit("cab", rows=3, unready="b") == "ac b"  # one that waits for a program may be overtaken
    assert admit("cab", rows=3, unready="a", room="b") == "b ac"


def test_every_launch_is_collected():
    subject, calls = scheduler()
    subject.collector = SimpleNamespace(collect=calls.collect)
    subject.in_flight.extend(("first", "second", "third"))
    subject._collect(keep=2)
    assert calls == [("collect", "first")]
    subject.collect_all()
    assert calls == [("collect", "first"), ("collect", "second"), ("collect", "third")]
