"""Plans are made in threads of their own: a hard grammar delays its own request and no other."""

import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from entropic_jax.serving.engine.grammar_planner import (
    COSTLY,
    LONGEST_IDLE,
    LONGEST_WAIT,
    MOST_COSTLY,
    QUICK,
    SLOW,
    SLOW_THREADS,
    THREADS,
    GrammarPlanner,
)
from entropic_jax.serving.engine.grammars import ALL_TOKENS
from entropic_jax.serving.engine.interface import Grammar
from entropic_jax.serving.request import RequestError
from tests.serving.test_engine import (  # noqa: F401  (fixtures)
    WARM,
    Alternating,
    engine_request,
    exact,
    model,
    plain,
    prompt,
    run,
)


class Costly(Grammar):
    """Needs a processor for longer than a grammar may."""

    def mask(self):
        end = time.thread_time() + COSTLY
        while time.thread_time() < end:
            pass
        return ALL_TOKENS

    def accept(self, token: int) -> bool:
        return True

    def refuse(self, reason: str) -> Exception:
        return RequestError(f"grammar must be a grammar {reason}", "grammar")


class Gated(Grammar):
    """Allows every token, once the gate is open."""

    def __init__(self) -> None:
        self.gate, self.requested = threading.Event(), threading.Event()

    def mask(self):
        self.requested.set()
        assert self.gate.wait(30)
        return ALL_TOKENS

    def accept(self, token: int) -> bool:
        return True


class Open(Grammar):
    def mask(self):
        return ALL_TOKENS

    def accept(self, token: int) -> bool:
        return True


class Broken(Open):
    def mask(self):
        raise RequestError("the grammar is broken", "grammar")


def sequence(row: int, grammar=None, epoch: int = 0) -> SimpleNamespace:
    fields = dict(generated=[], prompt=(1,), num_scheduled=0, num_replay_tokens=0, plan=None, planning=None)
    fields |= dict(retracted=False, plan_seconds=math.inf, plan_cost=0.0, costly_plans=0)
    result = SimpleNamespace(row=row, grammar=grammar, epoch=epoch, **fields)
    result.note_planning = lambda seconds: setattr(result, "plan_seconds", seconds)
    return result


def test_a_late_plan_holds_its_row_and_no_other():
    planner, hard = GrammarPlanner(0), Gated()
    sequences, ended = [sequence(0), sequence(1, hard), sequence(2, Open())], []
    begin = time.perf_counter()
    plans, late = planner.plans(sequences, True, ended.append)
    assert set(plans) == {2} and late == {1}
    assert LONGEST_WAIT <= time.perf_counter() - begin < 10
    begin = time.perf_counter()  # the late one is not waited for again
    assert planner.plans(sequences[:2], True, ended.append) == ({}, {1})
    assert time.perf_counter() - begin < 10
    hard.gate.set()
    sequences[1].planning.future.result(10)
    plans, late = planner.plans(sequences, True, ended.append)
    assert set(plans) == {1, 2} and not late and not ended


def test_easy_grammars_do_not_wait_for_hard_ones():
    planner = GrammarPlanner(0)
    hard = [Gated() for _ in range(THREADS - 1)]
    plans, late = planner.plans([sequence(i, grammar) for i, grammar in enumerate(hard)], False, print)
    assert not plans and late == set(range(THREADS - 1))
    easy = sequence(9, Open())
    assert set(planner.plans([easy], True, print)[0]) == {9}
    for grammar in hard:
        grammar.gate.set()


def test_slow_grammars_wait_for_each_other():
    planner = GrammarPlanner(0)
    hard = [Gated() for _ in range(2 * THREADS + SLOW_THREADS)]
    slow = [sequence(i, grammar) for i, grammar in enumerate(hard)]
    for waiting in slow:
        waiting.plan_cost = SLOW
    plans, late = planner.plans(slow, False, print)
    assert not plans and late == set(range(len(slow)))
    assert set(planner.plans([sequence(99, Open())], True, print)[0]) == {99}
    for grammar in hard:
        grammar.gate.set()
    for waiting in slow:
        assert waiting.planning.future.result(30) and waiting.plan_cost < SLOW


def test_a_plan_that_needed_no_mask_makes_no_grammar_quick():
    planner, slow = GrammarPlanner(0), sequence(0, Open())
    slow.plan_cost = 10 * SLOW
    assert planner.plans([slow], True, print)[0]
    assert slow.plan_cost > SLOW


