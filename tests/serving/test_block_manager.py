"""The host's account of pages, the prefix cache, and the order in which jobs are served."""

from types import SimpleNamespace

import numpy as np
import pytest

from entropic_jax.control.scheduling import PRIOR
from entropic_jax.serving.engine.block_manager import Pages
from entropic_jax.serving.engine.prefix_cache import ROOT, PrefixCache, extend
from entropic_jax.serving.engine.priority import Ranking
from entropic_jax.serving.engine.sequence import Sequence
from entropic_jax.serving.engine.state_updates import PLACES, Edits, Placement
from entropic_jax.serving.request import Request

PAGE = 4


def keys(*tokens: int) -> list[bytes]:
    return list(extend(ROOT, tokens, PAGE))


def edits() -> Edits:
    return Edits(rows=4, pages=16, per_row=8, gains=3, vocabulary=10)


def test_keys_stand_for_everything_before_them():
    first, second = keys(1, 2, 3, 4, 5, 6, 7, 8), keys(9, 2, 3, 4, 5, 6, 7, 8)
    assert len(first) == 2 and first[1] != second[1]
    assert keys(1, 2, 3, 4, 5, 6, 7) == first[:1]
    assert list(extend(first[0], (5, 6, 7, 8), PAGE)) == first[1:]


def test_pages_without_a_user_are_given_up_oldest_and_latest_in_the_text_first():
    known, texts = PrefixCache(), [keys(*range(8)), keys(*range(20, 28))]
    for number, text in enumerate(texts):
        for index, key in enumerate(text):
            assert known.add(key, 2 * number + index)
            assert not known.add(key, 9)
    assert known.give_up(9) == [] and known.idle == 0
    known.leave(texts[0])
    known.leave(texts[1])
    assert known.find(texts[0]) == [0, 1]
    known.use(texts[0])
    known.leave(texts[0])
    assert known.give_up(3) == [3, 2, 1]
    assert known.find(texts[0]) == [0] and known.find(texts[1]) == []


def test_what_rows_may_come_to_hold_is_reserved():
    pages, made, text = Pages(4, 16, PAGE, PrefixCache()), edits(), keys(*range(40))
    assert pages.take(0, text, 40, 0, made) == []
    assert pages.free == 6
    assert pages.take(1, [], 28, 0, made) is None  # seven pages
    assert pages.take(1, [], 16, 0, made) == []
    assert not pages.reserve(np.array([0, 1]), np.array([44, 28]), made)
    assert pages.free == 2  # nothing was done
    assert pages.reserve(np.array([0, 1]), np.array([44, 20]), made) and pages.free == 0
    pages.learn(0, text, np.arange(8, 18), made)
    assert made.retained == list(range(8, 18)) and pages.free == 0
    pages.leave(1)
    assert pages.take(3, text, 44, 1, made, multiple=4) == list(range(8, 16))
    pages.leave(3)
    assert pages.take(2, text, 44, 1, made) == list(range(8, 18))  # shared: one page is new
    pages.leave(0)
    assert pages.take(0, [], 28, 0, made) is None  # the shared pages have a user still
    pages.leave(2)
    assert pages.usage == 0 and pages.free == 6
    assert pages.take(0, [], 32, 0, made) == []
    assert made.dropped == [17, 16]  # the end of the text goes first


def test_whoever_is_placed_leaves_others_a_page_each_to_grow():
    pages, made = Pages(4, 8, PAGE, None), edits()
    assert pages.take(0, [], 2 * PAGE, 0, made) == []
    assert pages.take(1, [], 4 * PAGE, 3, made) is None  # six are free, and three others may want one
    assert pages.free == 6  # nothing was done
    assert pages.take(1, [], 4 * PAGE, 2, made) == []
    assert pages.reserve(np.array([0, 1]), np.array([3 * PAGE, 5 * PAGE]), made) and pages.free == 0


def test_edits_keep_pages_before_rows_end_and_end_rows_before_jobs_are_placed():
    made = edits()
    made.retained += range(700)
    made.ended.append(2)
    request = Request(prompt="", logit_bias={3: 1.5}, top_k=7)
    for row in range(PLACES + 1):
        penalised = ((1, 2), [5, 5]) if row == 1 else None
        made.placed.append(Placement(row, request, 9, 99, (0,), [4], True, np.ones(3), penalised))
    taken = list(made.take())
    assert not made
    assert [t.ended.any() for t in taken] == [False, True, False]
    assert [int((t.retained < 16).any()) for t in taken] == [1, 0, 0]
    placed = [t.integers[t.integers[:, 0] < PLACES + 1, 0].tolist() for t in taken]
    assert [row for rows in placed for row in rows if row != 4][:1] == [0]
    assert taken[-1].prompt is not None and taken[-1].generated[0].tolist() == [0] * 5 + [2] + [0] * 4
    assert taken[1].bias_tokens[0, 0] == 3 and taken[1].bias_values[0, 0] == 1.5


def waiting(left: int, arrival: int, priority: int = 0, slack: float = 1.0):
    sequence = SimpleNamespace(
        left=left, most=left, row=-1, arrival=arrival, since=0.0, job=SimpleNamespace(priority=priority)
    )
    sequence.slack = lambda now: slack
    sequence.waited = lambda rounds: rounds - sequence.since
    return sequence


def test_the_short_the_urgent_and_the_important_go_first():
    ranking, drops = Ranking("entropic", PRIOR), np.zeros(1)
    long, short = waiting(900, 0), waiting(20, 1)
    hasty, important = waiting(900, 2, slack=0.0), waiting(900, 3, priority=-1)
    assert ranking.rank([long, short, hasty, important], 0.0, drops) == [important, short, hasty, long]
    assert Ranking("fcfs", PRIOR).rank([hasty, short, long], 0.0, drops) == [long, short, hasty]


def test_a_prompt_that_is_to_be_read_counts_for_less_than_what_is_to_be_generated():
    job = SimpleNamespace(request=SimpleNamespace(max_tokens=5))
    sequence = SimpleNamespace(prompt=[0] * 8, generated=[], job=job)
    left, most = Sequence.left.fget, Sequence.most.fget
    assert (left(sequence), most(sequence)) == (7, 13)
    sequence.generated = [1, 2]
    assert (left(sequence), most(sequence)) == (3, 13)


def test_no_one_starves_while_short_jobs_keep_coming():
    ranking, drops = Ranking("entropic", PRIOR), np.zeros(1)
    queue = [waiting(2000, 0)]
    longest, crowd = queue[0], 6
    bound = ranking.law.bound / ranking.law.ageing + crowd
    for turn in range(1000):  # one row: each admission is a round
        while len(queue) < crowd:
            queue.append(waiting(1, turn + 1))
            queue[-1].since = float(turn)
        queue = ranking.rank(queue, float(turn), drops)
        if queue.pop(0) is longest:
            break
    assert 10 < turn <= bound


@pytest.mark.parametrize("policy", ["entropic", "fcfs"])
def test_a_stated_priority_starves_no_one(policy):
    ranking, drops, patient = Ranking(policy, PRIOR), np.zeros(1), waiting(10, 0, priority=2)
    for turn in range(1000):
        hasty = waiting(1, turn + 1, priority=0)
        hasty.since = float(turn)
        if ranking.rank([hasty, patient], float(turn), drops)[0] is patient:
            break
    assert turn == pytest.approx(2 * ranking.law.bound / ranking.law.ageing, abs=1)


@pytest.mark.parametrize("policy", ["entropic", "fcfs"])
def test_nothing_to_rank(policy):
    assert Ranking(policy, PRIOR).rank([], 0.0, np.zeros(1)) == []
