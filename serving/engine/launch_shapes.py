"""Launch shapes: the batch buckets of decode programs, and the shapes of prefill chunks."""


def widths(rows: int) -> tuple[int, ...]:
    """Batch buckets: the widths that decode programs are compiled for, ascending.

    >>> widths(8), widths(64)
    ((1, 4, 8), (1, 4, 16, 32, 64))
    """
    return tuple(sorted({*_steps_up(1, rows), *((rows // 2,) if rows >= 32 else ())}))


def chunk_shapes(chunk: int, budget: int) -> tuple[tuple[int, int], ...]:
    """Shapes (prompts, tokens) of prefill: 16 tokens to `chunk`, one prompt or as many as fit `budget`.

    >>> chunk_shapes(128, 512)
    ((1, 16), (1, 32), (1, 64), (1, 128), (4, 128), (8, 64), (16, 16), (16, 32))
    """
    lengths = _steps_up(min(16, chunk), chunk, 2)
    many = {(max(1, min(16, budget // length)), length) for length in lengths}
    return tuple(sorted({(1, length) for length in lengths} | many))


def _steps_up(low: int, high: int, factor: int = 4) -> tuple[int, ...]:
    """`low`, `factor` times that, and so on, up to and including `high`.

    >>> _steps_up(1, 48)
    (1, 4, 16, 48)
    """
    steps = []
    while low < high:
        steps.append(low)
        low *= factor
    return (*steps, high)
