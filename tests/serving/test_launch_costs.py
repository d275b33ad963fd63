"""Launch costs: what launches and their steps take, told apart, and the tokens that launches are to emit."""

import numpy as np
import pytest

from entropic_jax.serving.engine.launch_costs import (
    LAUNCH_SECONDS,
    RUNS_ON,
    Forecast,
    LaunchCosts,
    LaunchTimes,
    MeasuredLaunch,
)
from entropic_jax.serving.engine.program_shapes import DecodeProgram
from entropic_jax.speculation.speculator import EXPECTED

PLAIN, DRAFTS = (DecodeProgram(1, None, False, flag) for flag in (False, True))


def test_launches_of_many_lengths_tell_steps_apart():
    times = LaunchTimes()
    for steps in (1, 4, 2, 8, 1, 3, 16):
        times.record(steps, 0.003 + 0.0005 * steps)
    assert times.line == pytest.approx((0.003, 0.0005))
    for steps in (1, 4, 2, 8, 1, 3, 16) * 20:  # the machine has become slower
        times.record(steps, 0.006 + 0.001 * steps)
    assert times.line == pytest.approx((0.006, 0.001), rel=0.05)


def test_launches_of_one_length_do_not():
    times = LaunchTimes()
    for _ in range(9):
        times.record(4, 0.009)
    assert times.line == pytest.approx((LAUNCH_SECONDS, (0.009 - LAUNCH_SECONDS) / 4))


@pytest.mark.parametrize("seconds", [(0.004, 0.001), (0.001, 0.1)])
def test_neither_part_is_negative(seconds):
    times = LaunchTimes()
    for steps, taken in zip((1, 8), seconds, strict=True):
        times.record(steps, taken)
    launch, step = times.line
    assert launch >= 0 and step > 0


def costs(draft_seconds: float) -> LaunchCosts:
    """The costs of launches that take 3 milliseconds besides steps of half a millisecond.

    Launches that draft take a fifth of a millisecond more, and `draft_seconds` for each token.
    """
    result = LaunchCosts()
    for steps in (9, 1, 4, 2, 8, 1):  # the first may have compiled
        result.record(PLAIN, MeasuredLaunch(steps, 0.003 + 0.0005 * steps, steps, 0, 0.0), None)
    for drafts in (4, 4, 1, 7, 3):
        taken = 0.0035 + 0.0002 + drafts * draft_seconds
        result.record(DRAFTS, MeasuredLaunch(1, taken, 4.0, drafts, 0.0), None)
    return result


def test_rates_are_those_of_the_line():
    forecast = Forecast((), 2, 5.0, 3.0)
    measured = costs(0.0001)
    assert measured.step_seconds(1, False) == pytest.approx(0.0005)
    steps = np.arange(1, 5)
    np.testing.assert_allclose(measured.rates(forecast, 1, 4, False), 2 * steps / (0.003 + 0.0005 * steps))
    drafted = 5 * steps / (0.0032 + 0.0005 * steps + 3 * steps * 0.0001)
    np.testing.assert_allclose(measured.rates(forecast, 1, 4, True), drafted)


@pytest.mark.parametrize(("draft_seconds", "pays"), [(0.0001, True), (0.001, False)])
def test_drafts_pay_where_they_cost_less_than_steps(draft_seconds, pays):
    forecast, measured = Forecast((6,), 0, 0.0, 0.0), costs(draft_seconds)
    plain, drafts = (measured.rates(forecast, 1, 16, flag).max() for flag in (False, True))
    assert (drafts > plain) == pays


def test_a_plan_emits_no_more_than_it_expects():
    forecast = Forecast((3,), 0, 0.0, 0.0)
    tokens = forecast.tokens(np.arange(1.0, 8), False)
    np.testing.assert_allclose(tokens[:4], np.cumsum(EXPECTED ** np.arange(4)))
    assert (tokens[4:] == tokens[3]).all()
    assert forecast.tokens(np.ones(1), True) == pytest.approx(tokens[3])


def test_a_run_is_expected_to_end_before_its_longest():
    forecast = Forecast((), 0, 0.0, 0.0, runs=((64, 2.0),))
    assert forecast.rows == 1 and forecast.tokens(np.ones(1), False) == pytest.approx(1)
    expected = (1 - RUNS_ON**64) / (1 - RUNS_ON)
    assert forecast.tokens(np.full(1, 400.0), False) == pytest.approx(expected)
    assert forecast.tokens(np.full(1, 4.0), True) == forecast.tokens(np.full(1, 8.0), False)
