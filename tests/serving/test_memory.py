"""Sizes planned from memory: a size that does not fit is refused by name before allocation."""

import pytest

from entropic_jax import models
from entropic_jax.serving import memory
from entropic_jax.serving.engine.assembly import log_cache
from entropic_jax.serving.engine.options import EngineOptions, sizes
from entropic_jax.serving.offline.engine import Engine
from entropic_jax.serving.request import Request, RequestError

POSITION = 2 * 2 * 2 * 8 * 4  # bytes of keys and values: layers, KV heads, head_dim, float32


@pytest.fixture(scope="module")
def model(directory) -> models.Model:
    return models.load(directory, "float32")


@pytest.fixture
def available(monkeypatch):
    """`available(n)`: the device has room for n positions."""
    return lambda positions: monkeypatch.setattr(memory, "available_memory", lambda: positions * POSITION)


def test_pages_that_do_not_fit_are_refused_by_name(model, available):
    available(1000)
    with pytest.raises(ValueError, match=r"num_pages must be at most 62 with .*, at 4096 bytes a .* got 63"):
        sizes(model, EngineOptions(num_pages=63, block_size=16), 4)
    assert sizes(model, EngineOptions(num_pages=62, block_size=16), 4).pages == 62
    with pytest.raises(ValueError, match=r"kv_cache_bytes must be at most 256000 with .*; got 1000000000"):
        sizes(model, EngineOptions(kv_cache_bytes=10**9, max_num_seqs=64), 4)
    assert (
        sizes(model, EngineOptions(kv_cache_bytes=10**9, max_num_seqs=2), 4).pages == 16
    )  # all rows may fill


@pytest.mark.parametrize(("rows", "reduced"), [(2, True), (64, False)])
def test_a_size_that_the_rows_cannot_use_is_reduced_with_a_warning(model, available, caplog, rows, reduced):
    available(10_000)
    options = EngineOptions(kv_cache_bytes=2000 * POSITION, max_num_seqs=rows)
    log_cache(model, options, sizes(model, options, 4), "float32")
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == reduced
    for record in warned:
        assert "kv_cache_bytes is more than max_num_seqs sequences" in record.getMessage()
        assert (record.kv_cache_bytes, record.max_num_seqs) == (options.kv_cache_bytes, rows)
        assert record.max_model_len == model.config.longest_context and record.size.endswith("GiB")


def test_the_cache_follows_from_the_share_of_memory(monkeypatch):
    gibibyte = 2**30
    monkeypatch.setattr(memory, "available_memory", lambda: gibibyte)
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}.get)  # 4 GiB
    assert memory.cache_room(None) == gibibyte // 2
    assert memory.cache_room(0.9) == pytest.approx(0.6 * gibibyte)
    assert memory.cache_room(0.5) == 0
    assert memory.cache_room(None, sharers=4) == gibibyte // 8
    assert memory.cache_room(0.9, sharers=2) == pytest.approx(0.3 * gibibyte)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_queue", "max_steps"])
def test_none_is_refused_where_it_means_nothing(name):
    with pytest.raises(ValueError, match=f"^{name} must be an integer between 1 and [0-9]+; got None"):
        EngineOptions(**{name: None})


@pytest.mark.slow
def test_requests_that_do_not_fit_together_run_one_after_the_other(model, available):
    engine = Engine(model)
    requests = [Request(prompt="abc" * n, max_tokens=8, temperature=0.0) for n in range(1, 4)]
    together = [completion.token_ids for completion in engine.batch(requests)]
    available(40)
    parts = [completion.token_ids for completion in engine.batch(requests)]
    assert parts == together and all(len(tokens) > 0 for tokens in parts)


@pytest.mark.slow
def test_a_request_that_fits_nowhere_ends_alone(model, available):
    engine = Engine(model)
    available(40)
    large = Request(prompt="abc", max_tokens=60, temperature=0.0)
    small = Request(prompt="abc", max_tokens=8, temperature=0.0)
    first, second = engine.batch([large, small])
    assert first.finish_reason == "error" and second.finish_reason in ("length", "stop")
    assert "max_tokens must be at most 36 after 4 tokens of prompt, with 0.00 GiB of memory" in (
        first.error or ""
    )
    with pytest.raises(RequestError, match=r"max_tokens must be at most 36 .*; got 60"):
        next(engine.stream(large))
