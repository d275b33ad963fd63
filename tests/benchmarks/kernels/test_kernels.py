"""Page lists, checks and tables of `benchmarks.kernels`."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import attention, checks, experts, prefill, report, timing


def test_time_in_which_a_device_was_busy():
    assert timing.union_length([]) == 0
    assert timing.union_length([(5, 7), (0, 2), (1, 3), (1, 2), (6, 10)]) == 3 + 5


def test_lists_and_lengths():
    shape = attention.Shape(3, 2, 1, 64, 640, 64, "float32")
    assert shape.pages == 10 and shape.bytes == 2 * 3 * 2 * 640 * 64 * 4
    assert attention.random_page_lists(shape, 1.0) == (None, None)
    index, count = attention.random_page_lists(shape, 0.25)
    assert (np.asarray(count) == 2).all()
    assert (np.diff(np.asarray(index)[..., :2]) > 0).all() and (np.asarray(index) < 10).all()
    assert attention.ragged(shape).tolist() == [80, 360, 640]


def test_lists_of_a_prefill_have_the_pages_of_its_queries():
    batch = attention.Shape(1, 2, 1, 64, 640, 64, "float32")
    assert prefill.prefill_page_lists(batch, 512, 1.0) == ((None, None), 1.0)
    (index, count), kept = prefill.prefill_page_lists(batch, 512, 0.25)
    assert (np.asarray(count) == 4).all() and kept == 0.4
    listed = np.asarray(index)[..., :4]
    assert (np.diff(listed) > 0).all() and (listed[..., 2:] == [8, 9]).all()


def test_the_alternative_of_experts_computes_the_same():
    (shape, _) = experts.shapes(quick=True)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, shape.hidden)), jnp.float32)
    ids, weights = jnp.array([[0, 2], [2, 3], [0, 3]]), jnp.full((3, 2), 0.5)
    arguments = (x, ids, weights, experts.random_experts(shape))
    ours, plain = (f(*arguments) for f in (partial(experts._experts, "xla"), experts._by_ragged_dot))
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def entry(engine, seconds, **more):
    return {"shape": {"rows": 2, "page": 64}, "engine": engine, "bytes": 8e6, "seconds": seconds, **more}


RESULTS = {
    "date": "2026-01-01",
    "device": "a chip",
    "platform": "gpu",
    "jax": "0.10.2",
    "threads": None,
    "load_average": 0.0,
    "copy": {"best": 2e9, "median": 1e9},
    "cases": [{"operation": "sum", "case": "small", "verdict": "fails: twice"}],
    "checked": [{"operation": "add", "chosen": "gpu", "problem": "differs by 1"}],
    "attention": [
        entry("gpu", [0.006, 0.004, 0.008], kept=1.0),
        entry("gpu", [0.003], kept=0.5),
        entry("another", [], kept=1.0, error="ValueError: no"),
    ],
    "topk_entropy": [],
}


def test_tables_and_notes():
    (title, header, rows), *_ = report.tables(RESULTS)
    assert title == "Paged attention of one query per row: rows × page"
    assert rows[0] == ["2 × 64", "gpu", "1", "6.000", "4.000–8.000", "1.3", "67%", "1.000"]
    assert rows[1][-1] == "0.500"
    assert rows[2][:5] == ["2 × 64", "another", "", "failed", "ValueError: no"]
    assert all(len(row) == len(header) for row in rows)
    assert "add by gpu is wrong: differs by 1" in report.notes(RESULTS)
    assert "sum small fails: twice" in report.notes(RESULTS)


@pytest.mark.slow
def test_the_cases_of_hardware_are_right_in_plain_jax():
    sampled = list(checks.calls("xla"))[::4]
    verdicts = {name: checks.verdict(call) for _, name, call in sampled}
    assert set(verdicts.values()) == {"yes"}, verdicts


def test_what_a_case_may_come_to():
    def declines():
        raise ExceptionGroup("none", [NotImplementedError("gpu: not today")])

    def fails():
        raise RuntimeError("out of\nmemory")

    verdicts = [checks.verdict(call) for call in (lambda: 1.0, lambda: 3.0, declines, fails)]
    assert verdicts == [
        "yes",
        "fails: 3 times the tolerance",
        "declines: gpu: not today",
        "fails: RuntimeError: out of",
    ]


def test_bytes_of_bfloat16():
    shape = attention.Shape(1, 1, 1, 64, 128, 64, "bfloat16")
    assert shape.bytes == 2 * 128 * 64 * jnp.dtype("bfloat16").itemsize
