"""Batches of query heads in the kernels of attention, and prefetches that are spread over their work.

The batches of a kernel cover all query heads. A batch is as large as the accumulators allow, and the sizes
below it cover the rest. What is computed for a head does not depend on the size of its batch.
"""

from collections.abc import Callable
from typing import Any

from .control_flow import loop
from .instructions import CACHE_LINE, WORD, prefetch

LINES_AT_ONCE = 4  # cache lines that are prefetched together


def batch_sizes(largest: int, group: int) -> list[int]:
    """Sizes of batches of query heads, descending, whose multiples add up to any multiple of `group`."""
    sizes = [2**i for i in range(largest.bit_length())][::-1]
    last = next(i for i, size in enumerate(sizes) if group % size == 0)
    return sizes[: last + 1]


class HeadBatches:
    """Emits code for batches of query heads.

    Args:
        builder: The builder of the function.
        sizes: The sizes of batches, from `batch_sizes`.
    """

    def __init__(self, builder: Any, sizes: list[int]) -> None:
        self.builder, self.sizes = builder, sizes

    def emit(self, first: Any, heads: Any, body: Callable) -> None:
        """Emit loops over the batches that cover some heads.

        Args:
            first: The first head.
            heads: The head behind the last.
            body: `body(head, size)` emits what is done for a batch.
        """
        builder = self.builder
        for size in self.sizes:
            end = builder.add(first, builder.and_(builder.sub(heads, first), WORD(-size)))
            loop(builder, first, end, size, [], lambda h, _, size=size: body(h, size) or [])
            first = end

    def emit_first(self, heads: Any, body: Callable) -> Any:
        """Emit `body(0, size)` for the largest batch that fits; its size, or 0 if none does."""
        builder, first = self.builder, WORD(0)
        for size in self.sizes:
            fits = builder.and_(
                builder.icmp_signed("==", first, WORD(0)), builder.icmp_signed(">=", heads, WORD(size))
            )
            with builder.if_then(fits):
                body(WORD(0), size)
            first = builder.select(fits, WORD(size), first)
        return first

    def count(self, heads: Any) -> Any:
        """How many batches cover the heads, if all but the last are of the first size."""
        return self.number(self.builder.add(heads, WORD(self.sizes[0] - 1)))

    def number(self, head: Any) -> Any:
        """The number of the batch of a head, if those before it are of the first size."""
        return self.builder.udiv(head, WORD(self.sizes[0]))


class Prefetcher:
    """Spreads the prefetches of a piece of memory evenly over the steps of a computation.

    Prefetches in quick succession would wait for one another, and the computation for them.
    """

    def __init__(self, builder: Any, size: int, steps: Any) -> None:
        """Divide the memory.

        Args:
            builder: of the function.
            size: of the memory, in bytes.
            steps: of the computation.
        """
        self.builder, self.lines = builder, -(-size // CACHE_LINE)
        rounded_up = builder.add(steps, WORD(self.lines - 1))
        lines_per_step = builder.udiv(rounded_up, steps)
        rounded_up = builder.add(lines_per_step, WORD(LINES_AT_ONCE - 1))
        self.lines_per_step = builder.and_(rounded_up, WORD(-LINES_AT_ONCE))

    def take_step(self, address: Any, step: Any) -> None:
        """Prefetch what falls to a step, of the memory at an address."""
        builder, lines = self.builder, WORD(self.lines)
        begin = builder.mul(step, self.lines_per_step)
        end = builder.add(begin, self.lines_per_step)
        end = builder.select(builder.icmp_signed("<", end, lines), end, lines)

        def prefetch_lines(line, _):
            first = builder.add(address, builder.mul(line, WORD(CACHE_LINE)))
            for i in range(LINES_AT_ONCE):
                prefetch(builder, builder.add(first, WORD(i * CACHE_LINE)))
            return []

        loop(builder, begin, end, LINES_AT_ONCE, [], prefetch_lines)
