"""The page allocator under a state machine: no page is lost, and none has two owners."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from entropic_jax.attention import attend
from entropic_jax.state import cache
from entropic_jax.state.cache import ModelShape

SHAPE = ModelShape(layers=1, heads=2, kv_heads=1, head_dim=2, vocabulary=8, hidden=4)
ROWS, PER_ROW, PAGE = 4, 6, 4
POOL = ROWS * PER_ROW
grant, release_rows, share_pages, fork, retain, release, rewind = map(
    jax.jit,
    (
        cache.grant,
        cache.release_rows,
        cache.share_pages,
        cache.fork,
        cache.retain,
        cache.release,
        cache.rewind,
    ),
)
rows = st.integers(0, ROWS - 1)
lengths = st.integers(0, PER_ROW * PAGE)


def ints(*values):
    return jnp.array(values, jnp.int32)


class BlockTables(RuleBasedStateMachine):
    """Rows that grow, end, share and fork, and pages kept by the host, against a model in Python."""

    @initialize(pages=st.integers(1, POOL))
    def make(self, pages):
        assert cache.allocate(SHAPE, ROWS, PER_ROW * PAGE, pages=pages, page_size=PAGE).available == pages
        # One program for every size of pool: the largest, of which the host keeps some.
        full = cache.allocate(SHAPE, ROWS, PER_ROW * PAGE, pages=POOL, page_size=PAGE)
        self.host = list(range(pages, POOL))
        self.hidden = len(self.host)
        self.cache = retain(full, ints(*self.host, *[POOL] * (POOL - self.hidden)))
        self.cache = self.cache._replace(available=jnp.int32(pages))
        self.length = np.zeros(ROWS, int)

    def pages(self, row):
        return np.asarray(self.cache.table)[row, : int(self.cache.granted[row])].tolist()

    @rule(ask=st.lists(lengths, min_size=ROWS, max_size=ROWS))
    def grow(self, ask):
        before = self.cache
        self.cache, enough = grant(before, ints(*ask))
        left = int(before.available)
        for row, length in enumerate(ask):  # the same rule, said in Python
            missing = max(-(-length // PAGE) - int(before.granted[row]), 0)
            assert bool(enough[row]) == (missing <= left)
            left -= missing if missing <= left else 0
            if enough[row]:
                self.length[row] = max(self.length[row], length)
        assert int(self.cache.available) == left

    @rule(flags=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
    def end(self, flags):
        self.cache = release_rows(self.cache, jnp.array(flags))
        self.length[flags] = 0

    @rule(row=rows, count=st.integers(0, PER_ROW))
    def keep(self, row, count):
        kept = self.pages(row)[:count]
        self.cache = retain(self.cache, ints(*kept, *[POOL] * (PER_ROW - len(kept))))
        self.host += kept

    @rule(count=st.integers(0, PER_ROW), data=st.data())
    def forget(self, count, data):
        positions = [
            self.host.pop(data.draw(st.integers(self.hidden, len(self.host) - 1)))
            for _ in range(min(count, len(self.host) - self.hidden))
        ]
        self.cache = release(self.cache, ints(*positions, *[POOL] * (PER_ROW - len(positions))))

    @rule(order=st.permutations(range(ROWS)), count=st.integers(0, PER_ROW))
    def adopt(self, order, count):
        """Two rows adopt the same pages of the host; the third index is out of range."""
        kept = list(dict.fromkeys(self.host[self.hidden :]))[:count]
        first, second = order[:2]
        self.end([row in (first, second) for row in range(ROWS)])
        ids = kept + [POOL] * (PER_ROW - len(kept))
        counts = ints(*[len(kept)] * 3)
        self.cache = share_pages(self.cache, ints(first, second, ROWS), ints(ids, ids, ids), counts)
        assert self.pages(first) == self.pages(second) == kept
        self.length[[first, second]] = len(kept) * PAGE

    @rule(order=st.permutations(range(ROWS)), positions=st.integers(0, PAGE * PER_ROW))
    def branch(self, order, positions):
        """Two rows continue a third from the same position."""
        source, first, second, _ = order
        self.end([row in (first, second) for row in range(ROWS)])
        length = int(min(positions, self.length[source]))
        left, partial = int(self.cache.available), length % PAGE > 0
        self.cache, enough = fork(
            self.cache, ints(source, source, source), ints(first, second, ROWS), ints(*[length] * 3)
        )
        for number, row in enumerate((first, second)):
            assert bool(enough[number]) == (not partial or left > number)
            self.length[row] = length if enough[number] else 0
            full = self.length[row] // PAGE
            assert self.pages(row)[:full] == self.pages(source)[:full]
            assert len(self.pages(row)) == -(-self.length[row] // PAGE)

    @rule(row=rows, share=st.floats(0, 1))
    def take_back(self, row, share):
        length = int(share * self.length[row])
        self.cache = rewind(self.cache, jnp.arange(ROWS) == row, ints(*[length] * ROWS))
        self.length[row] = length
        assert len(self.pages(row)) == -(-length // PAGE)

    @invariant()
    def consistent(self):
        if not hasattr(self, "cache"):
            return
        cache.check(self.cache, self.host)
        assert (np.asarray(self.cache.granted) * PAGE >= self.length).all()


TestPages = BlockTables.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=14, deadline=None)


def filled(rows=3):
    """A pool in which every element of a layer is the number of its page, and row 0 holds 10 positions."""
    pool = cache.allocate(SHAPE, rows, 16, page_size=4, surprisal=True)
    number = jnp.arange(pool.pages + 1, dtype=jnp.float32)
    layers = jax.tree.map(lambda x: jnp.zeros_like(x) + number.reshape(-1, *[1] * (x.ndim - 1)), pool.layers)
    pool, _ = cache.grant(pool._replace(layers=layers, surprisal=number), ints(10, 0, 0))
    return pool


def test_a_fork_copies_the_page_that_is_not_full_and_its_summaries():
    pool = filled()
    forked, enough = fork(pool, ints(0, 0), ints(2, 3), ints(10, 10))
    assert enough.tolist() == [True, True]
    source, target = np.asarray(forked.table)[[0, 2], :3]
    assert source[:2].tolist() == target[:2].tolist() and source[2] != target[2]
    for before, after in zip(
        jax.tree.leaves((pool.layers, pool.surprisal)),
        jax.tree.leaves((forked.layers, forked.surprisal)),
        strict=True,
    ):
        assert (np.asarray(after)[target[2]] == source[2]).all()
        others = [p for p in range(pool.pages) if p != target[2]]
        np.testing.assert_array_equal(np.asarray(after)[others], np.asarray(before)[others])


@pytest.mark.parametrize("program", ["fork", "release", "share_pages", "grant"])
def test_pages_change_hands_without_a_copy_of_the_pool(program):
    pool = filled()
    calls = {
        "fork": (cache.fork, (ints(0), ints(1), ints(10))),
        "release": (cache.release_rows, (jnp.array([True, False, False]),)),
        "share_pages": (cache.share_pages, (ints(1), pool.table[:1], ints(2))),
        "grant": (cache.grant, (ints(10, 4, 9),)),
    }
    function, arguments = calls[program]
    text = jax.jit(function, donate_argnums=0).lower(pool, *arguments).compile().as_text()
    shape = f"f32[{','.join(map(str, pool.layers[0].keys.shape))}]"
    assert shape in text
    copies = [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]
    assert not copies, copies


def test_check_finds_what_is_wrong():
    pool = cache.allocate(SHAPE, 2, 16, page_size=4)
    pool, _ = cache.grant(pool, jnp.array([8, 4]))
    cache.check(pool)
    with pytest.raises(AssertionError, match="references are"):
        cache.check(pool._replace(table=pool.table.at[1, 0].set(pool.table[0, 0])))
    with pytest.raises(AssertionError, match="references are"):
        cache.check(pool, retained=[0])
    with pytest.raises(AssertionError, match="lost or owned twice"):
        cache.check(pool._replace(free=pool.free.at[0].set(pool.free[1])))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(rows=1.5), "rows must be an integer of at least 1; got 1.5"),
        (dict(rows=0), "rows must be an integer of at least 1; got 0"),
        (dict(context="9"), "context must be an integer of at least 1; got '9'"),
        (dict(context=0), "context must be an integer of at least 1; got 0"),
        (dict(page_size=0), "page_size must be an integer of at least 1; got 0"),
        (dict(page_size=True), "page_size must be an integer of at least 1; got True"),
        (dict(pages=0), "pages must be an integer of at least 1; got 0"),
    ],
)
def test_sizes_of_a_cache_are_positive_integers(sizes, message):
    with pytest.raises(ValueError, match=message):
        cache.allocate(SHAPE, **{"rows": 1, "context": 32, **sizes})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(pages=2**31), "pages must be at most 2147483646; got 2147483648"),
        (dict(rows=2**40), "rows must be at most 2147483646; got 1099511627776"),
        (dict(rows=2**20, context=2**20, page_size=1), "pages must be at most 2147483646; got 1099511627776"),
        (dict(dtype="int32"), "dtype must be one of float32, .*, int8, float8_e4m3fn; got 'int32'"),
        (dict(dtype=bool), "dtype must be one of float32, .*; got 'bool'"),
        (dict(dtype="int4"), "dtype must be one of float32, .*; got 'int4'"),
        (dict(dtype="complex64"), "dtype must be one of float32, .*; got 'complex64'"),
        (dict(dtype="float8_e5m2"), "dtype must be one of float32, .*; got 'float8_e5m2'"),
        (dict(dtype="x"), "dtype must be one of float32, .*; got 'x'"),
        (dict(dtype=5), "dtype must be one of float32, .*; got 5"),
        (dict(dtype=None), "dtype must be one of float32, .*; got None"),
    ],
)
def test_what_a_cache_cannot_hold_is_refused_by_name(sizes, message):
    with pytest.raises(ValueError, match=message):
        cache.allocate(SHAPE, **{"rows": 1, "context": 32, **sizes})


def test_surprisals_are_added_up_by_page():
    pool, _ = grant(cache.allocate(SHAPE, 2, 16, page_size=4, surprisal=True), ints(11, 3))
    values = np.arange(1, 23, dtype=np.float32).reshape(2, 11)
    begin = ints(0, 0)
    for count in (ints(6, 2), ints(5, 0), ints(0, 1)):  # in several chunks, some without a token
        chunk = np.stack([np.roll(row, -int(n)) for row, n in zip(values, begin, strict=True)])
        pool = cache.note_surprisal(pool, begin, count, jnp.asarray(chunk))
        begin += count
    sums = np.asarray(pool.surprisal)[np.asarray(pool.table)]
    assert sums[0, :3].tolist() == [values[0, i : i + 4].sum() for i in (0, 4, 8)]
    assert sums[1, 0] == values[1, :3].sum()


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, np.float16, jnp.dtype("int8"), "float8_e4m3fn"])
def test_dtypes_of_keys_and_values(dtype):
    assert cache.allocate(SHAPE, 1, 8, dtype=dtype).layers[0].keys.dtype == jnp.dtype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 3, 4, 9])
def test_what_is_taken_back_leaves_the_summaries_of_what_stays(length):
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((2, 11, 1, 2)), jnp.float32) for _ in range(2))

    def written(count: int):
        pool = cache.allocate(SHAPE, 2, 16, page_size=4, moments=True)
        pool, _ = grant(pool, ints(11, 11))
        step = attend.TokenSpan(ints(0, 0), ints(count, 11))
        layer = attend.write(pool.layers[0], pool.table, step, k, v)
        return pool._replace(layers=(layer,))

    back = rewind(written(11), jnp.array([True, False]), ints(length, 0))
    straight = written(length)
    pages = np.asarray(straight.table)
    for name in ("key_min", "key_max", "key_sum", "value_norm", "value_sum", "value_square"):
        actual, want = (np.asarray(getattr(x.layers[0], name)) for x in (back, straight))
        for row, count in ((0, length), (1, 11)):
            kept = pages[row, : -(-count // 4)]
            np.testing.assert_allclose(actual[kept], want[kept], atol=1e-6)
    assert back.granted.tolist() == [-(-length // 4), 3]
    with pytest.raises(ValueError, match="cache must be allocated without surprisals"):
        cache.rewind(cache.allocate(SHAPE, 1, 8, page_size=4, surprisal=True), jnp.array([True]), ints(0))
