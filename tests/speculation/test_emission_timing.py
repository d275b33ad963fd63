"""Launches that are timed for what a pass costs besides the model: no draft is verified in them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from entropic_jax.speculation import emission_timing as module
from tests import tiny
from tests.marks import exhaustive

MODEL = tiny.model()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, *exhaustive(3)])
def test_passes_and_steps_emit_the_same_tokens_and_verify_no_draft(monkeypatch, rows):
    traces = []

    def program(advance, params, state):
        _, trace = jax.lax.scan(lambda current, _: advance(params, current), state, None, 5)
        traces.append(trace)
        return SimpleNamespace(compile=None, run=None)

    monkeypatch.setattr(module, "EmittingProgram", program)
    module.emitting_launches(MODEL.decoder, MODEL.params, rows, 20, 3, page_size=8)
    of_passes, of_steps = traces
    assert of_passes.emitted.shape == (5, 4, rows) and of_steps.emitted.shape == (5, rows)
    assert (np.asarray(of_passes.emitted).sum(1) == 1).all() and of_steps.emitted.all()
    np.testing.assert_array_equal(of_passes.token[:, 0], of_steps.token)
    assert not of_passes.num_drafted.any()


@pytest.mark.exhaustive
def test_launches_run_as_many_passes_as_they_say():
    passes, steps = module.emitting_launches(MODEL.decoder, MODEL.params, 1, 20, 3, page_size=8)
    for launch in (passes, steps):
        launch.compile()
        assert launch.run(1) == module.PASSES
