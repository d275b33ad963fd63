"""Paged attention for TPU and GPU, in the interpreters, against float64."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.pallas.paged_attention import cases, gpu, reference, split_kv, tpu

from ..marks import sample
from . import programs
from .compilers import interpreted_on_gpu, interpreted_on_tpu

NAMES = [case.name for case in cases.SMALL]
SMALL_CHUNKS = {
    "BLOCK": 32,
    "CHUNK_BYTES": 1 << 15,
    "UNROLLED": 2,
}  # several chunks per list, several steps per chunk
# The result is rounded to bfloat16, as are the weights of bfloat16 values: each moves a vector by some 0.15 %
# of its length. Sums that were kept in bfloat16 would move vectors by more.
MEAN_DISTANCE, LARGEST_DISTANCE = 2.8e-3, 5e-3
TILE_32 = cases.Case(3, 2, 2, 128, 32, 6, kept=0.6, window=True)  # a tile of K is no query and no output
GPU_CASES = (
    cases.Case(2, 1, 3, 64, 32, 10, window=True, dtype="bfloat16", soft_cap=2.0),
    cases.Case(2, 2, 2, 128, 128, 3, kept=0.7, dtype="bfloat16"),
    cases.Case(2, 1, 2, 128, 64, 5, kept=0.7, dtype="bfloat16", pages="int8"),
    cases.Case(2, 1, 2, 64, 128, 3, window=True, dtype="bfloat16", pages="float8_e4m3fn"),
    cases.Case(2, 1, 8, 256, 16, 9, kept=0.6, dtype="bfloat16"),
)


def arguments_of(case, seed=0):
    inputs = cases.build(case, seed)
    return inputs, jax.tree.map(jnp.asarray, inputs)


def check(result, case, inputs):
    out, log_sum_exp = cases.exact(case, inputs)
    if case.dtype == "float32":
        np.testing.assert_allclose(result.out, out, atol=2e-6)
    else:
        check_rows(result.out, out)
    np.testing.assert_allclose(result.log_sum_exp, log_sum_exp, atol=2e-6, rtol=2e-6)


def check_rows(result, expected):
    """Compare bfloat16 vectors by their distance, relative to the length of the expected vector."""
    result = np.asarray(result, np.float64)
    length = np.linalg.norm(expected, axis=-1)
    assert not result[length == 0].any()
    distance = (np.linalg.norm(result - expected, axis=-1) / np.where(length == 0, 1, length))[length > 0]
    assert np.sqrt((distance**2).mean()) < MEAN_DISTANCE
    assert distance.max() < LARGEST_DISTANCE


def on_tpu(case, arguments, mode):
    with interpreted_on_tpu(mode):
        result = jax.jit(lambda *x: tpu.decode(*x, soft_cap=case.soft_cap))(*arguments)
        return jax.tree.map(np.asarray, result)


def on_gpu(case, arguments, detect_races=False):
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    interpret = params.InterpretGPUParams(detect_races=detect_races)
    with interpreted_on_gpu(detect_races):
        result = jax.jit(lambda *x: gpu.decode(*x, soft_cap=case.soft_cap, interpret=interpret))(*arguments)
        return jax.tree.map(np.asarray, result)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Make chunks small enough that a case of an interpreter has several."""
    for name, value in SMALL_CHUNKS.items():
        patch.setattr(tpu, name, value)
    patch.setattr(gpu, "MIN_CHUNK", 128)
    patch.setattr(gpu, "MAX_LISTED_CHUNK", 128)
    patch.setattr(gpu, "BLOCKS", 1 << 20)


