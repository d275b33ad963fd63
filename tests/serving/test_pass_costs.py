"""When an engine times passes, and which costs it keeps."""

import pytest

from entropic_jax.serving.engine import programs, timed_sizes
from entropic_jax.speculation import PassCosts, stored_costs

from .test_engine import engine_of, model  # noqa: F401  (fixture)


@pytest.fixture(scope="module")
def suffix(model):  # noqa: F811
    yield from engine_of(model, speculate="suffix", num_speculative_tokens=3, batch_invariant=False)


def test_costs_measured_beside_requests_are_not_stored(suffix, tmp_path, monkeypatch):
    monkeypatch.setenv(stored_costs.VARIABLE, str(tmp_path))
    costs = PassCosts((1, 256), (1.0, 1.2), (1, 16), (0.0, 0.0), draft_step=(0.1, 0.0))
    compiled, cache = suffix.programs, suffix.scheduler.device_state.state.cache
    before = compiled._speculators

    def measure(*_, **__):
        compiled.launches += busy
        return costs

    monkeypatch.setattr(programs, "measure_pass_costs", measure)
    busy = 0
    compiled.measure_pass_costs(cache)
    assert not list(tmp_path.iterdir()), "contexts this short are not timed"
    monkeypatch.setattr(programs, "SHORTEST_TIMED", cache.table.shape[1] * cache.page_size)
    for busy, stored in ((1, 0), (0, 1), (1, 1)):
        compiled._speculators = before
        compiled.measure_pass_costs(cache)
        assert len(list(tmp_path.iterdir())) == stored
        # What was stored is not measured again.
        assert (compiled._speculators is before) == (busy == stored == 1)
    compiled._speculators = before


def test_costs_that_are_not_stored_or_used_are_logged(suffix, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(stored_costs.VARIABLE, str(tmp_path))
    compiled, cache = suffix.programs, suffix.scheduler.device_state.state.cache
    costs = PassCosts((1, 256), (1.0, 1.2), (1, 16), (0.0, 0.0), draft_step=(0.1, 0.0))
    monkeypatch.setattr(programs, "SHORTEST_TIMED", cache.table.shape[1] * cache.page_size)
    before = compiled._speculators
    for measured, busy, said in (
        (costs, 1, "not stored, since requests ran"),
        (costs._replace(seconds=(0.0, 1.2)), 0, "not used: other work"),
        (costs, 0, "forward passes timed"),
    ):

        def measure(*_, measured=measured, busy=busy, **__):
            compiled.launches += busy
            return measured

        monkeypatch.setattr(programs, "measure_pass_costs", measure)
        with caplog.at_level("INFO", programs.logger.name):
            compiled.measure_pass_costs(cache)
        assert said in caplog.messages[-1]
    compiled._speculators = before


def test_stored_costs_of_smaller_passes_are_measured_again(suffix, tmp_path, monkeypatch):
    monkeypatch.setenv(stored_costs.VARIABLE, str(tmp_path))
    compiled, cache = suffix.programs, suffix.scheduler.device_state.state.cache
    before, requested = compiled._speculators, []
    large = PassCosts((1, 256), (1.0, 1.2), (1, 16), (0.0, 0.0), draft_step=(0.1, 0.0))
    monkeypatch.setattr(programs, "measure_pass_costs", lambda *_, **sizes: requested.append(sizes) or large)
    monkeypatch.setattr(programs, "SHORTEST_TIMED", cache.table.shape[1] * cache.page_size)
    timed = compiled._timed_model(cache)
    stored_costs.write_costs(large._replace(tokens=(1, 2)), timed)
    compiled.measure_pass_costs(cache)
    assert len(requested) == 1 and requested[0]["batch"] is None and stored_costs.read_costs(timed) == large
    # An engine whose rows do not fit the caches together needs a batch, too.
    monkeypatch.setattr(programs, "page_bytes", lambda *_: 1 << 40)
    monkeypatch.setattr(timed_sizes, "LONGEST_TIMED", 2)
    monkeypatch.setattr(timed_sizes, "BATCH_BYTES", 1 << 50)
    for batch in (
        large._replace(near_positions=2, farther=((1 << 20, (1.0, 2.0)),)),
        large,
    ):
        stored_costs.write_costs(batch, timed)
        compiled.measure_pass_costs(cache)
    assert len(requested) == 2 and requested[1]["batch"][1] == cache.table.shape[1] * cache.page_size
    compiled._speculators = before
