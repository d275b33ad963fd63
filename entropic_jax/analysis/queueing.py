"""Queueing simulation of decoding: more requests than places, one token of each served request per step.

The step time is constant, preemption is free and prompts cost nothing, so a policy is judged by its order
alone. The entropic laws are those of `control.scheduling` and `control.entropy_drop`, step by step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from ..control.entropy_drop import PRIOR, EntropyPredictor, new_predictor, predicted_drop, update_predictor
from ..control.length_prediction import FEWEST_ENDED, LengthModel, fit_recent_lengths, serving_order
from ..control.scheduling import RowLoad, Scheduling

PRIOR_DROP = float(predicted_drop(new_predictor(1), PRIOR)[0])  # E[ΔH⁺] before the first token, nats
RECENT = 128  # latest arrivals from which a prediction learns


class Requests(NamedTuple):
    """Requests in the order of their arrival; each `[requests]` unless stated."""

    arrival: np.ndarray  # steps
    length: np.ndarray  # int, tokens that will be generated
    prompt_tokens: np.ndarray
    max_tokens: np.ndarray  # int, at least `length`: the limit that the client states
    entropy: np.ndarray  # float32 [requests, longest], nats, H₁ at each token


class View(NamedTuple):
    """A policy's view of the requests that have arrived and not ended; each `[runnable]`."""

    rows: np.ndarray  # int, indices of the requests, ascending: the order of arrival
    age: np.ndarray  # int, tokens generated
    wait: np.ndarray  # int, steps since the request was served, or since it came
    prompt_tokens: np.ndarray
    max_tokens: np.ndarray
    mean_entropy: np.ndarray  # of the tokens so far, nats
    drop: np.ndarray  # E[ΔH⁺], nats
    recent: np.ndarray  # int, indices of the latest arrivals, at most `RECENT`, whether ended or not
    recent_age: np.ndarray  # int, their tokens so far
    recent_ended: np.ndarray  # bool, whether they have ended
    recent_entropy: np.ndarray  # their mean entropy so far, nats
    requests: Requests  # what is not known yet is for oracles


Policy = Callable[[View], np.ndarray]
"""Returns the order in which to serve the runnable requests: positions in `View.rows`, the first first."""


class Served(NamedTuple):
    """Measurements of a simulation."""

    latency: np.ndarray  # [requests], steps from arrival to the last token
    longest_wait: int  # steps between two services of a request, at most


def simulate(
    requests: Requests,
    places: int,
    policy: Policy,
    *,
    preemptive: bool = True,
    entropies: np.ndarray | None = None,
) -> Served:
    """Serve requests until all have ended.

    Args:
        requests: in the order of arrival.
        places: requests that generate a token in a step.
        policy: the order in which the runnable requests are served.
        preemptive: whether the order holds at every step, or only where a place becomes free.
        entropies: what the policy sees instead of `Requests.entropy`, for controls.
    """
    count = len(requests.length)
    seen = requests.entropy if entropies is None else entropies
    age, wait = np.zeros(count, int), np.zeros(count, int)
    total = np.zeros(count)
    latency = np.full(count, np.nan)
    observes = getattr(policy, "observes_entropy", False)
    predictor, drop = new_predictor(count), np.full(count, PRIOR_DROP)
    running = np.zeros(count, bool)
    step, longest = 0, 0
    ended = np.zeros(count, bool)
    while not ended.all():
        runnable = np.flatnonzero((requests.arrival <= step) & ~ended)
        if not len(runnable):
            step = int(np.ceil(requests.arrival[~ended].min()))
            continue
        candidates = runnable if preemptive else runnable[~running[runnable]]
        free = places if preemptive else places - int(running.sum())
        served = candidates
        if len(candidates) > free:
            view = View(
                candidates,
                age[candidates],
                wait[candidates],
                requests.prompt_tokens[candidates],
                requests.max_tokens[candidates],
                total[candidates] / np.maximum(age[candidates], 1),
                drop[candidates],
                recent := np.arange(max(0, runnable[-1] + 1 - RECENT), runnable[-1] + 1),
                age[recent],
                ended[recent],
                total[recent] / np.maximum(age[recent], 1),
                requests,
            )
            served = candidates[policy(view)[:free]]
        if not preemptive:
            served = np.concatenate([np.flatnonzero(running), served])
        running[:] = False
        running[served] = True
        newest = seen[served, np.minimum(age[served], seen.shape[1] - 1)]
        if observes:
            entropy = np.zeros(count, np.float32)
            entropy[served] = newest
            predictor, device_drop = _observe(predictor, entropy, running)
            drop = np.asarray(device_drop)
        total[served] += newest
        age[served] += 1
        wait[runnable] += 1
        longest = max(longest, int(wait[runnable].max()))
        wait[served] = 0
        step += 1
        over = served[age[served] >= requests.length[served]]
        latency[over] = step - requests.arrival[over]
        ended[over], running[over] = True, False
    return Served(latency, longest)


@jax.jit
def _observe(
    predictor: EntropyPredictor, entropy: jax.Array, served: jax.Array
) -> tuple[EntropyPredictor, jax.Array]:
    predictor = update_predictor(predictor, entropy, served)
    return predictor, predicted_drop(predictor, PRIOR)


