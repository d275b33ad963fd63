"""Weight threshold: the largest threshold with enough weight at or above it, by radix selection.

Positive floats are ordered as their bits are. The weights are counted by their leading bits; the bin in which
the required mass is reached is counted by the following bits, and so on. This takes one pass over all weights
and a few over those that share a bin with the threshold.
"""

from typing import Any

import numpy as np

BINS = 256
KEEP_NONE, KEEP_ALL = np.float32(np.inf), np.float32(-1)


def compile_threshold(min_weight: float) -> Any:
    """Compile `threshold(weight, need, number, candidates, mass, count)` with Numba.

    It returns the largest w among the weights of at least `min_weight` for which Σ weight[weight ≥ w] ≥ need
    and at least `number` weights (or all, if there are fewer) are ≥ w. It returns `KEEP_NONE` if nothing has
    to be kept, and `KEEP_ALL` if the weights do not suffice or are NaN.

    Args of the compiled function:
        weight: float32 `[n]`.
        need: float32, the mass to reach.
        number: the number of weights to keep at least.
        candidates: scratch buffer, float32 `[n]`.
        mass: scratch buffer, float32 `[BINS]`.
        count: scratch buffer, int32 `[BINS]`.
    """
    from .numba_compiler import njit

    base, smallest = int(np.float32(min_weight).view(np.int32)), np.float32(min_weight)
    reach = int(np.float32(2).view(np.int32)) - base
    bits_per_pass = BINS.bit_length() - 1
    shifts = np.array(
        [max(0, shift) for shift in range(reach.bit_length() - bits_per_pass, -bits_per_pass, -bits_per_pass)]
    )
    zero = np.float32(0)

    @njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, error_model="numpy")
    def threshold(weight, need, number, candidates, mass, count):
        if need <= zero and number <= 0:
            return KEEP_NONE
        size, total = 0, zero
        for b in range(weight.shape[0]):
            candidates[size] = weight[b]
            size += np.int64(weight[b] >= smallest)
        for b in range(size):
            total += candidates[b]
        if not total >= need or size == 0:
            return KEEP_ALL
        number = min(number, size)
        code = candidates.view(np.int32)
        mass_above, count_above, prefix = zero, 0, 0
        for shift in shifts:
            mass[:], count[:] = zero, 0
            lowest, highest = BINS, 0
            for i in range(size):
                digit = ((code[i] - base) >> shift) & (BINS - 1)
                mass[digit] += candidates[i]
                count[digit] += 1
                lowest, highest = min(lowest, digit), max(highest, digit)
            digit = highest
            while digit > lowest and not (
                mass_above + mass[digit] >= need and count_above + count[digit] >= number
            ):
                mass_above += mass[digit]
                count_above += count[digit]
                digit -= 1
            prefix |= digit << shift
            kept = 0
            for i in range(size):
                candidates[kept] = candidates[i]
                kept += np.int64((code[i] - base) >> shift == prefix >> shift)
            size = kept
        return candidates[0]

    return threshold