@pytest.fixture
def small_chunks(monkeypatch):
    shrink(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", [x for x in cases.SMALL if x.soft_cap is None], ids=lambda case: case.name)
def test_the_reference_on_the_cases_without_a_soft_cap(case):
    inputs, arguments = arguments_of(case)
    check(reference.decode(*arguments), case, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["late", pytest.param("eager", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", cases.SMALL, ids=NAMES)
def test_tpu_in_the_interpreter(case, mode, small_chunks):
    inputs, arguments = arguments_of(case)
    try:
        result = on_tpu(case, arguments, mode)
    except NotImplementedError as declined:
        pytest.skip(str(declined))
    check(result, case, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["late", "eager"])
@pytest.mark.parametrize("window", [False, True])
def test_tpu_with_blocks_that_are_taken_together(mode, window, monkeypatch):
    for name, value in {"BLOCK": 32, "CHUNK_BYTES": 1 << 17, "UNROLLED": 3, "TOGETHER": 2}.items():
        monkeypatch.setattr(tpu, name, value)
    case = cases.Case(2, 2, 2, 128, 16, 24, kept=0.6, window=window)
    inputs, arguments = arguments_of(case)
    assert inputs.num_pages.max() > 8  # pages of a chunk: 4 blocks
    check(on_tpu(case, arguments, mode), case, inputs)


@pytest.mark.parametrize("pages", ["int8", "float8_e4m3fn"])
def test_tpu_with_several_quantised_pages_in_a_step_of_the_softmax(pages, monkeypatch):
    monkeypatch.setattr(tpu, "BLOCK", 256)
    monkeypatch.setattr(tpu, "CHUNK_BYTES", 1 << 17)
    case = cases.Case(2, 2, 2, 128, 128, 5, kept=0.8, dtype="bfloat16", pages=pages)
    inputs, arguments = arguments_of(case)
    assert inputs.num_pages[0].min() > 2
    check(on_tpu(case, arguments, "late"), case, inputs)


@pytest.mark.parametrize("scalars", [tpu.SCALARS, 300])
def test_tpu_with_the_chunks_of_a_real_one_and_in_several_calls(scalars, monkeypatch):
    monkeypatch.setattr(tpu, "SCALARS", scalars)
    inputs, arguments = arguments_of(TILE_32)
    check(on_tpu(TILE_32, arguments, "late"), TILE_32, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(GPU_CASES, 0, 2), ids=lambda case: case.name)
def test_gpu_in_the_interpreter(case, small_chunks):
    inputs, arguments = arguments_of(case)
    check(on_gpu(case, arguments, detect_races=True), case, inputs)


@pytest.mark.parametrize(
    "run", [lambda c, a: on_tpu(c, a, "late"), pytest.param(on_gpu, marks=pytest.mark.exhaustive)]
)
def test_a_row_has_the_same_bits_whatever_its_neighbours(run, small_chunks):
    case = cases.Case(3, 1, 2, 128, 16, 9, dtype="bfloat16")
    _, arguments = arguments_of(case)
    alone = arguments._replace(context_length=arguments.context_length.at[1:].set(jnp.asarray([0, 17])))
    for both in zip(run(case, arguments), run(case, alone), strict=True):
        np.testing.assert_array_equal(*(x[0] for x in both))


# What is read.


@contextmanager
def copies_recorded(platform):
    """The `(page, heads)` of every tile of 32 positions that is copied; each is copied as K and as V."""
    interpreter = {"tpu": ("mosaic", "interpret_pallas_call", "DMA", "execute_read"),
             "gpu": ("mosaic_gpu", "gpu_callbacks", "DeviceLocalMemoryTransfer", "execute")}  # fmt: skip
    package, module, owner, method = interpreter[platform]
    module = pytest.importorskip(f"jax._src.pallas.{package}.interpret.{module}")
    owner = getattr(module, owner, None) or pytest.skip(f"JAX {jax.__version__} has no {owner}")
    run, seen = getattr(owner, method), []

    def recorded(self, *token):
        result = run(self, *token)
        if self.data is not None and self.data.shape[-2] == 32:
            page, heads, *_ = module.interpret_utils.to_range(self.src_transforms)
            heads = (heads,) if isinstance(heads, int) else range(heads.start, heads.stop)
            seen.extend((page, head) for head in heads)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, recorded)
        yield seen


def listed(case, inputs):
    read = cases.seen(case, *inputs[3:])
    return {(int(page), int(head)) for page, head in zip(*np.nonzero(read.any(-1)), strict=True)}


@pytest.mark.parametrize("kept", [None, 0.6])
def test_tpu_copies_each_listed_tile_once_and_no_other(kept, small_chunks):
    case = TILE_32._replace(kept=kept)
    inputs, arguments = arguments_of(case)
    with copies_recorded("tpu") as seen:
        on_tpu(case, arguments, "eager")
    assert sorted(seen) == sorted(2 * list(listed(case, inputs)))


def test_gpu_copies_listed_tiles_and_no_other(small_chunks):
    case = cases.Case(2, 2, 2, 64, 32, 6, kept=0.6, window=True, dtype="bfloat16")
    inputs, arguments = arguments_of(case)
    with copies_recorded("gpu") as seen:
        on_gpu(case, arguments)
    assert set(seen) == listed(case, inputs)


# Faults that must be found.

FAILURES = (
    AssertionError,
    jax.errors.JaxRuntimeError,
)  # a wrong result or a race, or the interpreter's error


def fetches_what_is_masked(*arguments):
    """Lists that begin with the first page; only the mask applies the window."""
    lists = split_kv.work_lists(*arguments)
    return lists._replace(begin=jnp.zeros_like(lists.begin), low=lists.low + lists.begin * arguments[-1])


def beyond_the_pool(*arguments):
    lists = split_kv.work_lists(*arguments)
    return lists._replace(pages=lists.pages + 1)  # the last page is that of no row, and NaN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault", "mode"),
    [
        ("_wait", lambda copy: None, "late"),
        ("_wait", lambda copy: None, "eager"),
        ("_other_slot", lambda slot: slot, "late"),
        ("_other_slot", lambda slot: slot, "eager"),
        ("work_lists", beyond_the_pool, "eager"),
    ],
    ids=["no-wait-late", "no-wait-eager", "one-slot-late", "one-slot-eager", "wrong-page"],
)
def test_faults_of_the_tpu_kernel_are_found(name, fault, mode, small_chunks, monkeypatch):
    monkeypatch.setattr(tpu, name, fault)
    inputs, arguments = arguments_of(TILE_32)
    with pytest.raises(FAILURES):
        check(on_tpu(TILE_32, arguments, mode), TILE_32, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [19, -100])
def test_tpu_reads_the_first_or_last_page_for_one_out_of_range(shift, small_chunks):
    _, arguments = arguments_of(TILE_32)
    last = arguments.keys.shape[0] - 1
    table = arguments.page_table + shift
    in_range = arguments._replace(page_table=jnp.clip(table, 0, last))
    assert (np.asarray(table) != np.asarray(in_range.page_table)).any()
    results = [on_tpu(TILE_32, x, "eager") for x in (arguments._replace(page_table=table), in_range)]
    for result, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_page_that_is_masked_but_fetched_is_found(monkeypatch):
    case = TILE_32._replace(kept=None)
    monkeypatch.setattr(tpu, "work_lists", fetches_what_is_masked)
    inputs, arguments = arguments_of(case)
    with copies_recorded("tpu") as seen:
        check(on_tpu(case, arguments, "eager"), case, inputs)  # the result does not tell
    assert set(seen) > listed(case, inputs)


def test_a_missing_wait_of_the_gpu_kernel_is_found(small_chunks, monkeypatch):
    monkeypatch.setattr(gpu, "_wait", lambda arrival: None)
    case = GPU_CASES[0]
    inputs, arguments = arguments_of(case)
    with pytest.raises(FAILURES):
        check(on_gpu(case, arguments, detect_races=True), case, inputs)


# What is declined, and parts.


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        (tpu, {"head_dim": 64}, "head_dim 64 and page_size 16"),
        (tpu, {"head_dim": 72, "page": 128}, "head_dim 72"),
        (tpu, {"page": 24}, "page_size 24"),
        (tpu, {"dtype": "float16"}, "float16"),
        (tpu, {"page": 64, "pages": "int8"}, "page_size 64"),
        (gpu, {"dtype": "float32"}, "float32"),
        (gpu, {"head_dim": 96}, "head_dim 96"),
        (gpu, {"page": 24}, "page_size 24"),
        (gpu, {"page": 32, "pages": "int8"}, "page_size 32"),
    ],
)
def test_what_is_declined_has_a_reason(backend, change, reason):
    case = cases.Case(2, 2, 2, 128, 16, 2, dtype="bfloat16")._replace(**change)
    arguments = programs.decode(case, backend.decode).arguments
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(backend.decode, *arguments)


