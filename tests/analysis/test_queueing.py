"""The queueing simulation, and what it shows of the scheduling laws."""

import numpy as np
import pytest

from entropic_jax.analysis import queueing
from entropic_jax.analysis.queueing import Entropic, Learned, Predicted, Requests, simulate
from entropic_jax.control.length_prediction import fit_length_model
from tests.marks import sample


def requests(lengths, seed: int = 0, load: float = 1.1, places: int = 4) -> Requests:
    rng, lengths = np.random.default_rng(seed), np.asarray(lengths)
    arrival = np.cumsum(rng.exponential(lengths.mean() / places / load, len(lengths)))
    entropy = rng.gamma(2.0, 1.0, (len(lengths), int(lengths.max()))).astype(np.float32)
    prompts = rng.integers(10, 100, len(lengths))
    return Requests(arrival, lengths, prompts, np.full(len(lengths), 512), entropy)


def heavy(seed: int, count: int = 120) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(2.5, 1.3, count), 1, 300).astype(int)


def length_model(lengths: np.ndarray):
    drawn = requests(lengths)
    features = {"prompt_tokens": drawn.prompt_tokens, "max_tokens": drawn.max_tokens}
    features |= {"recent_length": np.full(len(lengths), lengths.mean())}
    features |= {
        "mean_entropy": np.array([h[:n].mean() for h, n in zip(drawn.entropy, lengths, strict=True)])
    }
    return fit_length_model(features, lengths)


def mean_latency(drawn: Requests, policy, **options) -> float:
    return float(simulate(drawn, 4, policy, **options).latency.mean())


def test_latencies_of_a_queue_that_can_be_counted():
    zeros = np.zeros(3)
    drawn = Requests(zeros, np.array([3, 1, 2]), zeros, np.full(3, 9), np.ones((3, 3), np.float32))
    assert simulate(drawn, 1, queueing.first_come_first_served).latency.tolist() == [3, 4, 6]
    assert simulate(drawn, 1, queueing.oracle).latency.tolist() == [6, 1, 3]
    assert simulate(drawn, 1, queueing.round_robin).latency.tolist() == [6, 2, 5]
    assert simulate(drawn, 3, queueing.round_robin).latency.tolist() == [3, 1, 2]
    late = drawn._replace(arrival=np.array([0.0, 1.0, 1.0]))
    assert simulate(late, 1, queueing.oracle, preemptive=False).latency.tolist() == [3, 3, 5]


@pytest.mark.parametrize("seed", range(3))
def test_on_equal_lengths_the_entropic_law_loses_and_the_predicted_one_does_not(seed):
    drawn = requests(np.full(100, 40), seed)
    base = mean_latency(drawn, queueing.first_come_first_served)
    assert mean_latency(drawn, Entropic()) > 1.2 * base
    for calibrated_on in (np.full(100, 40), heavy(50)):
        assert mean_latency(drawn, Predicted(length_model(calibrated_on))) <= 1.05 * base


def test_on_heavy_tails_shuffled_entropies_do_as_well_and_the_predicted_law_does_better():
    ratios = []
    for seed in range(3):
        drawn = requests(heavy(seed), seed)
        others = np.random.default_rng(seed).permutation(len(drawn.length))
        base = mean_latency(drawn, queueing.first_come_first_served)
        arms = (
            mean_latency(drawn, Entropic()),
            mean_latency(drawn, Entropic(), entropies=drawn.entropy[others]),
            mean_latency(drawn, Predicted(length_model(heavy(50)))),
            mean_latency(drawn, queueing.oracle),
        )
        ratios.append(np.array(arms) / base)
    entropic, shuffled, predicted, oracle = np.mean(ratios, 0)
    assert shuffled == pytest.approx(entropic, abs=0.05)
    assert oracle < predicted < min(entropic, shuffled) and predicted < 0.95


def test_a_longest_wait_is_kept():
    drawn = requests(heavy(1), 1)
    model = length_model(heavy(50))
    free = simulate(drawn, 4, Predicted(model)).longest_wait
    assert simulate(drawn, 4, Predicted(model, longest_wait=40)).longest_wait < free


def test_admission_by_the_stated_cost_does_not_see_entropy():
    drawn = requests(heavy(2), 2)
    drawn = drawn._replace(max_tokens=drawn.length)
    other = drawn.entropy[::-1]
    once = simulate(drawn, 4, Entropic("stated", constant=True), preemptive=False)
    again = simulate(drawn, 4, Entropic("stated", constant=True), preemptive=False, entropies=other)
    assert once.latency.tolist() == again.latency.tolist()
    assert once.latency.mean() < 0.9 * mean_latency(drawn, queueing.first_come_first_served, preemptive=False)


def stated(lengths: np.ndarray, seed: int) -> Requests:
    """Requests whose `max_tokens` is within a factor of their length."""
    factor = np.exp(np.abs(np.random.default_rng(seed).normal(0.7, 1.0, len(lengths))))
    return requests(lengths, seed)._replace(max_tokens=np.ceil(lengths * factor).astype(int))


@pytest.mark.slow
@pytest.mark.parametrize("seed", sample(range(3), 0))
def test_admission_by_learned_lengths_gains_from_stated_limits_and_loses_nothing_without(seed):
    fcfs = lambda drawn: mean_latency(drawn, queueing.first_come_first_served, preemptive=False)
    learned = lambda drawn: mean_latency(drawn, Learned(), preemptive=False)
    informative = stated(heavy(seed, 240), seed)
    assert learned(informative) < 0.8 * fcfs(informative)
    for lengths in (np.full(120, 40), np.random.default_rng(seed).integers(20, 60, 120)):
        light = stated(lengths, seed)
        assert learned(light) <= 1.05 * fcfs(light)
    silent = requests(heavy(seed, 240), seed)
    assert learned(silent) <= 1.05 * fcfs(silent)
    assert learned(informative._replace(entropy=informative.entropy[::-1])) == learned(
        informative
    )  # none is known at admission
