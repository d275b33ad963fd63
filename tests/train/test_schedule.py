"""Stages of a run: short windows for most of the time, few tasks, small batches first, the decay last."""

import numpy as np
import pytest

from entropic_jax.models.train.schedule import CONTINUED, STAGES, Schedule, one_stage

SPEED = {256: 2900, 512: 2600, 1024: 2700, 2048: 2250, 8192: 760}  # tokens a second of two AVX-512 cores


@pytest.mark.parametrize(("stages", "least"), [(STAGES, 0.8), (CONTINUED, 0.75)], ids=["first", "continued"])
def test_most_of_the_time_goes_to_short_windows(stages, least):
    seconds = {stage.length: stage.share / SPEED[stage.length] for stage in stages}
    total = sum(seconds.values())
    assert sum(seconds.get(length, 0.0) for length in (256, 512, 1024)) >= least * total
    assert stages[-1].length == 8192 and stages[-1].share < 0.1


@pytest.mark.parametrize("stages", [STAGES, CONTINUED], ids=["first", "continued"])
def test_tasks_are_at_most_15_percent_of_the_tokens(stages):
    assert sum(stage.share for stage in stages) == pytest.approx(1.0)
    assert sum(stage.share * stage.task_share for stage in stages) <= 0.15


def test_a_run_that_goes_on_begins_without_tiny_batches():
    assert CONTINUED[0].length > STAGES[0].length and CONTINUED[0].batch_tokens > STAGES[0].batch_tokens


def test_windows_and_batches_never_shrink_and_the_tokens_add_up():
    plan = Schedule(20e6)
    assert plan.tokens(0) == 0
    assert plan.tokens(plan.steps) == pytest.approx(20e6, rel=0.01)
    for step in range(plan.steps):
        windows, passes = plan.windows(step, micro_tokens=2048, devices=2)
        stage = plan.stage(step)
        assert windows * stage.length == plan.tokens(step + 1) - plan.tokens(step) == stage.batch_tokens
        assert windows % (2 * passes) == 0
        assert max(2048, stage.length) == windows // passes // 2 * stage.length
    stages = [plan.stage(step) for step in range(plan.steps)]
    assert stages == sorted(stages, key=lambda stage: (stage.length, stage.batch_tokens))
    assert stages[-1].length == 8192
    assert stages[plan.steps - 1] == plan.stage(plan.steps + 5)


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_windows_are_a_multiple_of_passes_and_devices(devices: int):
    plan = Schedule(20e6)
    for step in range(0, plan.steps, 50):
        windows, passes = plan.windows(step, micro_tokens=2048, devices=devices)
        assert windows % (passes * devices) == 0
        assert windows > 0


def test_the_rate_is_constant_until_the_last_fifth_of_the_tokens():
    plan = Schedule(48e6)
    rate = plan.learning_rate(0.5)
    assert plan.tokens(plan.decay_from) == pytest.approx(0.8 * 48e6, rel=0.01)
    assert float(rate(0)) == 0.0
    assert float(rate(plan.decay_from)) == 0.5 == float(rate(200))
    assert float(rate(plan.steps)) == pytest.approx(0.0, abs=1e-6)


def test_the_average_reaches_over_the_same_share_of_the_run_at_every_step():
    plan = Schedule(48e6)
    weights = [plan.average_weight(step) for step in range(plan.steps)]
    assert weights[0] == 1.0
    for last in (1000, plan.steps):
        kept, age = 1.0, 0.0
        for step in reversed(range(last)):
            age += kept * weights[step] * (plan.tokens(last) - plan.tokens(step))
            kept *= 1 - weights[step]
        assert age / plan.tokens(last) == pytest.approx(0.04, abs=0.01)  # mean age of the averaged weights


def test_tokens_for_no_step_are_an_error():
    with pytest.raises(ValueError, match="tokens must be enough for a step of each stage; got 100"):
        Schedule(100)
    assert np.isfinite(Schedule(500e3).steps)


def test_a_run_of_one_length_has_no_other_windows():
    plan = Schedule(1e6, one_stage(1024, 0.3))
    assert {plan.stage(step)[::3] for step in range(plan.steps)} == {(1024, 0.3)}
    assert plan.tokens(plan.steps) == pytest.approx(1e6, rel=0.02)
