"""Top-k and entropies: every back end against float64, kernels in the interpreters."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from entropic_jax import entropy
from entropic_jax.pallas import topk_entropy
from entropic_jax.pallas.topk_entropy import cases, gpu, reference, tpu
from tests.marks import sample
from tests.pallas import compilers
from tests.pallas.compilers import RaceError

named = lambda cases: pytest.mark.parametrize("case", cases, ids=lambda case: case.name)
tiny = partial(tpu.topk_entropy, buckets=128, width=256)
portable = partial(gpu.topk_entropy, size=2048, portable=True)
PROJECTED = ((3, 64, 700, 5), (72, 128, 640, 40))  # rows, hidden, vocabulary, k
# Tails that are sums of few numbers, far from a largest one of 60, are exact to their own size only.
close = partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)


def check(actual, expected):
    """Values and indices must be exact, including ties; moments must agree up to float32 rounding."""
    np.testing.assert_array_equal(actual.indices, expected.indices)
    np.testing.assert_array_equal(actual.values, expected.values.astype(np.float32))
    for group in ("calibrated", "tempered", "head"):
        for name, value in getattr(expected, group)._asdict().items():
            close(getattr(getattr(actual, group), name), value, err_msg=f"{group}.{name}")


def run(function, case):
    arguments = cases.build(case)
    call = jax.jit(lambda logits, *at: function(logits, case.k, *at))
    check(jax.block_until_ready(call(*arguments)), cases.exact(arguments, case.k))


# The reference.


@named(cases.SMALL)
def test_the_reference_is_exact(case):
    run(reference.topk_entropy, case)


@pytest.mark.parametrize("k", [1, 7, 67])
def test_the_head_is_that_of_entropy(k):
    logits = 3 * np.random.default_rng(0).standard_normal((4, 67)).astype(np.float32)
    actual = topk_entropy.topk_entropy(logits, k, 0.5)
    for name, value in entropy.top_k_summary(jnp.asarray(logits), k)._asdict().items():
        close(getattr(actual.head, name), value)
    for part, at in ((actual.calibrated, 1.0), (actual.tempered, 0.5)):
        for name, value in entropy.at_temperature(jnp.asarray(logits), at)._asdict().items():
            close(getattr(part, name), value)
    assert (entropy.lower_bound(actual.head) <= actual.calibrated.entropy + 1e-5).all()
    assert (entropy.upper_bound(actual.head) >= actual.calibrated.entropy - 1e-5).all()


def test_a_row_has_the_same_bits_whatever_its_neighbours():
    logits, temperature, calibration = cases.build(cases.Case(6, 411, 33, "special"))
    call = lambda *arguments: reference.topk_entropy(arguments[0], 33, *arguments[1:])
    together = call(logits, temperature, calibration)
    logits[1:] = logits[0]
    alone = call(logits, temperature, calibration)
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[0], result) for result in (together, alone)))


def test_gradients_are_those_of_the_reference():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((3, 29)).astype(np.float32)
    logits[1, 4] = -np.inf
    temperature = jnp.array([0.7, 1.0, 0.0])
    weight = jnp.asarray(rng.standard_normal(4), jnp.float32)

    def loss(function, *operands):
        result = function(*operands)
        numbers = (
            result.tempered.entropy,
            result.calibrated.varentropy,
            result.head.tail_mass,
            result.values.sum(-1),
        )
        return (jnp.stack(numbers, -1) @ weight).sum()

    ours = lambda logits, at: topk_entropy.topk_entropy(logits, 5, at, 1.3)
    theirs = lambda logits, at: reference.topk_entropy(logits, 5, at, jnp.full(at.shape, 1.3))
    actual = jax.jit(jax.grad(partial(loss, ours), (0, 1)))(logits, temperature)
    expected = jax.jit(jax.grad(partial(loss, theirs), (0, 1)))(logits, temperature)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-7)
    chex.assert_tree_all_finite(actual)
    finite = jnp.asarray(np.where(np.isinf(logits), 0.0, logits)[:2])
    tempered = jax.jit(lambda z: theirs(z, temperature[:2]).tempered)
    chex.assert_numerical_grads(tempered, (finite,), order=1, atol=2e-2)
    hidden, weights = jnp.asarray(rng.standard_normal((3, 8))), jnp.asarray(rng.standard_normal((8, 29)))
    projected = lambda *x: topk_entropy.project(*x, 5, temperature, 1.3)
    product = lambda hidden, weights: reference.topk_entropy(
        hidden @ weights, 5, temperature, jnp.full(3, 1.3)
    )
    both = [jax.jit(jax.grad(partial(loss, f), (0, 1)))(hidden, weights) for f in (projected, product)]
    chex.assert_trees_all_close(*both, rtol=1e-5, atol=1e-6)


def test_sizes_of_the_head_that_are_none_are_refused():
    for k in (0, 301):
        with pytest.raises(ValueError, match=f"k must be between 1 and 300, .*; got {k}"):
            topk_entropy.topk_entropy(jnp.zeros((2, 300)), k)


# The interpreters.


@pytest.mark.slow
@named(sample(cases.SMALL, 1, 2, 6))
def test_tpu_kernel_with_late_copies(case):
    with compilers.interpreted_on_tpu("late"):
        run(tiny, case)


@named(sample(cases.SMALL[:4], 0))
def test_tpu_kernel_without_races(case):
    with compilers.interpreted_on_tpu("eager"):
        run(tiny, case)


@pytest.mark.slow
@named(sample(cases.SMALL, 3, 6, 7))
def test_gpu_kernel(case):
    with compilers.interpreted_on_gpu():
        run(portable, case)


def test_tpu_kernel_sweeps_again_only_where_a_list_was_short():
    """Ties need no second sweep: equal tokens that no list kept rank after the k largest."""
    logits = cases.build(cases.Case(4, 1100, 40)).logits
    logits[1] = 1.0
    logits[2, 17::128] += 20  # nine in one bucket
    logits[3, 60:] = -np.inf
    shape = tpu.Shape(4, 4, 4, 1100, 40, buckets=128, width=256)
    sweep = jax.jit(
        lambda logits: tpu._sweep(shape, None, jnp.ones(1, jnp.int32), None, logits, jnp.ones((4, 2)))
    )
    with compilers.interpreted_on_tpu("late"):
        overflow = jax.block_until_ready(sweep(logits)).overflow
    np.testing.assert_array_equal(overflow[:, 0] > 0, [False, False, True, False])


def products(rows: int, hidden: int, vocabulary: int):
    """Operands with exact products in float32, so that ties hold for every order of summation."""
    rng = np.random.default_rng(3)
    small = lambda *shape: (rng.integers(-8, 9, shape) / 8).astype(np.float32)
    at = np.exp(rng.uniform(-1, 1, (2, rows))).astype(np.float32)
    return small(rows, hidden), small(hidden, vocabulary), *at


def check_projection(shape, mode):
    *sizes, k = shape
    hidden, weight, *at = products(*sizes)
    expected = cases.exact(cases.Arguments(hidden @ weight, *at), k)
    call = jax.jit(lambda hidden, weight, *at: tpu.project(hidden, weight, k, *at, buckets=256, width=256))
    with compilers.interpreted_on_tpu(mode):
        check(jax.block_until_ready(call(hidden, weight, *at)), expected)


@pytest.mark.parametrize("mode", sample(list(compilers.TPU_MODES), 0))
@pytest.mark.parametrize("shape", sample(PROJECTED, 0), ids=str)
def test_tpu_projection(shape, mode):
    check_projection(shape, mode)


# What the interpreters are to find: a kernel that sums blocks which it copies itself, with a fault.


def summed(blocks, fault: str):
    count = blocks.shape[0]

    def kernel(blocks, out, slots, semaphores):
        def copy(number):
            slot = 0 if fault == "shared slot" else number % 2
            source = blocks.at[number + (fault == "out of range")]
            return pltpu.make_async_copy(source, slots.at[slot], semaphores.at[slot])

        out[...] = jnp.zeros_like(out)
        copy(0).start()
        for number in range(count):
            if not (fault == "missing wait" and number == 1):
                copy(number).wait()
            if number + 1 < count:
                copy(number + 1).start()
            out[...] += slots[0 if fault == "shared slot" else number % 2]
        if fault == "missing wait":
            copy(1).wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(blocks.shape[1:], blocks.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((2, *blocks.shape[1:]), blocks.dtype), pltpu.SemaphoreType.DMA((2,))],
    )(blocks)


def faults_found(call, expected) -> set[str]:
    """The modes in which a call races, raises or is wrong."""
    faults = set()
    for mode in compilers.TPU_MODES:
        try:
            with compilers.interpreted_on_tpu(mode):
                result = jax.block_until_ready(call())
            np.testing.assert_allclose(result, expected, rtol=1e-5)
        except (AssertionError, jax.errors.JaxRuntimeError, IndexError):
            faults.add(mode)
    return faults


@pytest.mark.parametrize("fault", ["none", "missing wait", "shared slot", "out of range"])
def test_seeded_faults_are_found(fault):
    blocks = np.random.default_rng(4).standard_normal((4, 8, 128)).astype(np.float32)
    faults = faults_found(lambda: jax.jit(partial(summed, fault=fault))(blocks), blocks.sum(0))
    assert bool(faults) == (fault != "none"), faults
    if fault == "missing wait":
        assert faults == set(compilers.TPU_MODES)


@pytest.mark.slow
def test_a_block_out_of_range_is_found_in_the_kernel():
    case = cases.Case(3, 700, 5)
    logits, *at = cases.build(case)
    scales = jnp.ones((3, 2))
    shape = tpu.Shape(3, 3, 3, 700 + 512, 5, 128, 256)
    expected = cases.exact(cases.Arguments(logits, *at), 5).values
    call = lambda: jax.jit(partial(tpu._parts, shape, None))(logits, scales).values
    assert faults_found(call, expected)


def test_a_missing_wait_is_found_in_the_gpu_kernel(monkeypatch):
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    with (
        pytest.raises((RaceError, AssertionError, jax.errors.JaxRuntimeError)),
        compilers.interpreted_on_gpu(),
    ):
        run(portable, cases.SMALL[0])