@pytest.mark.parametrize("spread", [1, 100])  # e^100 is more than float32 holds
def test_parts_merge_to_the_whole_and_what_is_not_held_may_be_nan(spread):
    rng = np.random.default_rng(0)
    score, value = spread * rng.standard_normal((5, 3, 7)), rng.standard_normal((5, 7, 4))
    weight = np.exp(score)
    part = np.einsum("pgs,psd->pgd", weight / weight.sum(-1, keepdims=True), value)
    log_sum_exp = np.log(weight.sum(-1))
    held = np.array([True, True, False, True, False])
    full = np.einsum("pgs,psd->gd", weight[held], value[held]) / weight[held].sum((0, 2))[:, None]
    part[~held], log_sum_exp[~held] = np.nan, np.nan
    merged = split_kv.merge_partials(
        *(jnp.asarray(x, jnp.float32) for x in (part, log_sum_exp)), jnp.asarray(held)
    )
    # A score of 200 is known to one part in 2^24 in float32, and a weight to as much times 200.
    np.testing.assert_allclose(merged.out, full, atol=1e-6 * max(1, spread / 5))
    np.testing.assert_allclose(merged.log_sum_exp, np.log(weight[held].sum((0, 2))), rtol=1e-6, atol=1e-6)
    nothing = split_kv.merge_partials(
        *(jnp.asarray(x, jnp.float32) for x in (part, log_sum_exp)), jnp.zeros(5, bool)
    )
    assert not nothing.out.any() and np.isneginf(nothing.log_sum_exp).all()
