"""The scheduling policy `predicted`: least predicted work first, order of arrival where nothing is known."""

from types import SimpleNamespace

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.control.entropy_drop import PRIOR
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.engine.interface import EngineRequest
from entropic_jax.serving.engine.priority import Ranking
from entropic_jax.serving.request import Request

ROUNDS = 80.0  # B/a: a sequence that has waited as long comes first


def sequence(max_tokens: int, arrival: float = 0.0, *, priority: int = 0, waited: float = 0.0):
    return SimpleNamespace(
        prompt=(1,) * 8,
        request=SimpleNamespace(max_tokens=max_tokens),
        remaining_work=float(max_tokens),
        max_length=max_tokens + 8,
        work_done=0.0,
        row=-1,
        ended=False,
        arrival_time=arrival,
        engine_request=SimpleNamespace(priority=priority),
        transcript=SimpleNamespace(finish_reason=None),
        slack=lambda timestamp: 1.0,
        rounds_waited=lambda rounds: waited,
    )


def learned(works, limits, reason: str = "stop", policy: str = "predicted") -> Ranking:
    """A ranking under which sequences of these limits have ended after that work."""
    ranking = Ranking(policy, PRIOR)
    for work, limit in zip(works, limits, strict=True):
        recent = sequence(limit)
        ranking.note_first_row(recent, 0.0, 1)
        recent.work_done, recent.ended, recent.transcript.finish_reason = float(work), True, reason
    return ranking


def limits_in_order(ranking: Ranking, waiting) -> list[int]:
    return [s.request.max_tokens for s in ranking.rank(waiting, 100.0, np.zeros(4))]


LIMITS = np.tile([16, 64, 256, 1024], 10)
WAITING = (300, 20, 900, 70)


def arrivals(*limits: int):
    return [sequence(limit, arrival=float(time)) for time, limit in enumerate(limits)]


def test_least_predicted_work_comes_first():
    assert limits_in_order(learned(LIMITS // 3, LIMITS), arrivals(*WAITING)) == sorted(WAITING)
    # Larger limits with less work: the order is learned, not assumed.
    assert limits_in_order(learned(2000 // LIMITS, LIMITS), arrivals(*WAITING)) == sorted(WAITING)[::-1]


@pytest.mark.parametrize(
    "ranking",
    [
        learned(LIMITS[:31] // 3, LIMITS[:31]),  # too few have ended
        learned(np.full(40, 50), LIMITS),  # equal lengths
        learned(np.random.default_rng(0).permutation(np.arange(40)) + 1, LIMITS),  # limits say nothing
        learned(LIMITS // 3, LIMITS, "abort"),  # none has come to its end
    ],
    ids=["few", "equal", "unrelated", "aborted"],
)
def test_order_of_arrival_where_nothing_is_known(ranking):
    assert limits_in_order(ranking, arrivals(*WAITING)) == list(WAITING)


def test_stated_priority_and_long_waits_go_before_predictions():
    ranking = learned(LIMITS // 3, LIMITS)
    important = sequence(900, priority=-1)
    assert limits_in_order(ranking, [*arrivals(300, 20), important]) == [900, 20, 300]
    waited = [sequence(800, 1.0, waited=ROUNDS), sequence(700, 0.0, waited=ROUNDS)]
    assert limits_in_order(ranking, [*arrivals(300, 20), *waited]) == [700, 800, 20, 300]
    almost = sequence(800, waited=ROUNDS - 1)
    assert limits_in_order(ranking, [*arrivals(300, 20), almost]) == [20, 300, 800]


def test_entropy_is_no_part_of_it():
    ranking = learned(LIMITS // 3, LIMITS)
    for drops in (np.zeros(4), np.array([9.0, 0.0, 3.0, 1.0])):
        assert [s.request.max_tokens for s in ranking.rank(arrivals(*WAITING), 0.0, drops)] == sorted(WAITING)


def test_the_latest_sequences_are_learned_from_and_no_others_are_kept():
    ranking = learned([*(LIMITS // 3)] * 4, [*LIMITS] * 4)
    limits_in_order(ranking, arrivals(*WAITING))
    recent = ranking.work_prediction.recent
    assert len(recent) == 128 and all(entry.sequence is None for entry in recent)


@pytest.mark.slow
def test_an_engine_serves_short_requests_first_after_it_has_learned(directory):
    options = dict(max_num_seqs=1, max_num_batched_tokens=64, block_size=4, max_steps=4, warmup="none")
    engine = LLMEngine(
        models.load(directory, "float32"), EngineOptions(**options, scheduling_policy="predicted")
    )

    def submit(name: str, max_tokens: int):
        request = Request(prompt=(5, 6, 7), max_tokens=max_tokens, ignore_eos=True)
        return engine.submit(EngineRequest(id=name, request=request))

    try:
        for stream in [submit(f"past {i}", (1, 2, 4, 8)[i % 4]) for i in range(32)]:
            list(stream)
        first = submit("first", 24)  # holds the row while the others come
        next(iter(first))
        streams = {limit: submit(f"later {limit}", limit) for limit in (20, 2, 9)}
        waits = {limit: [*stream][-1].summary["queue_time"] for limit, stream in streams.items()}
        assert waits[2] < waits[9] < waits[20]
    finally:
        engine.close()


def test_remaining_work_is_what_max_tokens_allows_before_any_has_ended():
    assert Ranking("fcfs", PRIOR).work_prediction.remaining(arrivals(300, 20)).tolist() == [300, 20]
    assert Ranking("fcfs", PRIOR).work_prediction.remaining([]).tolist() == []


def test_remaining_work_is_the_mean_of_those_that_have_ended_less_the_work_done():
    prediction = learned([40, 60], [100, 100]).work_prediction
    begun = sequence(100)
    begun.work_done, begun.remaining_work = 20.0, 80.0
    older = sequence(100)
    older.work_done, older.remaining_work = 70.0, 30.0
    assert prediction.remaining([sequence(100), begun, older, sequence(8)]).tolist() == [50, 30, 1, 8]


@pytest.mark.parametrize("policy", ["fcfs", "entropic", "predicted"])
def test_remaining_work_is_learned_under_every_policy(policy):
    ranking = learned(LIMITS // 4, LIMITS, policy=policy)
    (short, long), most = ranking.work_prediction.remaining(arrivals(16, 1024)), np.array([16, 1024])
    assert 2 <= short <= 8 and 128 <= long <= 512
    assert np.all(ranking.work_prediction.remaining(arrivals(*most)) <= most)
