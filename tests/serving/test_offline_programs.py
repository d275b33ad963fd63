"""Programs of offline generation: requests of usual lengths share one."""

import pytest

from entropic_jax import models
from entropic_jax.serving.offline.engine import Engine
from entropic_jax.serving.request import Request
from tests.shallow_model import shallow_model


@pytest.mark.slow
def test_a_longer_text_needs_no_other_program():
    engine = Engine(models.load(shallow_model(), progress=False))
    for most_tokens in (20, 400, 900):
        next(engine.stream(Request(prompt="import numpy", max_tokens=most_tokens, temperature=0.0)))
    assert len(engine._programs) == 1
