"""The least weight that has to be kept, found by the bits of the weights instead of by bisection.

Floats above 0 are ordered as their bits are. So the weights are counted by their leading bits, the bin in
which enough is reached is counted by the bits that follow, and so on: one pass over all of them and a few
over what shares a bin with the least one that is needed.
"""

from typing import Any

import numpy as np

BINS = 256
NONE, ALL = np.float32(np.inf), np.float32(-1)


def thresholds(least: float) -> Any:
    """`threshold(weight, need, number, left, mass, count)`: the greatest floor that keeps enough.

    That is the greatest w among the weights of at least `least` with Σ weight[weight ≥ w] ≥ need and `number`
    of them, or as many as there are; NONE where nothing has to be kept, ALL where there is not enough, or
    NaN. Memory to work in: left float32 as long as weight, mass float32 and count int32 `[BINS]`.
    """
    from numba import njit

    base, smallest = int(np.float32(least).view(np.int32)), np.float32(least)
    reach = int(np.float32(2).view(np.int32)) - base
    wide = BINS.bit_length() - 1
    shifts = np.array([max(0, shift) for shift in range(reach.bit_length() - wide, -wide, -wide)])
    zero = np.float32(0)

    @njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, error_model="numpy")
    def threshold(weight, need, number, left, mass, count):
        if need <= zero and number <= 0:
            return NONE
        size, total = 0, zero
        for b in range(weight.shape[0]):
            left[size] = weight[b]
            size += np.int64(weight[b] >= smallest)
        for b in range(size):
            total += left[b]
        if not total >= need or size == 0:
            return ALL
        number = min(number, size)
        code = left.view(np.int32)
        above, more, found = zero, 0, 0
        for shift in shifts:
            mass[:], count[:] = zero, 0
            lowest, highest = BINS, 0
            for i in range(size):
                place = ((code[i] - base) >> shift) & (BINS - 1)
                mass[place] += left[i]
                count[place] += 1
                lowest, highest = min(lowest, place), max(highest, place)
            place = highest
            while place > lowest and not (above + mass[place] >= need and more + count[place] >= number):
                above += mass[place]
                more += count[place]
                place -= 1
            found |= place << shift
            kept = 0
            for i in range(size):
                left[kept] = left[i]
                kept += np.int64((code[i] - base) >> shift == found >> shift)
            size = kept
        return left[0]

    return threshold
