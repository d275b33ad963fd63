"""Information about a reference text: how much of it a model explains, per second of cost.

Entropic time τ counts falls of the model's own entropy, so a damaged model, whose entropy rises and falls as
often, has as much of it. The information gained about a text that the model did not write falls with every
damage to the prediction. It is reported alongside dτ/dC, never instead of a measure of quality.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LN2 = float(np.log(2))


def order_zero_surprisal(
    history: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray, vocabulary: int
) -> np.ndarray:
    """−ln q₀ of each token under an adaptive order-0 code with the Krichevsky–Trofimov estimator, nats.

        q₀(x_t) = (count of x_t among the history and x_<t + ½) / (their number + V / 2)

    Args:
        history: tokens that the code has seen before.
        tokens: tokens to code.
        vocabulary: V, number of tokens in the vocabulary.

    Returns:
        float64, as many as `tokens`.

    >>> order_zero_surprisal([], [0, 0], 2).round(3).tolist()  # ½ of 1, then 1½ of 2
    [0.693, 0.288]
    """
    counts = np.bincount(np.asarray(history, np.int64), minlength=vocabulary).astype(float)
    total, surprisals = float(counts.sum()), []
    for token in np.asarray(tokens, np.int64).tolist():
        surprisals.append(np.log((total + vocabulary / 2) / (counts[token] + 0.5)))
        counts[token] += 1
        total += 1
    return np.array(surprisals, float)


class Information(NamedTuple):
    """Information that a model gives about one text, and its rate."""

    bits: float  # of the text explained, in total
    bits_per_token: float
    bits_per_second: float  # of the cost of prompt and text together
    entropic_efficiency: float  # dτ/dC with the same cost, nats per second


def information_gained(
    surprisal: np.ndarray, reference: np.ndarray, entropic_time: float, seconds: float
) -> Information:
    """Information gained about a reference text, and its rate.

        I = Σ_t log₂ p₁(x_t | x_<t) − log₂ q₀(x_t)

    I is the number of bits by which the model's code of the text is shorter than the order-0 code that has
    read the same prompt. Only the probabilities of the reference tokens count: neither the temperature nor
    the order of requests changes I, and any damage to these probabilities lowers it. Limits: I depends on
    the text and on the code q₀, so only differences on the same text mean anything; it may be negative; it
    says nothing of text that the model generates; per second, a cheap model may beat a better one.

    Args:
        surprisal: −ln p₁ of each token of the text, nats, `[tokens]`.
        reference: −ln q₀ of the same tokens, nats, `[tokens]`, see `order_zero_surprisal`.
        entropic_time: τ along the text, nats.
        seconds: cost of prompt and text, > 0.

    Raises:
        ValueError: for other shapes or costs.

    >>> information_gained(np.zeros(2), np.full(2, LN2), 3.0, 4.0)
    Information(bits=2.0, bits_per_token=1.0, bits_per_second=0.5, entropic_efficiency=0.75)
    """
    if surprisal.shape != reference.shape or surprisal.ndim != 1 or not len(surprisal):
        raise ValueError(
            f"surprisal and reference must have one shape [tokens]; got {surprisal.shape}, {reference.shape}"
        )
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0; got {seconds}")
    bits = float((np.asarray(reference, float) - np.asarray(surprisal, float)).sum()) / LN2
    return Information(bits, bits / len(surprisal), bits / seconds, entropic_time / seconds)
