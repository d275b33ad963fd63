"""Grammar planner: plans of constrained sequences, made in threads of their own.

A mask takes microseconds as a rule, and a tenth of a second and more with some grammars. The engine waits for
plans for a short time only. Sequences whose plan is late take no part in the next launch, so that a hard
grammar delays its own request and no other. Sequences whose plans are slow have threads of their own, and a
grammar that costs too much for too many tokens ends its request. A sequence that runs alone, and whose plans
have been quick, has them made in the engine's thread, since to wake another takes longer than most plans.
"""

import concurrent.futures
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from .grammars import Plan, message_of, plan
from .sequence import SLOWNESS_KEPT, Sequence
from .thread_priority import be_nice

# Seconds that a launch waits for plans: beside others that can run, and where nothing else can.
LONGEST_WAIT, LONGEST_IDLE = 0.005, 0.02
QUICK = 0.002  # seconds of a sequence's plans, below which the engine's thread may make the next
THREADS = 4  # plans that are made at a time, so that a few hard grammars do not delay the easy ones
SLOW_THREADS = 2  # of sequences whose recent plans were slow
SLOW = 0.02  # seconds of a processor for a plan; on a busy machine, quick plans take longer by the clock
COSTLY = 0.1  # seconds of a processor for a token
MOST_COSTLY = 5  # plans of a sequence that may cost so much
NICE = 10  # added to the niceness of these threads: a late plan runs beside launches


class Planning(NamedTuple):
    """A plan that is being made."""

    future: "Future[Plan]"
    epoch: int  # of the sequence


class GrammarPlanner:
    """Makes the plans of the sequences of an engine. For the engine's thread."""

    def __init__(self, most: int, may_hold: bool = True) -> None:
        """A planner without work.

        Args:
            most: tokens that a plan expects, at most.
            may_hold: whether sequences may take no part in a launch; if not, every plan is waited for.
        """
        self.most, self.may_hold = most, may_hold
        self._executor = ThreadPoolExecutor(THREADS, "grammar planner", be_nice, (NICE,))
        self._slow_executor = ThreadPoolExecutor(SLOW_THREADS, "slow grammar planner", be_nice, (NICE,))

    def plans(
        self, decoding: Iterable[Sequence], idle: bool, end: Callable[..., Any]
    ) -> tuple[dict[int, Plan], set[int]]:
        """The plans of sequences with a grammar, by row, and the rows whose plan is late.

        Args:
            decoding: sequences that decode.
            idle: whether nothing else runs if no sequence decodes.
            end: `end(sequence, reason, error)` ends the request whose grammar fails.
        """
        decoding = list(decoding)
        constrained = [sequence for sequence in decoding if sequence.grammar is not None]
        new = []
        for sequence in constrained:
            if sequence.planning is None:
                inline = idle and len(decoding) == 1 and sequence.plan_seconds < QUICK
                executor = self._executor if sequence.plan_cost < SLOW else self._slow_executor
                submit = _run if inline else executor.submit
                new.append(submit(self._plan, sequence))
                sequence.planning = Planning(new[-1], sequence.epoch)
        self._wait(new, [s.planning.future for s in constrained], idle and len(constrained) == len(decoding))
        planned, late = {}, set()
        for sequence in constrained:
            future, epoch = sequence.planning
            if not future.done():
                late.add(sequence.row)
                continue
            sequence.planning = None
            if epoch != sequence.epoch:  # its row was taken meanwhile, and its tokens may be replayed
                sequence.plan = None
                late.add(sequence.row)
                continue
            try:
                planned[sequence.row] = future.result()
            except Exception as error:  # a grammar is a program that came with a request
                end(sequence, "error", message_of(error))
        return planned, late

    def _plan(self, sequence: Sequence) -> Plan:
        assert sequence.grammar is not None
        begin, used = time.perf_counter(), time.thread_time()
        result = plan(sequence, sequence.grammar, self.most, sequence.plan_seconds < QUICK)
        cost = time.thread_time() - used
        sequence.plan_cost = max(cost, SLOWNESS_KEPT * sequence.plan_cost)
        sequence.note_planning(time.perf_counter() - begin)
        sequence.costly_plans += cost > COSTLY * len(result.masks)
        if sequence.costly_plans > MOST_COSTLY:
            raise sequence.grammar.refuse(
                f"whose masks take at most {COSTLY} s each; got {sequence.costly_plans} that took longer"
            )
        return result

    def _wait(self, new: "list[Future[Plan]]", under_way: "list[Future[Plan]]", alone: bool) -> None:
        """Wait for plans.

        Args:
            new: begun for this launch.
            under_way: these and the late ones of earlier launches.
            alone: whether no other sequence runs.
        """
        if not self.may_hold:
            concurrent.futures.wait(under_way)
            return
        concurrent.futures.wait(new, LONGEST_WAIT)
        if alone:
            concurrent.futures.wait(under_way, LONGEST_IDLE, concurrent.futures.FIRST_COMPLETED)


def _run(function: Callable[[Sequence], Plan], sequence: Sequence) -> "Future[Plan]":
    """The result of a function, as that of a thread."""
    future: Future[Plan] = Future()
    try:
        future.set_result(function(sequence))
    except Exception as error:
        future.set_exception(error)
    return future
