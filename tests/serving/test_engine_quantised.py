"""The engine with a KV cache of 16 or 8 bits: the same invariants, and more pages in the same memory."""

import pytest

from entropic_jax.pallas.paged_attention.quantised import bytes_per_number
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.engine.options import sizes
from entropic_jax.serving.offline.engine import Engine
from entropic_jax.serving.options.kv_cache import check_pages, stored_as
from entropic_jax.serving.request import Request
from tests.marks import exhaustive
from tests.serving.test_engine import WARM, engine_of, engine_request, model, prompt, run

__all__ = ["model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("int8_per_token_head", "int8"), *exhaustive(("bfloat16", "bfloat16"))]
)
def test_with_a_narrow_cache_a_job_still_gets_the_same_whatever_befalls_it(model, name, dtype):
    options = dict(kv_cache_dtype=name, num_pages=40)
    engine_requests = [
        engine_request(f"j{i}", prompt(30, i), seed=i, max_tokens=40, **WARM) for i in range(5)
    ]
    for engine in engine_of(model, **options):
        assert engine.scheduler.device_state.state.cache.layers[0].keys.dtype == dtype
        together = run(engine, *engine_requests)
        alone = [run(engine, j)[0] for j in engine_requests]
        assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]


def test_a_cache_of_eight_bits_holds_more_pages(model):
    room = dict(kv_cache_bytes=1 << 20, max_num_seqs=1000)
    names = ("auto", "bfloat16", "fp8", "fp8_per_token_head", "int8_per_token_head")
    engine_options = {name: EngineOptions(kv_cache_dtype=name, **room) for name in names}
    head_dim = model.decoder.shape.head_dim
    pages = {
        name: sizes(model, it, bytes_per_number(stored_as(name, "float32"), head_dim)).pages
        for name, it in engine_options.items()
    }
    assert pages["bfloat16"] == pytest.approx(2 * pages["auto"], rel=0.02)
    assert pages["fp8"] == pages["fp8_per_token_head"] == pages["int8_per_token_head"]
    assert pages["fp8"] / pages["auto"] == pytest.approx(4 / (1 + 4 / head_dim), rel=0.02)
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of .*; got 'nvfp4'"):
        EngineOptions(kv_cache_dtype="nvfp4")


def test_fp8_is_declined_where_it_would_copy_the_cache(model):
    check_pages("float8_e4m3fn", "gpu")
    with pytest.raises(
        ValueError, match="kv_cache_dtype must be auto, bfloat16 or int8_per_token_head on a CPU"
    ):
        LLMEngine(model, EngineOptions(kv_cache_dtype="fp8"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["int8_per_token_head", "bfloat16"])
def test_without_a_server_too(model, name):
    request = Request(prompt=prompt(30, 1), max_tokens=12, temperature=0.0)
    wide, narrow = Engine(model), Engine(model, kv_cache_dtype=name)
    texts = [next(iter(engine.batch([request]))).token_ids for engine in (wide, narrow)]
    assert texts[0][:4] == texts[1][:4] and len(texts[1]) == len(texts[0])
    assert (wide.pages, narrow.pages) == ("float32", stored_as(name, "float32"))
    with pytest.raises(
        ValueError, match="kv_cache_dtype must be auto, bfloat16 or int8_per_token_head on a CPU"
    ):
        Engine(model, kv_cache_dtype="fp8")
