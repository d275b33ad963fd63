"""Stored pass costs: read back as written, for the same model alone, and a roofline where there are none."""

import jax
import jax.numpy as jnp
import pytest

from entropic_jax.speculation import PassCosts, stored_costs
from entropic_jax.speculation.stored_costs import (
    TimedModel,
    known_costs,
    read_costs,
    roofline_pass_costs,
    write_costs,
)
from entropic_jax.state.ledger import default_hardware
from tests import tiny

COSTS = PassCosts((1, 2, 4), (1e-3, 1.1e-3, 1.5e-3), (1, 2), (1e-6, 2e-6), (5e-4, 1e-7))
COSTS = COSTS._replace(emission=(3e-5, 1e-5), step_emission=(2e-5, 5e-6))
COSTS = COSTS._replace(near_positions=1000, farther=((9000, (2e-6, 3e-6)),))


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv(stored_costs.VARIABLE, str(tmp_path))
    return TimedModel(tiny.model().decoder, tiny.model().params, 16, jnp.float32)


def test_costs_are_read_as_they_were_written(model, monkeypatch):
    assert read_costs(model) is None
    write_costs(COSTS, model)
    assert read_costs(model) == COSTS == known_costs(model._replace(dtype="float32"))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    for other in (dict(page_size=32), dict(dtype=jnp.int8), dict(params=half)):
        assert read_costs(model._replace(**other)) is None
    monkeypatch.setenv(stored_costs.VARIABLE, "")
    assert read_costs(model) is None
    write_costs(COSTS, model)  # stores nothing


@pytest.mark.parametrize("content", ["", "[]", "{", '{"tokens": [1]}', "null"])
def test_damaged_files_do_not_count(model, content, tmp_path):
    write_costs(COSTS, model)
    (file,) = tmp_path.glob("pass-costs-*.json")
    file.write_text(content)
    assert read_costs(model) is None


@pytest.mark.parametrize(
    "changed", [{"seconds": (1.0, -1.0, 1.0)}, {"widths": ()}, {"draft_step": (float("nan"), 0.0)}]
)
def test_costs_out_of_range_do_not_count(model, changed):
    write_costs(COSTS._replace(**changed), model)
    assert read_costs(model) is None


def test_without_a_measurement_a_roofline_counts(model):
    shape, hardware = model.decoder.shape, default_hardware()
    costs = known_costs(model)
    assert costs.valid()
    assert costs.seconds[0] == pytest.approx(4 * shape.weights / hardware.bandwidth)
    assert costs.seconds[-1] == pytest.approx(2 * shape.weights * costs.tokens[-1] / hardware.peak)
    assert 0 < costs.draft_step[1] < costs.seconds_per_position[0]
    assert costs.shortest_context > COSTS.shortest_context == 0


def test_where_a_batch_is_bound_by_arithmetic_drafts_do_not_pay():
    decoder = tiny.model().decoder
    sizes = dict(bytes_per_weight=4, bytes_per_cache=4, kept=0.25)
    costs = roofline_pass_costs(decoder.shape, default_hardware(), **sizes)
    single, batch = (costs.law(rows, (1, 2, 4)).pass_costs(jnp.float32(0)).tolist() for rows in (1, 64))
    assert single[2] == pytest.approx(single[0])
    assert batch[1] == pytest.approx(2 * batch[0], rel=1e-3)
