"""Grouped products: every back end against float64, what is read of stacks, and the compilers' reports."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import cpu_runtime
from entropic_jax.pallas import grouped_matmul as package
from entropic_jax.pallas.grouped_matmul import gpu, grouped_matmul, in_blocks, reference, tpu

from ..marks import exhaustive, sample
from .compilers import (
    GENERATIONS,
    compile_for_gpu,
    compile_for_tpu,
    interpreted_on_gpu,
    interpreted_on_tpu,
    like,
)

ON_CPU = pytest.mark.skipif(cpu_runtime.unavailable_reason() is not None, reason="no kernels for this CPU")
NARROW = ("int8", "float8_e4m3fn")
UNUSED = 3  # rows behind the last group


def stack(rng, matrices, inputs, outputs, dtype):
    """A stack of matrices, its scales or None, and both in float64."""
    if dtype == "uint8":
        packed = rng.integers(0, 256, (matrices, inputs // 2, outputs)).astype(np.uint8)
        scale = jnp.asarray(rng.uniform(0.01, 0.1, (matrices, inputs // 32, outputs)), jnp.bfloat16)
        numbers = np.stack([packed & 15, packed >> 4], 2).reshape(matrices, inputs, outputs) - 8.0
        return jnp.asarray(packed), scale, numbers * np.repeat(np.asarray(scale, np.float64), 32, 1)
    wide = rng.standard_normal((matrices, inputs, outputs)) / 8
    if dtype not in NARROW:
        weight = jnp.asarray(wide, dtype)
        return weight, None, np.asarray(weight, np.float64)
    scale = rng.uniform(0.5, 2, (matrices, outputs)).astype(np.float32) / 100
    numbers = jnp.asarray(np.clip(np.round(wide / scale[:, None]), -127, 127), dtype)
    return numbers, jnp.asarray(scale), np.asarray(numbers, np.float64) * scale[:, None]


def case(sizes, inputs, outputs, dtype="float32", rows_dtype="float32", first=0):
    """Arguments of an operation, and the products in float64 of the rows that have a group."""
    rng = np.random.default_rng(len(sizes))
    x = jnp.asarray(rng.standard_normal((sum(sizes) + UNUSED, inputs)), rows_dtype)
    weights, scales, wide = zip(
        *(stack(rng, first + len(sizes), inputs, n, dtype) for n in outputs), strict=True
    )
    group = first + np.repeat(np.arange(len(sizes)), sizes)
    rows = np.asarray(x, np.float64)[: len(group)]
    expected = [np.einsum("ri,rio->ro", rows, matrix[group]) for matrix in wide]
    scales = () if scales[0] is None else scales
    return (x, jnp.asarray(sizes, jnp.int32), weights, scales, jnp.int32(first)), expected


def check(results, expected, tolerance=2e-6):
    for result, product in zip(results, expected, strict=True):
        actual = np.asarray(result)[: len(product)].astype(np.float64)
        assert np.abs(actual - product).max(initial=0) < tolerance * max(1, np.abs(product).max(initial=0))


SIZES = ([5, 0, 1, 17, 0], [0, 0, 300], [1] * 9)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=ON_CPU), "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *NARROW, "uint8"])
@pytest.mark.parametrize("sizes", [SIZES[0], *exhaustive(*SIZES[1:])], ids=len)
def test_rows_are_multiplied_by_the_matrix_of_their_group(backend, dtype, sizes):
    arguments, expected = case(sizes, 96, (100, 64), dtype, first=2)
    x, counts, weights, scales, first = arguments
    call = lambda *a: grouped_matmul(*a[:2], *a[2], scales=a[3], first=a[4], backend=backend)
    check(jax.jit(call)(x, counts, weights, scales, first), expected, 5e-6)


@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8"])
def test_the_grouped_product_of_xla(dtype):
    arguments, expected = case(SIZES[0], 64, (40,), dtype, first=3)
    check(jax.jit(reference.ragged)(*arguments), expected, 5e-6)


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_row_has_the_same_bits_whatever_its_group_holds(dtype):
    (x, _, weights, scales, first), _ = case([70, 50, 30], 128, (192, 64), dtype)
    multiply = jax.jit(lambda x, sizes: grouped_matmul(x, sizes, *weights, scales=scales, first=first))
    together = multiply(x, jnp.array([70, 50, 30]))
    # The rows of the second group, one at a time, few at a time, and beside others.
    for begin, end in ((70, 71), (71, 75), (80, 113)):
        alone = multiply(x[begin:end], jnp.array([0, end - begin, 0]))
        for part, of_all in zip(alone, together, strict=True):
            np.testing.assert_array_equal(part, of_all[begin:end])


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize("dtype", ["float32", "int8", *exhaustive("bfloat16", "float8_e4m3fn")])
def test_matrices_block_by_block_give_the_same_bits(dtype):
    (x, sizes, weights, scales, first), _ = case([3, 0, 90], 64, (128, 64), dtype, first=1)
    assert all(map(package.reads_blocked, weights)) and not package.reads_blocked(jnp.ones((2, 64, 96)))
    call = jax.jit(lambda weights: grouped_matmul(x, sizes, *weights, scales=scales, first=first))
    blocked = tuple(map(in_blocks, weights))
    reading = jax.jit(
        lambda weights: grouped_matmul(x, sizes, *weights, scales=scales, first=first, backend="xla")
    )
    for plain, laid_out, by_xla in zip(call(weights), call(blocked), reading(blocked), strict=True):
        np.testing.assert_array_equal(laid_out[:-UNUSED], plain[:-UNUSED])
        np.testing.assert_allclose(by_xla[:-UNUSED], plain[:-UNUSED], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=ON_CPU), "xla"])
def test_the_matrix_of_a_group_without_rows_is_not_read(backend):
    (x, sizes, weights, _, first), expected = case([0, 4, 0, 2], 32, (64,), first=1)
    poisoned = tuple(w.at[jnp.array([0, 1, 3])].set(jnp.nan) for w in weights)
    check(jax.jit(partial(grouped_matmul, backend=backend))(x, sizes, *poisoned, first=first), expected)


def test_gradients_are_those_of_the_product():
    (x, sizes, weights, _, first), _ = case([2, 0, 5], 16, (12,), first=1)
    group = first + np.repeat(np.arange(3), [2, 0, 5])
    plain = lambda x, w: jnp.sin(jnp.einsum("ri,rio->ro", x[:7], w[group])).sum()
    grouped = lambda x, w: jnp.sin(grouped_matmul(x, sizes, w, first=first)[0][:7]).sum()
    expected, actual = (jax.jit(jax.grad(f, (0, 1)))(x, weights[0]) for f in (plain, grouped))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)
    tangent = jnp.ones_like(x)
    forward = [jax.jvp(lambda x, f=f: f(x, weights[0]), (x,), (tangent,))[1] for f in (plain, grouped)]
    np.testing.assert_allclose(forward[1], forward[0], rtol=1e-4, atol=1e-5)


# Sizes of groups, inputs, outputs, and dtypes: groups that span tiles and share them, and none at the end.
TPU_CASES = (
    ([30, 0, 140, 1, 0, 60, 0], 128, (256, 256), "bfloat16", "bfloat16"),
    ([2, 0, 3], 256, (128,), "float32", "float32"),
    ([9, 40, 0], 128, (128, 128), "int8", "bfloat16"),
    ([0, 7, 1], 128, (128,), "float8_e4m3fn", "float32"),
    ([0, 0], 128, (128,), "float32", "float32"),
    ([3, 0, 40], 256, (128, 128), "uint8", "float32"),
    ([9, 0, 30], 128, (96, 96), "float32", "float32"),  # stored the other way round
    ([2, 33], 96, (128,), "int8", "float32"),
    ([2, 33, 95], 128, (144, 144), "bfloat16", "float32"),  # the last block of columns is not full
    ([40, 3], 104, (128,), "bfloat16", "bfloat16"),
    ([1, 130], 128, (48,), "bfloat16", "bfloat16"),
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["late", "eager"])
@pytest.mark.parametrize("groups", sample(TPU_CASES, 0, 2, 5, 6, 7, 8, 9), ids=str)
def test_tpu(monkeypatch, groups, mode):
    sizes, inputs, outputs, dtype, rows_dtype = groups
    bytes_of_columns = tpu.LANES * inputs * len(outputs) * jnp.dtype(rows_dtype).itemsize
    narrow = tpu.Blocks(weight_bytes=bytes_of_columns)  # several blocks of columns
    monkeypatch.setattr(tpu, "blocks", lambda: narrow)
    arguments, expected = case(sizes, inputs, outputs, dtype, rows_dtype, first=2)
    with interpreted_on_tpu(mode):
        results = jax.tree.map(np.asarray, jax.jit(lambda *a: tpu.grouped_matmul(*a))(*arguments))
    check(results, expected, 2e-6 if rows_dtype == "float32" else 4e-3)


def test_tpu_reads_a_matrix_once_and_none_of_a_group_without_rows():
    sizes = jnp.array([0, 200, 0, 1, 60, 0], jnp.int32)
    visits = tpu.visits_of(sizes, 128, 3, jnp.int32(10))
    used = np.asarray(visits.end > visits.start)
    pairs = list(zip(np.asarray(visits.matrix)[used].tolist(), visits.tile.tolist(), strict=False))
    assert pairs == [(11, 0), (11, 1), (13, 1), (14, 1), (14, 2)]
    # Places behind the last visit copy nothing: their blocks are those of the last.
    assert set(np.asarray(visits.matrix)[~used].tolist()) == {14}
    assert set(np.asarray(visits.tile)[~used].tolist()) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups",
    sample(
        (
            ([70, 0, 3, 64], 128, (128, 256), "bfloat16"),
            ([66, 65], 384, (192,), "int8"),  # as many tiles as there may be
            ([0, 65], 128, (128,), "float8_e4m3fn"),
        ),
        1,
    ),
    ids=str,
)
def test_gpu(groups):
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    sizes, inputs, outputs, dtype = groups
    arguments, expected = case(sizes, inputs, outputs, dtype, "bfloat16", first=1)
    interpret = params.InterpretGPUParams(detect_races=True)
    with interpreted_on_gpu():
        call = jax.jit(lambda *a: gpu.grouped_matmul(*a, interpret=interpret))
        results = jax.tree.map(np.asarray, call(*arguments))
    check(results, expected, 4e-3)


# Rows, experts, hidden and inner width, layers: decoding and a chunk of a prompt of Qwen3 30B-A3B and of
# Mixtral 8x22B on eight devices, as far as the stack fits on the smallest chip.
LARGE = (
    (64, 16, 2048, 768, 48, "bfloat16"),
    (4096, 128, 2048, 768, 2, "bfloat16"),
    (64, 8, 6144, 2048, 8, "int8"),
    (256, 128, 2048, 768, 2, "float8_e4m3fn"),
)
PACKED = (64, 16, 2048, 768, 24, "uint8")
# The width of Qwen3 30B-A3B over 8 and over 16 devices, and widths of which one fills the lanes.
WIDTHS = (
    (64, 128, 2048, 96, 24, "bfloat16"),
    (64, 128, 2048, 48, 24, "bfloat16"),
    (64, 32, 2880, 384, 3, "bfloat16"),
    (64, 32, 384, 2880, 3, "int8"),
)


def large(shape):
    rows, experts, hidden, inner, layers, dtype = shape
    matrices = layers * experts
    if dtype == "uint8":
        weight = like(matrices, hidden // 2, inner, dtype=jnp.uint8)
        scales = (like(matrices, hidden // 32, inner, dtype=jnp.bfloat16),) * 2
    else:
        weight = like(matrices, hidden, inner, dtype=jnp.dtype(dtype))
        scales = (like(matrices, inner),) * 2 if dtype in NARROW else ()
    sizes, first = like(experts, dtype=jnp.int32), like(dtype=jnp.int32)
    return like(rows, hidden, dtype=jnp.bfloat16), sizes, (weight, weight), scales, first


@pytest.mark.parametrize("generation", [GENERATIONS[1], *exhaustive(GENERATIONS[0], *GENERATIONS[2:])])
@pytest.mark.parametrize("shape", [*LARGE, PACKED, *WIDTHS], ids=str)
def test_tpu_compiles_without_a_copy_of_weights(generation, shape):
    multiply = lambda *arguments: tpu.grouped_matmul(*arguments)
    compiled = compile_for_tpu(multiply, *large(shape), generation=generation)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**21


@pytest.mark.parametrize("dtype", ["int8", *exhaustive("bfloat16")])
def test_tpu_compiles_where_vmem_is_small(dtype):
    """The down-projection of Mixtral 8x22B on eight v4, whose VMEM has 16 MiB."""
    x, sizes, weights, scales, first = large((256, 1, 16384, 6144, 8, dtype))
    multiply = lambda *arguments: tpu.grouped_matmul(*arguments)
    compiled = compile_for_tpu(multiply, x, sizes, weights[:1], scales[:1], first, generation="v4")
    assert compiled.memory_analysis().temp_size_in_bytes < 2**23


@pytest.mark.parametrize("shape", sample(LARGE, 0, 2), ids=str)
def test_gpu_compiles_without_spills(shape):
    program = compile_for_gpu(lambda *a: gpu.grouped_matmul(*a), *large(shape))
    rows, experts, hidden, inner, *_ = shape
    tiles = min(rows, experts) + rows // gpu.ROWS  # of 64 rows, and of their products
    memory = program.compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1.1 * tiles * gpu.ROWS * (hidden + 3 * inner) * 2 + 2**20
    assert program.kernels and all(kernel.spilled == 0 == kernel.stack for kernel in program.kernels)
    # Two blocks of 256 threads fit on a multiprocessor.
    assert all(kernel.registers <= 128 for kernel in program.kernels) or shape[-1] in NARROW


@pytest.mark.parametrize(
    ("kernel", "inputs", "outputs", "dtype", "reason"),
    [
        (tpu, 44, 128, "bfloat16", "44 inputs and 128 outputs: only multiples of 8"),
        (tpu, 128, 100, "bfloat16", "128 inputs and 100 outputs: only multiples of 8"),
        (tpu, 96, 96, "bfloat16", "96 inputs and 96 outputs: one of them must be a multiple of 128"),
        (tpu, 128, 48, "int8", "128 inputs and 48 outputs: only multiples of 32"),
        (tpu, 384, 128, "uint8", "384 inputs and 128 outputs of packed weights"),
        (gpu, 96, 128, "bfloat16", "96 inputs and 128 outputs"),
        (gpu, 128, 96, "bfloat16", "128 inputs and 96 outputs"),
        (gpu, 128, 128, "uint8", "bfloat16 times uint8"),
    ],
)
def test_what_kernels_decline(kernel, inputs, outputs, dtype, reason):
    (x, *arguments), _ = case([3], inputs, (outputs,), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        kernel.grouped_matmul(x.astype(jnp.bfloat16), *arguments)
