"""Prefill and KV write for TPU and GPU, in the interpreters."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.pallas.paged_attention import cases, prefill_gpu, prefill_tpu, write_reference, write_tpu

from ..marks import sample
from .compilers import interpreted_on_gpu, interpreted_on_tpu
from .test_paged_attention_kernels import check_rows, copies_recorded

FAILURES = (
    AssertionError,
    jax.errors.JaxRuntimeError,
)  # a wrong result or a race, or the interpreter's error
QUERIES = 41  # of a row: two blocks, the second of which is not full
SMALL = (
    cases.Case(3, 2, 2, 128, 16, 7, window=True),
    cases.Case(3, 2, 2, 128, 16, 7, kept=0.6),
    cases.Case(2, 1, 4, 128, 32, 4, kept=0.6, window=True, dtype="bfloat16"),
    cases.Case(2, 1, 2, 128, 128, 3, kept=0.6, window=True, dtype="bfloat16", pages="int8"),
    cases.Case(2, 1, 2, 128, 128, 3, dtype="bfloat16", pages="float8_e4m3fn"),
    cases.Case(2, 2, 2, 64, 128, 3, kept=0.6, window=True),
    cases.Case(2, 2, 2, 128, 16, 5, kept=0.6, soft_cap=0.5),
)
GPU_CASES = (
    cases.Case(2, 1, 5, 128, 64, 4, kept=0.6, window=True, dtype="bfloat16"),
    cases.Case(2, 2, 2, 64, 32, 6, kept=0.6, dtype="bfloat16", soft_cap=2.0),
    cases.Case(2, 1, 2, 128, 128, 2, dtype="bfloat16", pages="int8"),
    cases.Case(3, 2, 4, 128, 64, 4, dtype="bfloat16"),
    cases.Case(2, 1, 4, 128, 16, 9, kept=0.6, dtype="bfloat16"),
    cases.Case(1, 1, 8, 256, 64, 5, kept=0.7, dtype="bfloat16"),
    cases.Case(2, 1, 2, 64, 128, 3, kept=0.6, window=True, dtype="bfloat16", pages="float8_e4m3fn"),
)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Make chunks small enough that a case of an interpreter has several."""
    for name, value in {"BLOCK": 32, "CHUNK_BYTES": 1 << 16, "QUERIES": 32}.items():
        patch.setattr(prefill_tpu, name, value)
    patch.setattr(prefill_gpu, "MOST_SLOTS", 2)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    shrink(monkeypatch)


def run(function, mode, *arguments):
    with interpreted_on_tpu(mode):
        traced_anew = lambda *x: function(*x)
        return jax.tree.map(np.asarray, jax.jit(traced_anew)(*jax.tree.map(jnp.asarray, arguments)))


def prefill_case(case):
    inputs = cases.build(
        case._replace(window=False)
    )  # earlier queries see what the window of the last leaves
    rng = np.random.default_rng(1)
    q = rng.standard_normal((case.rows, case.kv_heads, case.group, QUERIES, case.head_dim))
    q = (q * case.head_dim**-0.5).astype(inputs.q.dtype)
    query = np.maximum(inputs.context_length - QUERIES, 0).astype(np.int32)
    position = query[:, None] + np.arange(QUERIES, dtype=np.int32)
    first = np.maximum(position - 24, 0) if case.window else np.zeros_like(position)
    return (q, *inputs[1:6], first, query, inputs.context_length)


def exact(q, keys, values, table, index, count, first, query, last, soft_cap=None):
    """Its definition, in float64: the output and its log-sum-exp."""
    out, log_sum_exp = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
    size = keys.shape[2]
    keys, values = cases.floats(keys), cases.floats(values)
    for row, head in np.ndindex(q.shape[:2]):
        listed = np.arange(table.shape[1]) if index is None else index[row, head, : count[row, head]]
        if len(listed) == 0:
            continue
        position = (listed[:, None] * size + np.arange(size)).reshape(-1)
        flat = lambda x: x[table[row, listed], head].reshape(-1, q.shape[-1])
        k, v = flat(keys), flat(values)
        for i in range(q.shape[3]):
            seen = (position >= first[row, i]) & (position <= query[row] + i) & (position < last[row])
            if seen.any():
                score = q[row, head, :, i].astype(np.float64) @ k[seen].T
                score = score if soft_cap is None else soft_cap * np.tanh(score / soft_cap)
                weight = np.exp(score - score.max(-1, keepdims=True))
                out[row, head, :, i] = weight / weight.sum(-1, keepdims=True) @ v[seen]
                log_sum_exp[row, head, :, i] = np.log(np.exp(score).sum(-1))
    return out, log_sum_exp


