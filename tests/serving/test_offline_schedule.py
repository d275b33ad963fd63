"""The scheduling laws of `entropic generate` see prompts and limits; the law that needs more is refused."""

import jax
import numpy as np

from entropic_jax import models
from entropic_jax.control.scheduling import ScheduleState
from entropic_jax.methods.presets import Gains, preset
from entropic_jax.serving.offline.engine import Engine
from entropic_jax.serving.request import Request


def test_rows_are_scheduled_by_what_they_may_still_write(directory):
    macro = preset("macro", 1, Gains(schedule="shortest-remaining"))
    engine = Engine(models.load(directory, progress=False), macro)
    requests = [Request(prompt="", max_tokens=20), Request(prompt="", max_tokens=3)]
    state = engine._start(requests, [[5] * 40, [5] * 4], None)
    (schedule,) = (
        x
        for x in jax.tree.leaves(state.control, is_leaf=lambda x: isinstance(x, ScheduleState))
        if isinstance(x, ScheduleState)
    )
    np.testing.assert_array_equal(schedule.load.expected_end, [60, 7])
    np.testing.assert_allclose(schedule.load.cost, [1, 3 / 20])
    np.testing.assert_allclose(schedule.load.memory, [1, 7 / 60])


def test_the_law_that_knows_lengths_is_refused(entropic, directory):
    command = ("generate", "--model", directory, "--prompt", "x", "--preset", "macro")
    status, out, errors = entropic(*command, "--schedule", "shortest-job")
    assert (status, out) == (2, "")
    assert "schedule must not be shortest-job here, which needs the lengths of texts before they" in errors
