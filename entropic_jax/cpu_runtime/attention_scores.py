"""Vector kernel of the scores of attention: dot products of query heads and the keys of a page.

A block of 16 keys is read in fours: a vector holds four elements of each of four keys. The first batch of
query heads multiplies them as it loads them, and keeps them in scratch memory for the other batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from .control_flow import loop
from .head_batches import HeadBatches, Prefetcher, batch_sizes
from .instructions import (
    ITEMSIZE,
    LANES,
    WORD,
    broadcast_four,
    constant,
    intrinsic_of,
    load,
    load_fours,
    load_widened,
    multiply_add,
    store,
    sum_lanes_of_fours,
    transpose_fours,
)
from .pairs import add_dot

CHUNK = 4  # elements of a key, or of a query head, that stand together in a vector of four keys
QUADS = LANES // CHUNK  # vectors of four keys in a block of keys
HEADS = 4  # query heads whose scores of a block of keys fill the accumulators
NARROW_SUMS = 4  # vectors of sums that leave registers for their operands, where those are not of AVX-512


def padded(page_size: int) -> int:
    """Floats from the scores of a query head to those of the next: `page_size`, in full vectors."""
    return -(-page_size // LANES) * LANES


@cache
def scores(group: int, head_dim: int, page_size: int, dtype: str, wide: bool, rounded: bool = False) -> Any:
    """`scores(keys, query, out, block, heads, begin, end, next_tile)`: dot products of queries and keys.

        out[h, t] = query[h] · keys[t],   begin ≤ t < end

    Rows of `out` have `padded(page_size)` floats; those of the vectors around begin and end are written too,
    and hold nothing of use outside of the range. Sums run over fours of elements in ascending order, and
    then over the four lanes of a key.

    Args:
        group: the number of heads is a multiple of it.
        head_dim: a multiple of `LANES`.
        page_size: keys of a tile.
        dtype: of the keys. The tile at the address `next_tile` is prefetched on the way. `block` is scratch
            for `LANES · head_dim` floats.
        wide: whether registers are those of AVX-512. If not, a batch of heads is multiplied by some of the
            vectors of a block of keys at a time, so that its sums stay in registers.
        rounded: whether keys and query are of bfloat16, and multiplied in pairs (see `pairs`): an element is
            a pair of two then, and head_dim a multiple of 2 · `LANES`.
    """
    if rounded:
        head_dim, dtype = head_dim // 2, "float32"

    def emit(builder, values):
        keys, query, out, block, heads, begin, end, next_tile = values
        batches = HeadBatches(builder, batch_sizes(HEADS, group))
        steps = builder.mul(batches.count(heads), WORD(head_dim // LANES))
        prefetcher = Prefetcher(builder, LANES * head_dim * ITEMSIZE[dtype], steps)
        addresses = _Addresses(keys, query, out, block, next_tile)
        code = _Scores(builder, addresses, batches, prefetcher, head_dim, page_size, dtype, wide, rounded)

        def block_of_keys(t, _):
            first = batches.emit_first(heads, lambda h, size: code.batch(t, h, size, code.fours_of_page))
            batches.emit(first, heads, lambda h, size: code.batch(t, h, size, code.fours_of_block))
            return []

        loop(builder, builder.and_(begin, WORD(-LANES)), end, LANES, [], block_of_keys)

    return intrinsic_of(8, emit)


class _Addresses(NamedTuple):
    """The addresses that `scores` reads and writes; each is a value of the code that is emitted."""

    keys: Any
    query: Any
    out: Any
    block: Any
    next_tile: Any


@dataclass(frozen=True)
class _Scores:
    """Emits the parts of `scores`: a batch of heads, its products with a part of the keys, and its loads."""

    builder: Any
    addresses: _Addresses
    batches: HeadBatches
    prefetcher: Prefetcher
    head_dim: int
    page_size: int
    dtype: str
    wide: bool
    rounded: bool

    def batch(self, t: Any, h: Any, size: int, fours_of: Callable) -> None:
        """Store the scores of `size` heads from `h` and the block of keys from `t`."""
        # A batch that reads the scratch would keep the query of several vectors in registers.
        narrow = max(1, NARROW_SUMS // max(2, size)) if fours_of == self.fours_of_page else 1
        at_once = QUADS if self.wide else narrow
        sums_of_quad = {}
        for first in range(0, QUADS, at_once):
            quads = range(first, first + at_once)

            def add_part(part, sums, quads=quads):
                if quads.start == 0:
                    self.prefetch_step(t, h, part)
                return self.add_products(sums, t, h, size, part, quads, fours_of)

            start = [constant(0)] * (size * at_once)
            sums = loop(self.builder, WORD(0), WORD(self.head_dim), LANES, start, add_part)
            for i, value in enumerate(sums):
                sums_of_quad[i // at_once, quads[i % at_once]] = value
        self.store_sums(sums_of_quad, t, h, size)

    def prefetch_step(self, t: Any, h: Any, part: Any) -> None:
        """Prefetch the share of a batch of heads and a part of the keys, in the next tile's block."""
        builder = self.builder
        number = builder.mul(self.batches.number(h), WORD(self.head_dim // LANES))
        next_block = builder.mul(t, WORD(self.head_dim * ITEMSIZE[self.dtype]))
        step = builder.add(number, builder.udiv(part, WORD(LANES)))
        self.prefetcher.take_step(builder.add(self.addresses.next_tile, next_block), step)

    def add_products(
        self, sums: list[Any], t: Any, h: Any, size: int, part: Any, quads: range, fours_of: Callable
    ) -> list[Any]:
        """The sums of heads and quads, with the products of one part of the keys added."""
        builder, sums = self.builder, list(sums)
        add = add_dot if self.rounded else multiply_add

        def query_of(g, m):
            offset = builder.add(builder.mul(builder.add(h, WORD(g)), WORD(self.head_dim)), part)
            return broadcast_four(builder, self.addresses.query, builder.add(offset, WORD(CHUNK * m)))

        factors = {(g, m): query_of(g, m) for g in range(size) for m in range(CHUNK)} if self.wide else {}
        for number_of_quad, quad in enumerate(quads):
            four_of = fours_of(t, part, quad)
            for m in range(CHUNK):
                four = four_of(m)
                for g in range(size):
                    i = g * len(quads) + number_of_quad
                    factor = factors[g, m] if self.wide else query_of(g, m)
                    sums[i] = add(builder, four, factor, sums[i])
        return sums

    def store_sums(self, sums_of_quad: dict[tuple[int, int], Any], t: Any, h: Any, size: int) -> None:
        """Add the four lanes of each key, and store the scores of the batch."""
        builder, stride = self.builder, WORD(padded(self.page_size))
        for g in range(size):
            target = builder.add(builder.mul(builder.add(h, WORD(g)), stride), t)
            sums = [sums_of_quad[g, quad] for quad in range(QUADS)]
            store(builder, sum_lanes_of_fours(builder, sums), self.addresses.out, target)

    def fours_of_page(self, t: Any, part: Any, quad: int) -> Callable[[int], Any]:
        """Elements 0-3, 4-7, 8-11 and 12-15 of a part of four keys; they are kept in the scratch."""
        builder, offsets = self.builder, []
        for i in range(CHUNK):
            row = builder.mul(self.row_of_page(t, quad + QUADS * i), WORD(self.head_dim))
            offsets.append(builder.add(row, part))

        def load_one(m):
            four = load_fours(builder, self.addresses.keys, offsets, CHUNK * m, self.dtype)
            store(builder, four, self.addresses.block, self.block_offset(part, m, quad))
            return four

        if not self.wide:  # one at a time
            return load_one
        elements = [load_widened(builder, self.addresses.keys, offset, self.dtype) for offset in offsets]
        fours = transpose_fours(builder, elements)
        for m, value in enumerate(fours):
            store(builder, value, self.addresses.block, self.block_offset(part, m, quad))
        return fours.__getitem__

    def fours_of_block(self, t: Any, part: Any, quad: int) -> Callable[[int], Any]:
        """The groups of four keys that `fours_of_page` has stored in the scratch."""
        load_one = lambda m: load(self.builder, self.addresses.block, self.block_offset(part, m, quad))
        return [load_one(m) for m in range(CHUNK)].__getitem__ if self.wide else load_one

    def row_of_page(self, first: Any, number: int) -> Any:
        """The row `number` of a block, or the last of the page if the page ends before."""
        builder, row = self.builder, self.builder.add(first, WORD(number))
        if self.page_size % LANES == 0:
            return row
        last = WORD(self.page_size - 1)
        return builder.select(builder.icmp_signed("<", row, last), row, last)

    def block_offset(self, part: Any, chunk: int, quad: int) -> Any:
        """Where the scratch holds a chunk of four keys; `LANES` elements take as many vectors."""
        place = WORD((chunk * QUADS + quad) * LANES)
        return self.builder.add(self.builder.mul(part, WORD(LANES)), place)
