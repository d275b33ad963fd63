"""The allocator under a state machine: no page is lost, none has two owners."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from entropic_jax import cache
from entropic_jax.cache import ModelShape

SHAPE = ModelShape(layers=1, heads=2, kv_heads=1, head_dim=2, vocabulary=8, hidden=4)
ROWS, PER_ROW, PAGE = 4, 6, 4
grant, release = jax.jit(cache.grant), jax.jit(cache.release)


class Pages(RuleBasedStateMachine):
    @initialize(pages=st.integers(1, ROWS * PER_ROW))
    def make(self, pages):
        pool = cache.allocate(SHAPE, ROWS, PER_ROW * PAGE, pages=pages, page_size=PAGE)
        # One compiled program for every size of pool: a pool of the largest size with the rest kept away.
        full = cache.allocate(SHAPE, ROWS, PER_ROW * PAGE, pages=ROWS * PER_ROW, page_size=PAGE)
        assert pool.available == pages
        self.hidden = ROWS * PER_ROW - pages
        self.cache = full._replace(available=jnp.int32(pages))
        self.length = np.zeros(ROWS, int)

    @rule(ask=st.lists(st.integers(0, PER_ROW * PAGE), min_size=ROWS, max_size=ROWS))
    def grow(self, ask):
        before = self.cache
        self.cache, enough = grant(before, jnp.array(ask, jnp.int32))
        left = int(before.available)
        for row, length in enumerate(ask):  # the same rule, said in Python
            missing = max(-(-length // PAGE) - int(before.granted[row]), 0)
            assert bool(enough[row]) == (missing <= left)
            left -= missing if missing <= left else 0
            if enough[row]:
                self.length[row] = max(self.length[row], length)
        assert int(self.cache.available) == left

    @rule(rows=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
    def drop(self, rows):
        self.cache = release(self.cache, jnp.array(rows))
        self.length[rows] = 0

    @invariant()
    def consistent(self):
        if not hasattr(self, "cache"):
            return
        kept = np.arange(ROWS * PER_ROW)[ROWS * PER_ROW - self.hidden :]
        table, granted = np.asarray(self.cache.table), np.asarray(self.cache.granted)
        owned = [int(p) for row, n in zip(table, granted, strict=True) for p in row[:n]]
        free = np.asarray(self.cache.free)[: int(self.cache.available)].tolist()
        assert sorted(owned + free + kept.tolist()) == list(range(ROWS * PER_ROW))
        assert (granted * PAGE >= self.length).all()
        assert (
            np.where(np.arange(PER_ROW) < granted[:, None], -1, table) != ROWS * PER_ROW
        ).sum() == granted.sum()


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


def test_check_finds_a_page_owned_twice():
    pool = cache.allocate(SHAPE, 2, 16, page_size=4)
    pool, _ = cache.grant(pool, jnp.array([8, 4]))
    cache.check(pool)
    with pytest.raises(AssertionError, match="owned twice"):
        cache.check(pool._replace(table=pool.table.at[1, 0].set(pool.table[0, 0])))


@pytest.mark.parametrize("name", ["rows", "context", "page_size", "pages"])
def test_sizes_are_checked(name):
    sizes = {"rows": 1, "context": 8, "page_size": 4, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0; accepted are integers of at least 1"):
        cache.allocate(SHAPE, sizes.pop("rows"), sizes.pop("context"), **sizes)
