"""Loop detection: whether a text repeats itself to its end."""

from collections.abc import Sequence

LONGEST_PERIOD = 40  # tokens of a loop


def loops(text: Sequence[int]) -> bool:
    """Whether a text ends in a loop: a period of up to 40 tokens, three times and for 12 tokens at least.

    >>> loops([1, 2, 3] + [7, 8] * 6), loops([1, 2, 3] + [7, 8] * 3), loops(list(range(99)))
    (True, False, False)
    """
    for period in range(1, LONGEST_PERIOD + 1):
        tail = text[-max(3 * period, 12) :]
        if len(tail) >= max(3 * period, 12) and all(
            a == b for a, b in zip(tail[period:], tail[:-period], strict=True)
        ):
            return True
    return False