def first_come_first_served(view: View) -> np.ndarray:
    """Each request to its end."""
    return np.arange(len(view.rows))


def round_robin(view: View) -> np.ndarray:
    """The longest wait first: every request gets its turn."""
    return np.lexsort((view.rows, -view.wait))


def oracle(view: View) -> np.ndarray:
    """Shortest remaining length first, with the true lengths."""
    return np.lexsort((view.rows, view.requests.length[view.rows] - view.age))


def shortest_stated(view: View) -> np.ndarray:
    """Shortest remaining length first, as if every request generated its `max_tokens`."""
    return np.lexsort((view.rows, view.max_tokens - view.age))


class Entropic:
    """The law of `control.scheduling.Scheduling`.

    Args:
        cost: the cost C of a request: "equal" for all, or "stated", the tokens left of `max_tokens`, which is
            what the serving engine uses.
        constant: replace E[ΔH⁺] by the same number for every request, as a control.
    """

    def __init__(self, cost: str = "equal", constant: bool = False) -> None:
        self.cost, self.constant, self.law = cost, constant, Scheduling(width=1)
        self.observes_entropy = not constant

    def __call__(self, view: View) -> np.ndarray:
        """See `Policy`."""
        n = len(view.rows)
        left = (view.max_tokens - view.age).astype(float)
        length = (view.prompt_tokens + view.max_tokens).astype(float)
        load = RowLoad(
            cost=left / left.max() if self.cost == "stated" else np.ones(n),
            memory=length / length.max() if self.cost == "stated" else np.zeros(n),
            slack=np.ones(n),
            expected_end=view.max_tokens,
            true_end=view.max_tokens,
            arrival=view.rows,
        )
        drop = np.full(n, PRIOR_DROP) if self.constant else view.drop
        priority = self.law.priority(drop, load, view.wait, xp=np)
        return np.lexsort((view.rows, -view.wait, -priority))


class Predicted:
    """Highest Gittins index of a length model first; see `control.length_prediction.serving_order`.

    Args:
        model: fitted to other requests.
        guard: learn the residuals of the latest requests; serve in the order of arrival until 16 of them have
            ended, and where lengths vary little.
        longest_wait: steps after which a request comes first.
    """

    def __init__(self, model: LengthModel, guard: bool = True, longest_wait: int = 4096) -> None:
        self.model, self.guard, self.longest_wait = model, guard, longest_wait
        self.num_ended, self.current = -1, model

    def features(self, view: View, rows: np.ndarray, entropy: np.ndarray) -> dict[str, np.ndarray]:
        """The features of some requests, `[rows]`.

        Args:
            view: the queue as a policy sees it.
            rows: int `[rows]`, the requests.
            entropy: float `[rows]`, nats, the mean entropy of each.
        """
        done = view.recent_age[view.recent_ended]
        recent = float(done.mean()) if len(done) else float(np.median(view.max_tokens))
        return {
            "prompt_tokens": view.requests.prompt_tokens[rows],
            "max_tokens": view.requests.max_tokens[rows],
            "recent_length": np.full(len(rows), recent),
            "mean_entropy": entropy,
        }

    def __call__(self, view: View) -> np.ndarray:
        """See `Policy`."""
        features = self.features(view, view.rows, view.mean_entropy)
        if self.guard:
            overdue = view.wait > self.longest_wait
            if self.num_ended != (num_ended := int(view.rows[-1]) + 1 - len(view.rows)):
                self.num_ended = num_ended
                self.current = self.model.updated(
                    self.features(view, view.recent, view.recent_entropy), view.recent_age, view.recent_ended
                )
            if view.recent_ended.sum() < FEWEST_ENDED:
                return np.arange(len(view.rows))
            return serving_order(self.current, features, view.age, view.rows, overdue)
        return np.lexsort((view.rows, -self.model.forecast(features, view.age).gittins_index))


class Learned:
    """The policy `predicted` of the serving engine: highest Gittins index of a model of the latest requests.

    Without preemption, and without calibration. It is first come, first served until 32 of the latest
    requests have ended, and where what is known of them says little of their lengths.

    Args:
        longest_wait: steps after which a request comes first.
    """

    names = ("prompt_tokens", "max_tokens")

    def __init__(self, longest_wait: int = 4096) -> None:
        self.longest_wait = longest_wait
        self.fitted_to = (-1, -1)  # the latest arrival, and how many of the recent ones had ended
        self.model: LengthModel | None = None

    def __call__(self, view: View) -> np.ndarray:
        """See `Policy`."""
        known = (int(view.recent[-1]), int(view.recent_ended.sum()))
        if known != self.fitted_to:
            features = self.features(view.requests, view.recent)
            self.model = fit_recent_lengths(features, view.recent_age, view.recent_ended, self.names)
            self.fitted_to = known
        if self.model is None:
            return np.arange(len(view.rows))
        features, overdue = self.features(view.requests, view.rows), view.wait > self.longest_wait
        return serving_order(self.model, features, view.age, view.rows, overdue, preemptive=False)

    def features(self, requests: Requests, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Features of requests that are known before they begin, by name, each `[rows]`."""
        return {name: getattr(requests, name)[rows] for name in self.names}