def test_a_grammar_that_costs_too_much_again_and_again_ends_its_request():
    planner, ended, costly = GrammarPlanner(0, may_hold=False), [], sequence(0, Costly())
    end = lambda *reason: ended.append(reason)
    for number in range(MOST_COSTLY):
        costly.plan = None
        assert set(planner.plans([costly], False, end)[0]) == {0}
        assert costly.costly_plans == number + 1 and costly.plan_cost > COSTLY
    costly.plan = None
    assert planner.plans([costly], False, end) == ({}, set())
    message = f"grammar must be a grammar whose masks take at most {COSTLY} s each; got 6 that took longer"
    assert ended == [(costly, "error", message)]


def test_with_nothing_else_to_run_it_waits_longer():
    planner, hard = GrammarPlanner(0), Gated()
    begin = time.perf_counter()
    assert planner.plans([sequence(0, hard)], True, print) == ({}, {0})
    assert time.perf_counter() - begin >= LONGEST_WAIT + LONGEST_IDLE
    hard.gate.set()


def test_branching_launches_wait_for_every_plan():
    planner, hard = GrammarPlanner(0, may_hold=False), Gated()
    threading.Timer(0.1, hard.gate.set).start()
    plans, late = planner.plans([sequence(0, hard), sequence(1)], False, print)
    assert set(plans) == {0} and not late


class Noting(Open):
    """Notes the threads in which its masks are computed."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def mask(self):
        self.threads.append(threading.get_ident())
        return ALL_TOKENS


def test_quick_plans_of_a_sequence_alone_are_made_here():
    planner, current = GrammarPlanner(0), threading.get_ident()
    alone, other = sequence(0, Noting()), sequence(1, Noting())
    for seconds, decoding, idle, inline in (
        (math.inf, [alone], True, False),
        (QUICK, [alone], True, False),
        (0.0, [alone], True, True),
        (0.0, [alone, other], True, False),
        (0.0, [alone], False, False),
    ):
        alone.plan_seconds, alone.grammar.threads, alone.plan = seconds, [], None
        assert set(planner.plans(decoding, idle, print)[0]) == {s.row for s in decoding}
        assert [thread == current for thread in alone.grammar.threads] == [inline]
        assert 0 < alone.plan_seconds < math.inf


def test_a_grammar_that_breaks_here_ends_its_request():
    planner, ended, broken = GrammarPlanner(0), [], sequence(0, Broken())
    broken.plan_seconds = 0.0
    assert planner.plans([broken], True, lambda *end: ended.append(end)) == ({}, set())
    assert ended == [(broken, "error", "the grammar is broken")]


def test_a_broken_grammar_ends_its_own_request():
    planner, ended = GrammarPlanner(0), []
    broken = sequence(0, Broken())
    plans, late = planner.plans([broken, sequence(1, Open())], False, lambda *end: ended.append(end))
    assert set(plans) == {1} and not late and ended == [(broken, "error", "the grammar is broken")]


def test_a_plan_from_before_a_preemption_is_made_anew():
    planner, hard = GrammarPlanner(0), Gated()
    held = sequence(0, hard)
    assert planner.plans([held], False, print) == ({}, {0})
    held.epoch, held.row = 2, 3  # preempted, and placed again
    hard.gate.set()
    held.planning.future.result(10)
    assert planner.plans([held], False, print) == ({}, {3})
    assert held.plan is None
    assert set(planner.plans([held], False, print)[0]) == {3}


@pytest.mark.slow
def test_others_decode_while_a_mask_is_computed(plain):  # noqa: F811
    hard = Gated()
    stream = plain.submit(engine_request("hard", prompt(9), seed=3, grammar=hard, **WARM))
    assert hard.requested.wait(30)
    free = engine_request("free", prompt(8), seed=1, **WARM)
    easy = engine_request("easy", prompt(12), seed=2, grammar=Alternating(), **WARM)
    others = run(plain, free, easy)  # both end while the mask is not there
    assert len(others[0][0]) == 12 and others[1][1].finish_reason == "stop" and not hard.gate.is_set()
    hard.gate.set()
    tokens = [token.id for delta in stream for token in delta.tokens]
    assert len(tokens) == 12


@pytest.mark.slow
def test_text_does_not_depend_on_being_held(exact):  # noqa: F811
    slow, quick = Gated(), Open()
    stream = exact.submit(engine_request("slow", prompt(9), seed=3, grammar=slow, **WARM))
    assert slow.requested.wait(30)
    run(exact, engine_request("beside", prompt(7), seed=1, **WARM))
    slow.gate.set()
    tokens = [token.id for delta in stream for token in delta.tokens]
    ((alone, _),) = run(exact, engine_request("quick", prompt(9), seed=3, grammar=quick, **WARM))
    assert tokens == alone


@pytest.mark.parametrize("rows", [(), (1, 3)])
def test_held_rows_are_stated_by_number(plain, rows):  # noqa: F811
    held = plain.scheduler.planner.held_rows(rows)
    assert held.dtype == bool and np.flatnonzero(held).tolist() == [*rows] and len(held) == 4
