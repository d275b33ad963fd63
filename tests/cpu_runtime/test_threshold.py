"""The threshold of kept weights, against sorting."""

import numpy as np
import pytest

from entropic_jax import cpu_runtime

if not cpu_runtime.numba_installed():
    pytest.skip("Numba is not installed", allow_module_level=True)

from numba import njit

from entropic_jax.cpu_runtime.threshold import BINS, KEEP_ALL, KEEP_NONE, compile_threshold

LEAST = 1e-12
part_of_kernels = compile_threshold(LEAST)
threshold = njit(lambda *arguments: part_of_kernels(*arguments))  # Python can call it


def floor_of(weight: np.ndarray, need: float, number: int = 0) -> np.float32:
    left, mass, count = (
        np.full_like(weight, np.nan),
        np.full(BINS, np.nan, np.float32),
        np.full(BINS, 7, np.int32),
    )
    return threshold(weight, np.float32(need), number, left, mass, count)


def expected(weight: np.ndarray, need: float, number: int) -> float:
    """The weight at which the sum of the largest weights reaches the required one."""
    ordered = np.sort(weight[weight >= np.float32(LEAST)])[::-1].astype(float)
    enough = (np.cumsum(ordered) >= need) & (np.arange(1, len(ordered) + 1) >= min(number, len(ordered)))
    return ordered[np.argmax(enough)]


@pytest.mark.parametrize("power", [0, 1, 8, 40])
@pytest.mark.parametrize("size", [1, 5, 300, 4000])
def test_the_least_weight_is_that_of_sorting(size, power):
    rng = np.random.default_rng(size + power)
    for number in (0, 3, size):
        weight = (rng.random(size) ** power).astype(np.float32)
        weight /= weight.sum()
        weight[rng.random(size) < 0.1] = -1  # taken out of the search
        have = weight[weight >= np.float32(LEAST)].astype(float).sum()
        for share in (0.05, 0.5, 0.9, 0.999):
            floor = floor_of(weight, share * have, number)
            want = expected(weight, share * have, number) if have else KEEP_ALL
            # Sums are of float32: where two weights decide a tie of the sum, either will do.
            kept, target = (float(weight[weight >= x].sum()) for x in (floor, want))
            assert floor == np.float32(want) or abs(kept - target) < 2e-5 * max(have, 1e-30)


def test_weights_that_are_alike_are_kept_together():
    weight = np.full(777, 1 / 777, np.float32)
    assert floor_of(weight, 0.3) == weight[0]
    assert floor_of(np.append(weight, np.float32(0.5)), 0.4) == np.float32(0.5)


def test_nothing_everything_and_nan():
    weight = np.array([0.5, 0.3, 0.2], np.float32)
    assert floor_of(weight, 0.0) == KEEP_NONE
    assert floor_of(weight, -1.0, 2) == np.float32(0.3)
    assert floor_of(weight, 1.5) == KEEP_ALL
    assert floor_of(np.zeros(4, np.float32), 0.1) == KEEP_ALL
    assert floor_of(np.full(4, np.nan, np.float32), 0.1) == KEEP_ALL
    assert floor_of(weight, np.nan) == KEEP_ALL
    assert floor_of(weight, 0.1, 99) == np.float32(0.2)
