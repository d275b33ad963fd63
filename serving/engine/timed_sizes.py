"""Timed sizes: which passes of an engine are timed, so that its draft-length law knows what they cost."""

from typing import NamedTuple

LONGEST_TIMED = 4096  # positions of the context at which passes of one row are timed
BATCH_BYTES = (
    256 << 20
)  # keys and values of a timed batch: more than the processor's caches keep for a process
MOST_ROWS = 8  # of a timed batch


class TimedSizes(NamedTuple):
    """The sizes that `measure_pass_costs` takes."""

    most_tokens: int  # of a pass
    context: int  # cached positions of a single row
    batch: tuple[int, int] | None  # rows, and cached positions of each; None times no batch


def timed_sizes(rows: int, most_tokens: int, context: int, position_bytes: int) -> TimedSizes:
    """The sizes of an engine.

    Args:
        rows: the number of rows of a pass, at most.
        most_tokens: the number of tokens of a pass, at most.
        context: positions that a row of the engine has.
        position_bytes: bytes of the keys and values of a position.

    >>> timed_sizes(32, 128, 8192, 6144), timed_sizes(1, 16, 2048, 6144).batch
    (TimedSizes(most_tokens=128, context=4096, batch=(8, 5462)), None)
    """
    single, rows = min(context, LONGEST_TIMED), min(rows, MOST_ROWS)
    length = min(context, -(-BATCH_BYTES // (position_bytes * rows)))
    # One row may be too large for the caches already, and all rows together may fit into them.
    apart = rows * length > 2 * single and rows * length * position_bytes >= BATCH_BYTES // 4
    return TimedSizes(most_tokens, single, (rows, length) if apart else None)