def check_log_sum_exp(log_sum_exp, expected, tolerance):
    """A kernel's log-sum-exp: what sees nothing is exact."""
    seen = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(log_sum_exp), seen)
    np.testing.assert_allclose(log_sum_exp[seen], expected[seen], atol=tolerance)


def check_prefill(case, mode):
    """Cases with page lists are those of `prefill_partial`, which checks both outputs."""
    arguments = prefill_case(case)
    expected, log_sum_exp = exact(*arguments, soft_cap=case.soft_cap)
    if case.kept is None:
        result = run(partial(prefill_tpu.prefill, soft_cap=case.soft_cap), mode, *arguments)
    else:
        function = partial(prefill_tpu.prefill_partial, soft_cap=case.soft_cap)
        result, logs = run(function, mode, *arguments)
        check_log_sum_exp(logs, log_sum_exp, 5e-6 if case.dtype == "float32" else 0.02)
    if case.dtype == "float32":
        np.testing.assert_allclose(result, expected, atol=2e-6)
    else:
        check_rows(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["late", pytest.param("eager", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_prefill_in_the_interpreter(case, mode):
    check_prefill(case, mode)


def test_prefill_in_several_calls(monkeypatch):
    case = cases.Case(3, 2, 2, 128, 16, 4, kept=0.6)
    monkeypatch.setattr(prefill_tpu, "SCALARS", 200)  # room for one row
    calls = []
    call = prefill_tpu._call
    monkeypatch.setattr(prefill_tpu, "_call", lambda *x: calls.append(x) or call(*x))
    check_prefill(case, "eager")
    assert len(calls) == case.rows


def test_prefill_of_several_quantised_pages_in_a_step_of_the_softmax(monkeypatch):
    """Two pages a step, and two steps a chunk."""
    monkeypatch.setattr(prefill_tpu, "BLOCK", 256)
    monkeypatch.setattr(prefill_tpu, "CHUNK_BYTES", 1 << 17)
    check_prefill(cases.Case(1, 1, 2, 128, 128, 4, kept=0.9, dtype="bfloat16", pages="int8"), "eager")


def on_gpu(case, detect_races):
    """The arguments and the results of a case in the interpreter of a GPU; cases as in `check_prefill`."""
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    arguments = prefill_case(case)
    with interpreted_on_gpu(detect_races):
        interpret = params.InterpretGPUParams(detect_races=detect_races)
        prefill = prefill_gpu.prefill if case.kept is None else prefill_gpu.prefill_partial
        call = lambda *x: jax.tree.leaves(prefill(*x, soft_cap=case.soft_cap, interpret=interpret))
        results = jax.jit(call)(*jax.tree.map(jnp.asarray, arguments))
        return arguments, [np.asarray(x, np.float64) for x in results]


def check_prefill_on_gpu(case):
    arguments, (result, *logs) = on_gpu(case, detect_races=True)
    expected, log_sum_exp = exact(*arguments, soft_cap=case.soft_cap)
    check_rows(result, expected)
    for x in logs:
        check_log_sum_exp(x, log_sum_exp, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(GPU_CASES, 0, 2), ids=lambda case: case.name)
def test_prefill_in_the_interpreter_of_a_gpu(case):
    check_prefill_on_gpu(case)


@pytest.mark.slow
def test_prefill_on_gpu_copies_listed_tiles_and_no_other():
    case = cases.Case(1, 2, 4, 64, 32, 6, kept=0.6, window=True, dtype="bfloat16")
    with copies_recorded("gpu") as copied:
        arguments, _ = on_gpu(case, detect_races=False)
    _, _, _, table, index, count, first, query, _ = arguments
    position, page = query[:, None] + np.arange(QUERIES), np.arange(case.max_pages)[:, None, None]
    visible = ((page + 1) * case.page > first) & (page * case.page <= position)  # [page, row, query]
    expected = {
        (int(table[row, page]), head)
        for row, head in np.ndindex(count.shape)
        for page in index[row, head, : count[row, head]]
        if visible[page, row].any()
    }
    assert set(copied) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(["_wait", "_arrive_and_wait"], 1))
def test_a_missing_wait_of_prefill_on_gpu_is_found(name, monkeypatch):
    monkeypatch.setattr(prefill_gpu, name, lambda barrier: None)
    with pytest.raises(FAILURES):
        check_prefill_on_gpu(GPU_CASES[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["late", "eager"])
@pytest.mark.parametrize(("name", "fault"), [("_wait", lambda copy: None), ("_buffer_slot", lambda chunk: 0)])
def test_faults_of_prefill_are_found(name, fault, mode, monkeypatch):
    monkeypatch.setattr(prefill_tpu, name, fault)
    with pytest.raises(FAILURES):
        check_prefill(SMALL[0], mode)


def write_case(dtype, rows=5, kv_heads=2, size=32, head_dim=128, pool=9):
    """Row 0 begins a page that holds NaN, row 1 writes nothing, and the others continue a page."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    tiles = [normal(pool, kv_heads, size, head_dim).astype(dtype) for _ in range(2)]
    summaries = [*(normal(pool, kv_heads, head_dim) for _ in range(3)), np.abs(normal(pool, kv_heads))]
    page = np.array([3, pool - 1, 0, 7, 5], np.int32)
    slot = np.array([0, 4, size - 1, size // 2 + 1, size // 2 - 1], np.int32)
    for x in (*tiles, *summaries):
        x[3] = np.nan
    k, v = (normal(rows, kv_heads, head_dim).astype(dtype) for _ in range(2))
    return tuple(tiles), tuple(summaries), k, v, page, slot


def check_write(dtype, mode):
    arguments = write_case(dtype)
    (keys, values), summaries, k, v, page, slot = arguments
    summaries = [x.copy() for x in summaries]
    keys, values = keys.copy(), values.copy()
    for row, (p, s) in enumerate(zip(page, slot, strict=True)):
        if p == len(keys) - 1:
            continue
        keys[p, :, s], values[p, :, s] = k[row], v[row]
        key = k[row].astype(np.float32)
        norm = np.linalg.norm(v[row].astype(np.float32), axis=-1)
        folds = (np.minimum, np.maximum, np.add, np.maximum)
        for summary, fold, x in zip(summaries, folds, (key, key, key, norm), strict=True):
            summary[p] = x if s == 0 else fold(summary[p], x)
    tiles, written = run(write_tpu.write, mode, *arguments)
    for ours, theirs in zip(tiles, (keys, values), strict=True):
        np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32))
    for ours, theirs in zip(written, summaries, strict=True):
        np.testing.assert_allclose(ours[:-1], theirs[:-1], rtol=1e-6)


@pytest.mark.parametrize("mode", ["late", "eager"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_write_in_the_interpreter(dtype, mode):
    check_write(dtype, mode)


def check_quantised_write(dtype, mode):
    tiles, summaries, k, v, page, slot = write_case(jnp.bfloat16, size=128)
    every = np.ones(tiles[0].shape[:3], bool)
    tiles = tuple(cases.poisoned(dtype, np.nan_to_num(x.astype(np.float32), nan=1.0), every) for x in tiles)
    for pool in tiles:
        pool.scale[3] = np.nan
    arguments = (tiles, summaries, k, v, page, slot)
    expected = jax.jit(write_reference.write)(*jax.tree.map(jnp.asarray, arguments))
    written = run(write_tpu.write, mode, *arguments)
    for ours, theirs in zip(*map(jax.tree.leaves, (written, expected)), strict=True):
        ours, theirs = (np.asarray(x, np.float32)[:-1] for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["late", pytest.param("eager", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_write_of_quantised_pages_is_that_of_the_reference(dtype, mode):
    check_quantised_write(dtype, mode)


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_what_xla_writes_on_a_tpu_by_whole_pages_is_what_it_writes_elsewhere(stored, monkeypatch):
    arguments = write_case(jnp.float32, head_dim=64, size=128)
    tiles, summaries, k, v, page, slot = arguments
    every = np.ones(tiles[0].shape[:3], bool)
    tiles = tuple(cases.poisoned(stored, np.nan_to_num(x, nan=1.0), every) for x in tiles)
    inputs = jax.tree.map(jnp.asarray, (tiles, summaries, k, v, page, slot))
    expected = write_reference.write(*inputs)
    monkeypatch.setattr(write_reference, "default_device", lambda: SimpleNamespace(platform="tpu"))
    for ours, theirs in zip(*map(jax.tree.leaves, (write_reference.write(*inputs), expected)), strict=True):
        np.testing.assert_array_equal(ours[:-1], theirs[:-1])


@pytest.mark.parametrize("mode", ["late", "eager"])
def test_a_write_that_does_not_wait_is_found(mode, monkeypatch):
    monkeypatch.setattr(write_tpu, "_wait", lambda copy: None)
    with pytest.raises(FAILURES):
        check_write(jnp.float32, mode)
