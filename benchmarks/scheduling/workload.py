"""Workloads of the scheduling simulation: two traces, lengths with light and heavy tails, equal lengths."""

import numpy as np

from entropic_jax.analysis.queueing import Requests
from entropic_jax.serving.bench.arrivals import PUBLISHED, drawn_like

LONGEST = 1024  # tokens; longer draws are cut
CORRELATION = 0.2  # of H₁ from one token to the next, as calibrated on the embedded model
MEAN_ENTROPY, SCALE = 2.0, 1.5  # nats
LAWS = ("azure-conversation", "azure-code", "lognormal, σ 1.2", "exponential", "uniform, ½ to 1½", "equal")
LIGHT = ("uniform, ½ to 1½", "equal")
MEAN = 50  # tokens; of every law but azure-code, whose mean is 28


def lengths_of(law: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of answers and prompts, each int `[count]`."""
    random = np.random.default_rng(seed)
    if law.startswith("azure"):
        drawn = drawn_like(law, count, 1.0, None, seed)
        shrink = min(1.0, MEAN / PUBLISHED[law].output.mean)  # as the server's benchmark scales to its model
        answers = np.array([a.output_tokens for a in drawn]) * shrink
        return np.maximum(np.rint(answers), 1).astype(int), np.array([a.prompt_tokens for a in drawn])
    lengths = {
        "lognormal": lambda: random.lognormal(np.log(MEAN) - 0.72, 1.2, count),
        "exponential": lambda: random.exponential(MEAN, count),
        "uniform": lambda: random.uniform(0.5 * MEAN, 1.5 * MEAN, count),
        "equal": lambda: np.full(count, float(MEAN)),
    }[law.partition(",")[0]]()
    return np.maximum(np.rint(lengths), 1).astype(int), random.integers(64, 512, count)


def stated_limits(lengths: np.ndarray, kind: str, random: np.random.Generator) -> np.ndarray:
    """The `max_tokens` that clients state, int, at least the length.

    Args:
        lengths: tokens that will be generated.
        kind: "constant", the same for all; "loose", the length times a lognormal factor (σ 1), at least 1,
            rounded up to a power of two; "exact", the length itself, as a load generator states it.
        random: source of the factors.
    """
    if kind == "exact":
        return lengths.copy()
    if kind == "constant":
        return np.full(len(lengths), max(LONGEST, int(lengths.max())))
    loose = lengths * np.maximum(np.exp(random.normal(0.7, 1.0, len(lengths))), 1.0)
    return np.exp2(np.ceil(np.log2(loose))).astype(int)


def draw_requests(
    law: str, count: int, places: int, load: float, seed: int, *, limits: str = "loose", telling: float = 0.0
) -> Requests:
    """Requests that arrive as a Poisson process.

    Args:
        law: the law of the lengths, one of `LAWS`.
        count: number of requests.
        places: requests that a step serves.
        load: arriving tokens over tokens that can be served.
        seed: the seed of everything drawn.
        limits: kind of `stated_limits`.
        telling: nats by which the mean entropy of a request rises with each unit of ln length; 0 makes
            entropy say nothing of the length.
    """
    random = np.random.default_rng([seed, LAWS.index(law)])
    lengths, prompts = lengths_of(law, count, int(random.integers(2**31)))
    lengths = np.minimum(lengths, LONGEST)
    gaps = random.exponential(lengths.mean() / (places * load), count)
    entropy = entropies(lengths, telling, random)
    return Requests(
        np.cumsum(gaps) - gaps[0], lengths, prompts, stated_limits(lengths, limits, random), entropy
    )


def entropies(lengths: np.ndarray, telling: float, random: np.random.Generator) -> np.ndarray:
    """H₁ at every token, float32 `[requests, longest]`: an AR(1) around a mean of each request, ≥ 0."""
    logarithm = np.log(lengths)
    mean = MEAN_ENTROPY + random.normal(0, 0.5, len(lengths)) + telling * (logarithm - logarithm.mean())
    series = np.empty((len(lengths), int(lengths.max())), np.float32)
    value = mean + SCALE * random.normal(size=len(lengths))
    for step in range(series.shape[1]):
        series[:, step] = np.maximum(value, 0)
        value = mean + CORRELATION * (value - mean) + SCALE * random.normal(size=len(lengths))
    return series
