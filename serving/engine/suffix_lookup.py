"""Suffix lookup on the host: what followed the longest earlier match of a text's last tokens.

`entropic_jax.speculation.suffix` does the same on the device, for rows whose tokens the host need not check.
"""

from collections.abc import Sequence

import numpy as np

LONGEST = 16  # tokens of a match beyond which a longer one is not preferred


def continuation(text: Sequence[int], most: int) -> tuple[int, list[int]]:
    """The tokens that followed the longest match, the latest of several.

    Args:
        text: token ids.
        most: tokens returned at most. Past the end of the text, its continuation begins again.

    Returns:
        The length of the match, and the tokens after it; 0 and [] without a match.

    >>> continuation([1, 2, 3, 4, 9, 1, 2], 4), continuation([5], 4)
    ((2, [3, 4, 9, 1]), (0, []))
    """
    tokens = np.asarray(text)
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    if not len(ends):
        return 0, []
    length = 1
    while length < LONGEST:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    end = int(ends[-1])
    following = tokens[end + 1 :]
    return length, np.resize(following, most).tolist()
