"""How launches are timed: compiled once each, before any of them runs, and in turns that end in time."""

from functools import partial

import pytest

from entropic_jax.speculation import timed_launch as module
from entropic_jax.speculation.timed_launch import TimedLaunch, least_seconds
from tests.clocks import replace_clock


class Clock:
    """A clock that only launches advance, and a record of them."""

    def __init__(self, monkeypatch):
        self.seconds, self.ran, self.compiled = 0.0, [], []
        replace_clock(monkeypatch, module, "perf_counter", lambda: self.seconds)

    def compile(self, name):
        assert not self.ran
        self.compiled.append(name)

    def launch(self, name, seconds, most_passes, disturbed=()):
        """Passes of `seconds` each; the launches that `disturbed` counts take twice as long."""

        def run(passes):
            self.ran.append((name, passes))
            number = sum(other == name for other, _ in self.ran)
            self.seconds += passes * seconds * (2 if number in disturbed else 1)
            return passes

        return TimedLaunch(partial(self.compile, name[0]), run, most_passes)


def test_the_least_time_of_a_pass_counts_and_programs_are_compiled_once(monkeypatch):
    clock = Clock(monkeypatch)
    short, long = clock.launch("a short", 0.01, 16, disturbed=(1, 3)), clock.launch("a long", 0.1, 16)
    # The two share a program: equal functions are called once.
    launches = [short, long._replace(compile=short.compile), clock.launch("b", 0.001, 4)]
    assert least_seconds(launches, 3) == pytest.approx([0.01, 0.1, 0.001])
    assert clock.compiled == ["a", "b"]
    first = [("a short", 1), ("a long", 1), ("b", 1)]
    # As many passes as take a quarter of a second by the time that is known, and no more than `most_passes`.
    assert clock.ran[:6] == [*first, ("a short", 12), ("a long", 2), ("b", 4)]
    assert clock.ran[6][1] == 16 and len(clock.ran) == 4 * len(launches)


def test_turns_end_once_their_time_is_over(monkeypatch):
    clock = Clock(monkeypatch)
    launches = [clock.launch("a", 2.0, 16), clock.launch("b", 3.0, 16)]
    assert least_seconds(launches, 8, budget=7.0) == [2.0, 3.0]
    # A single pass of each, and two turns, the second of which began in time.
    assert clock.ran == 3 * [("a", 1), ("b", 1)]
