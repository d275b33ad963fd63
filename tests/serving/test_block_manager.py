"""The block manager, the prefix cache, and the order in which requests are served."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.control.entropy_drop import PRIOR, new_predictor, predicted_drop
from entropic_jax.control.scheduling import Scheduling, default_load
from entropic_jax.serving.engine.block_manager import BlockManager
from entropic_jax.serving.engine.prefix_cache import ROOT_HASH, PrefixCache, page_hashes, root_hash
from entropic_jax.serving.engine.priority import Ranking
from entropic_jax.serving.engine.sequence import Sequence
from entropic_jax.serving.engine.state_updates import PLACEMENTS, Placement, StateUpdates
from entropic_jax.serving.request import Request

PAGE = 4


def keys(*tokens: int) -> list[bytes]:
    return list(page_hashes(ROOT_HASH, tokens, PAGE))


def state_updates() -> StateUpdates:
    return StateUpdates(rows=4, pages=16, pages_per_row=8, gains=3, vocabulary=10)


def test_keys_stand_for_everything_before_them():
    first, second = keys(1, 2, 3, 4, 5, 6, 7, 8), keys(9, 2, 3, 4, 5, 6, 7, 8)
    assert len(first) == 2 and first[1] != second[1]
    assert keys(1, 2, 3, 4, 5, 6, 7) == first[:1]
    assert list(page_hashes(first[0], (5, 6, 7, 8), PAGE)) == first[1:]


def test_texts_share_pages_only_within_a_context_an_adapter_and_a_salt():
    salts = ["", "a", "a tenant of this server, the first", "a tenant of this server, the other", "\ud800"]
    roots = [root_hash(key, adapter, salt) for key in ((), (1,)) for adapter in (0, 1) for salt in salts]
    assert len(set(roots)) == len(roots)


def test_pages_without_a_user_are_given_up_oldest_and_latest_in_the_text_first():
    known, texts = PrefixCache(), [keys(*range(8)), keys(*range(20, 28))]
    for number, text in enumerate(texts):
        for index, key in enumerate(text):
            assert known.insert(key, 2 * number + index)
            assert not known.insert(key, 9)
    assert known.evict(9) == [] and known.num_evictable == 0
    known.release(texts[0])
    known.release(texts[1])
    assert known.match(texts[0]) == [0, 1]
    known.acquire(texts[0])
    known.release(texts[0])
    assert known.evict(3) == [3, 2, 1]
    assert known.match(texts[0]) == [0] and known.match(texts[1]) == []


def test_nothing_is_kept_of_a_page_that_was_evicted():
    known = PrefixCache()
    for number in range(20):
        text = keys(*range(number, number + 8))
        for index, key in enumerate(text):
            assert known.insert(key, index)
        known.release(text)
        assert len(known.evict(2)) == 2
    assert [value for value in vars(known).values() if isinstance(value, dict) and value] == []


def test_every_page_counts():
    blocks, updates = BlockManager(4, 16, PAGE, PrefixCache()), state_updates()
    assert blocks.reset_prefix_cache(updates) == (0, 0)
    assert BlockManager(1, 4, PAGE, None).reset_prefix_cache(updates) == (0, 0)
    assert blocks.allocate(0, [], 4, 0, updates, spare=2) == [] and blocks.num_free_pages == 13
    rows = np.array([0])
    assert blocks.reserve(rows, np.array([13]), updates) and blocks.num_free_pages == 12  # a single page
    blocks.trim(0, 9)
    assert blocks.num_free_pages == 13
    blocks.trim(0, 16)
    assert blocks.num_free_pages == 13  # nothing is taken back
    blocks.free(0)
    text = keys(*range(12))
    assert blocks.allocate(0, text, 12, 0, updates) == []
    blocks.cache_prefix(0, text, np.array([5, 6, 7]), updates)
    blocks.free(0)
    assert blocks.allocate(1, text, 14, 0, updates) == [5, 6, 7]  # an odd number of pages
    assert (blocks.prefix_cache.queries, blocks.prefix_cache.hits) == (4 + 12 + 14, 12)
    blocks.free(1)
    assert blocks.allocate(2, text, 14, 0, updates, multiple=2) == [5, 6]


def test_what_rows_may_come_to_hold_is_reserved():
    blocks, updates, text = BlockManager(4, 16, PAGE, PrefixCache()), state_updates(), keys(*range(40))
    assert blocks.allocate(0, text, 40, 0, updates) == []
    assert blocks.num_free_pages == 6
    assert blocks.allocate(1, [], 28, 0, updates) is None  # seven pages
    assert blocks.allocate(1, [], 16, 0, updates) == []
    assert not blocks.reserve(np.array([0, 1]), np.array([44, 28]), updates)
    assert blocks.num_free_pages == 2  # nothing was done
    assert blocks.reserve(np.array([0, 1]), np.array([44, 20]), updates) and blocks.num_free_pages == 0
    blocks.cache_prefix(0, text, np.arange(8, 18), updates)
    assert updates.retained_pages == list(range(8, 18)) and blocks.num_free_pages == 0
    blocks.free(1)
    assert blocks.allocate(3, text, 44, 1, updates, multiple=4) == list(range(8, 16))
    blocks.free(3)
    assert blocks.allocate(2, text, 44, 1, updates) == list(range(8, 18))  # shared: one page is new
    blocks.free(0)
    assert blocks.allocate(0, [], 28, 0, updates) is None  # the shared pages have a user still
    blocks.free(2)
    assert blocks.usage == 0 and blocks.num_free_pages == 6
    assert blocks.allocate(0, [], 32, 0, updates) == []
    assert updates.released_pages == [17, 16]  # the end of the text goes first


def test_a_row_that_asks_for_less_keeps_what_it_has_reserved():
    blocks, updates = BlockManager(4, 8, PAGE, None), state_updates()
    assert blocks.reserve(np.array([0, 1]), np.array([4 * PAGE, PAGE]), updates)
    assert blocks.reserve(np.array([0, 1]), np.array([2 * PAGE, 3 * PAGE]), updates)
    assert blocks.reserved.tolist() == [4, 3, 0, 0] and blocks.num_free_pages == 1


def test_whoever_is_placed_leaves_others_a_page_each_to_grow():
    blocks, updates = BlockManager(4, 8, PAGE, None), state_updates()
    assert blocks.allocate(0, [], 2 * PAGE, 0, updates) == []
    assert blocks.allocate(1, [], 4 * PAGE, 3, updates) is None  # six are free, and three others may want one
    assert blocks.num_free_pages == 6  # nothing was done
    assert blocks.allocate(1, [], 4 * PAGE, 2, updates) == []
    assert (
        blocks.reserve(np.array([0, 1]), np.array([3 * PAGE, 5 * PAGE]), updates)
        and blocks.num_free_pages == 0
    )


def test_a_refusal_keeps_no_page_and_growth_evicts_what_it_needs():
    blocks, updates, text = BlockManager(4, 8, PAGE, PrefixCache()), state_updates(), keys(*range(16))
    assert blocks.allocate(0, text, 16, 0, updates) == []
    blocks.cache_prefix(0, text, np.arange(4), updates)
    blocks.free(0)
    assert blocks.allocate(1, text, 40, 0, updates) is None
    assert blocks.prefix_cache.num_evictable == 4  # the refused sequence uses none of them
    assert blocks.allocate(2, text[:2], 8, 0, updates) == [0, 1]
    assert blocks.num_free_pages == 4  # shared pages count once
    assert blocks.reserve(np.array([2]), np.array([7 * PAGE]), updates) is True
    assert blocks.num_free_pages == 0 and updates.released_pages == [3]
    assert blocks.reserve(np.array([2]), np.array([9 * PAGE]), updates) is False
    blocks.free(2)
    assert blocks.usage == 0 and not blocks.reserved.any() and not blocks.cached.any()


def test_a_row_offers_each_page_once_and_gives_its_pages_back_once():
    blocks, updates, text = BlockManager(4, 8, PAGE, PrefixCache()), state_updates(), keys(*range(8))
    for row, pages in enumerate(([0, 1], [2, 3])):
        assert blocks.allocate(row, [], 8, 0, updates) == []
        blocks.cache_prefix(row, text, np.array(pages), updates)
    assert updates.retained_pages == [0, 1]  # the second row holds the same text
    blocks.free(0)
    blocks.free(0)
    assert blocks.allocate(2, text, 9, 0, updates) == [0, 1]
    blocks.free(2)
    assert blocks.prefix_cache.num_evictable == 2
    assert blocks.reset_prefix_cache(updates) == (2, 0) and sorted(updates.released_pages) == [0, 1]
    blocks.cache_prefix(1, text, np.array([2, 3]), updates)
    assert updates.retained_pages == [0, 1] and blocks.num_free_pages == 6
    blocks.shrink(1, 1)
    assert blocks.num_free_pages == 7


def test_updates_keep_pages_before_rows_end_and_end_rows_before_others_are_placed():
    updates = state_updates()
    updates.retained_pages += range(700)
    updates.freed_rows.append(2)
    request = Request(prompt="", logit_bias={3: 1.5}, top_k=7)
    for row in range(PLACEMENTS + 1):
        penalised = ((1, 2), [5, 5]) if row == 1 else None
        updates.placements.append(Placement(row, request, 9, 99, (0,), [4], True, np.ones(3), penalised))
    taken = list(updates.batches())
    assert not updates
    assert [t.freed_rows.any() for t in taken] == [False, True, False]
    assert [int((t.retained_pages < 16).any()) for t in taken] == [1, 0, 0]
    placed = [t.int_params[t.int_params[:, 0] < PLACEMENTS + 1, 0].tolist() for t in taken]
    assert [row for rows in placed for row in rows if row != 4][:1] == [0]
    assert (
        taken[-1].prompt_history is not None
        and taken[-1].generated_history[0].tolist() == [0] * 5 + [2] + [0] * 4
    )
    assert taken[1].bias_tokens[0, 0] == 3 and taken[1].bias_values[0, 0] == 1.5


def waiting(left: int, arrival: int, priority: int = 0, slack: float = 1.0):
    sequence = SimpleNamespace(
        remaining_work=left,
        max_length=left,
        row=-1,
        arrival_time=arrival,
        since=0.0,
        engine_request=SimpleNamespace(priority=priority),
    )
    sequence.slack = lambda timestamp: slack
    sequence.rounds_waited = lambda rounds: rounds - sequence.since
    return sequence


def test_the_short_the_urgent_and_the_important_go_first():
    ranking, drops = Ranking("entropic", PRIOR), np.zeros(1)
    long, short = waiting(900, 0), waiting(20, 1)
    hasty, important = waiting(900, 2, slack=0.0), waiting(900, 3, priority=-1)
    assert ranking.rank([long, short, hasty, important], 0.0, drops) == [important, short, hasty, long]
    assert Ranking("fcfs", PRIOR).rank([hasty, short, long], 0.0, drops) == [long, short, hasty]


def test_the_host_ranks_by_the_priority_of_the_device():
    ranking, rounds, drops = Ranking("entropic", PRIOR), 50.0, np.array([0.3, 9.0])
    sequences = [waiting(900, 0), waiting(20, 1, slack=0.25), waiting(300, 2), waiting(500, 3, slack=0.0)]
    sequences[2].since, sequences[3].since, sequences[3].row = 20.0, 50.0, 1
    prior = float(predicted_drop(new_predictor(1), PRIOR)[0])
    cost = np.array([900, 20, 300, 500]) / 900
    slack, wait = np.array([1.0, 0.25, 1.0, 0.0]), np.array([50.0, 50.0, 30.0, 0.0])
    drop = np.array([prior, prior, prior, 9.0])
    written_out = (
        np.clip(drop / np.maximum(0.5 * cost + 0.25 * cost + 0.25 * slack, 0.05), 0, 4) + 0.05 * wait
    )
    load = default_load(4)._replace(
        cost=jnp.float32(cost), memory=jnp.float32(cost), slack=jnp.float32(slack)
    )
    device = Scheduling(width=1).priority(jnp.float32(drop), load, jnp.float32(wait))
    np.testing.assert_allclose(ranking.priorities(sequences, rounds, drops), written_out, rtol=1e-12)
    np.testing.assert_allclose(device, written_out, rtol=1e-6)


def test_a_prompt_counts_for_less_than_what_is_to_be_generated():
    sequence = SimpleNamespace(prompt=[0] * 8, generated=[], request=SimpleNamespace(max_tokens=5))
    left, most = Sequence.remaining_work.fget, Sequence.max_length.fget
    assert (left(sequence), most(sequence)) == (7, 13)
    sequence.generated = [1, 2]
    assert (left(sequence), most(sequence)) == (3, 13)


def test_no_one_starves_while_short_requests_keep_coming():
    ranking, drops = Ranking("entropic", PRIOR), np.zeros(1)
    queue = [waiting(2000, 0)]
    longest, crowd = queue[0], 6
    bound = ranking.law.bound / ranking.law.ageing + crowd
    for step in range(1000):  # one row: each admission is a round
        while len(queue) < crowd:
            queue.append(waiting(1, step + 1))
            queue[-1].since = float(step)
        queue = ranking.rank(queue, float(step), drops)
        if queue.pop(0) is longest:
            break
    assert 10 < step <= bound


@pytest.mark.parametrize("policy", ["entropic", "fcfs"])
def test_a_stated_priority_starves_no_one(policy):
    ranking, drops, patient = Ranking(policy, PRIOR), np.zeros(1), waiting(10, 0, priority=2)
    for step in range(1000):
        hasty = waiting(1, step + 1, priority=0)
        hasty.since = float(step)
        if ranking.rank([hasty, patient], float(step), drops)[0] is patient:
            break
    assert step == pytest.approx(2 * ranking.law.bound / ranking.law.ageing, abs=1)


@pytest.mark.parametrize("policy", ["entropic", "fcfs"])
def test_nothing_to_rank(policy):
    assert Ranking(policy, PRIOR).rank([], 0.0, np.zeros(1)) == []
