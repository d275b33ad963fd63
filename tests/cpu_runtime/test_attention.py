"""The vector kernels of attention: against float64, the bits of a head in any batch, and other processors."""

import numpy as np
import pytest

from entropic_jax import cpu_runtime

pytestmark = pytest.mark.skipif(not cpu_runtime.numba_installed(), reason="Numba is not installed")
PAGE_SIZE, HEAD_DIM = 24, 32  # the last block of keys is not full


def aligned(x) -> np.ndarray:
    """A float32 copy; kernels get the addresses of arrays that stay alive."""
    return np.ascontiguousarray(x, np.float32)


@pytest.fixture(scope="module")
def kernels():
    """Scores, the softmax and the accumulation of a page, called from Python."""
    from numba import njit

    from entropic_jax.cpu_runtime import attention, attention_scores
    from entropic_jax.cpu_runtime.matmul import has_wide_registers

    wide = has_wide_registers()
    emitted_scores = attention_scores.scores(1, HEAD_DIM, PAGE_SIZE, "float32", wide)
    emitted_softmax = attention.softmax(PAGE_SIZE, HEAD_DIM, False, wide)
    emitted_accumulate = attention.accumulate(1, HEAD_DIM, PAGE_SIZE, "float32", wide)

    @njit
    def scores(keys, query, out, block, heads, begin, end):
        emitted_scores(keys, query, out, block, heads, begin, end, keys)

    @njit
    def softmax(scores, top, total, out, begin, end):
        emitted_softmax(scores, top, total, out, begin, end, 0, 0)

    @njit
    def accumulate(weights, values, out, heads, begin, end):
        emitted_accumulate(weights, values, out, heads, begin, end, values)

    return scores, softmax, accumulate


def attend(kernels, query, keys, values, begin, end, top, total, out) -> np.ndarray:
    """Attention of query heads to a page; updates top, total and out, returns the weights."""
    scores, softmax, accumulate = kernels
    heads = len(query)
    weights, block = np.full((heads, 32), np.nan, np.float32), np.empty(16 * HEAD_DIM, np.float32)
    address = lambda x: x.ctypes.data
    scores(address(keys), address(query), address(weights), address(block), heads, begin, end)
    for h in range(heads):
        softmax(*map(address, (weights[h], top[h:], total[h], out[h])), begin, end)
    accumulate(address(weights), address(values), address(out), heads, begin, end)
    return weights


def empty_state(heads: int) -> tuple[np.ndarray, ...]:
    zeros = lambda *shape: np.zeros(shape, np.float32)
    return np.full(heads, -1e30, np.float32), zeros(heads, 16), zeros(heads, HEAD_DIM)


def pages(rng, number: int, spread: float) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = lambda scale: aligned(scale * rng.standard_normal((PAGE_SIZE, HEAD_DIM)))
    return [(draw(spread), draw(1)) for _ in range(number)]


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize(("begin", "end"), [(0, PAGE_SIZE), (0, 16), (3, 21), (17, 18)])
def test_online_softmax_against_float64(kernels, spread, begin, end):
    """Several pages, whose scores rise and fall by more than what an exponential may hold."""
    rng = np.random.default_rng(0)
    query, inside = aligned(rng.standard_normal((7, HEAD_DIM))), slice(begin, end)
    read = pages(rng, 5, spread)
    top, total, out = empty_state(7)
    for keys, values in read:
        for array in (keys, values):
            array[:begin] = array[end:] = np.nan
        weights = attend(kernels, query, keys, values, begin, end, top, total, out)
        assert not weights[:, begin // 16 * 16 : begin].any()
        assert not weights[:, end : -(-end // 16) * 16].any()
    keys, values = (np.concatenate([page[i][inside] for page in read]).astype(float) for i in (0, 1))
    score = query.astype(float) @ keys.T
    weight = np.exp(score - score.max(-1, keepdims=True))
    mass = total.astype(float).sum(-1)
    np.testing.assert_allclose(
        out / mass[:, None], weight / weight.sum(-1, keepdims=True) @ values, atol=2e-5
    )
    expected = score.max(-1) + np.log(weight.sum(-1))
    np.testing.assert_allclose(top + np.log(mass), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("position", [0, 15, 16, PAGE_SIZE - 1])
def test_the_largest_score_is_that_of_any_key(kernels, position):
    """One score is so large that its exponential would overflow, and that no other key has a weight."""
    query, keys = aligned(np.eye(1, HEAD_DIM)), aligned(np.zeros((PAGE_SIZE, HEAD_DIM)))
    ((_, values),) = pages(np.random.default_rng(3), 1, 1.0)
    keys[position, 0] = 200
    top, total, out = empty_state(1)
    attend(kernels, query, keys, values, 0, PAGE_SIZE, top, total, out)
    assert top[0] == 200
    np.testing.assert_allclose(out[0] / total.sum(), values[position], rtol=1e-6)


def test_a_head_has_the_same_bits_in_every_batch(kernels):
    rng = np.random.default_rng(1)
    query, read = aligned(rng.standard_normal((13, HEAD_DIM))), pages(rng, 3, 2.0)

    def states(query):
        state = empty_state(len(query))
        for keys, values in read:
            attend(kernels, query, keys, values, 2, PAGE_SIZE, *state)
        return state

    for heads in (1, 2, 3, 4, 6, 7, 13):
        for together, alone in zip(states(query[:heads]), states(query), strict=True):
            np.testing.assert_array_equal(together, alone[:heads])


def test_nan_of_a_key_reaches_its_own_heads_only(kernels):
    rng = np.random.default_rng(2)
    query, read = aligned(rng.standard_normal((5, HEAD_DIM))), pages(rng, 1, 1.0)
    clean, (keys, values) = empty_state(5), read[0]
    attend(kernels, query, keys, values, 0, PAGE_SIZE, *clean)
    query[3] = np.nan
    top, total, out = empty_state(5)
    attend(kernels, query, keys, values, 0, PAGE_SIZE, top, total, out)
    others = [0, 1, 2, 4]
    np.testing.assert_array_equal(out[others], clean[2][others])
    assert np.isnan(out[3]).all()
    assert np.isnan(total[3]).any()


@pytest.mark.parametrize(
    ("triple", "processor"),
    [("x86_64-unknown-linux-gnu", "haswell"), ("aarch64-unknown-linux-gnu", "cortex-a72")],
)
def test_code_for_narrower_vectors_is_emitted(kernels, triple, processor):
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, opt=2)
    for kernel in kernels:
        (text,) = kernel.inspect_llvm().values()
        module = llvm.parse_assembly(text)
        module.triple, module.data_layout = triple, str(machine.target_data)
        assert len(machine.emit_object(module)) > 1000
