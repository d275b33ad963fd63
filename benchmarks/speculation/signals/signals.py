"""Signals of recorded drafts: what a stopping rule could read of each draft token."""

from typing import Any, NamedTuple

import jax
import numpy as np

from entropic_jax import models
from entropic_jax.speculation import HeadedDecoder, make_speculator

from ..measure import begin
from .names import (
    ADAEDL,
    DRAFT_ENTROPY,
    HEAD,
    MATCH,
    POSITION,
    PREVIOUS,
    SHUFFLED,
    SUFFIX,
    TOP_PROBABILITY,
    signal_of,
)
from .recording import ENTROPY, MOST_TOKENS, TOP, Step, num_accepted, record, recorders
from .stopping import Drafts, Form

FORMS = {  # signals that are used as rules; the position as a rule is a fixed length
    DRAFT_ENTROPY: Form(),
    TOP_PROBABILITY: Form(),
    ADAEDL: Form(products=False),
    MATCH: Form(known_before=True),
    PREVIOUS: Form(known_before=True),
}
GAMMA = 0.2  # of AdaEDL's bound
SHUFFLES = 5


def adaedl(entropy: np.ndarray) -> np.ndarray:
    """AdaEDL's bound, from below, of the probability that a draft token is accepted: 1 − √(γ H).

    Source: Agrawal, Jeon and Lee 2024, arXiv 2410.18351; drafts end where it falls below a threshold. Differs
    from the paper: the threshold is chosen on other texts, in place of adapted while a text is generated.
    """
    return 1 - np.sqrt(GAMMA * entropy)


class Record(NamedTuple):
    """The drafts of a drafter in a text, without costs."""

    drafts: Drafts
    acceptance: np.ndarray  # float [positions, k], P(accepted) as the suffix drafter states it
    length: np.ndarray  # int [positions]


def record_text(
    model: models.Model, prompt: list[int], tokens: int, temperature: float, suffix: Any
) -> tuple[list[int], Step]:
    """A text that the engine emits, and the records of its positions.

    Args:
        model: the model that continues the prompt.
        prompt: token ids.
        tokens: positions to record.
        temperature: the temperature of the sampling.
        suffix: the suffix drafter.
    """
    # Drafts near the end have as many tokens as the others, and the text to compare them with.
    headed, number = isinstance(model.decoder, HeadedDecoder), tokens + MOST_TOKENS
    starting = make_speculator(HEAD if headed else SUFFIX, 1, MOST_TOKENS, None, headed)
    state = begin(model, prompt, number, temperature, starting)
    _, steps = record(model.decoder, model.params, suffix, recorders(headed), state, number)
    steps = jax.device_get(steps)
    return steps.token.tolist(), steps


def drafts_of(drafter: str, text: list[int], steps: Step, positions: int, seed: int) -> Record:
    """The drafts of a drafter with its signals; costs are left to `priced`.

    Args:
        drafter: "suffix", "pruned" or "head".
        text: the tokens that were emitted.
        steps: the records of their positions.
        positions: the number of positions whose drafts count.
        seed: the seed of the shuffling.
    """
    first = steps.drafts[drafter if drafter == SUFFIX else f"{drafter} {ENTROPY}"]
    tokens, offered = np.asarray(first.tokens)[:positions], np.asarray(first.num_tokens)[:positions]
    stated = np.asarray(first.acceptance, float)[:positions]
    index = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    previous = np.broadcast_to(np.asarray(steps.previous_entropy)[:positions, None], tokens.shape)
    signals: dict[str, np.ndarray] = {POSITION: -index.astype(float)}
    if drafter == SUFFIX:
        signals |= {
            MATCH: np.asarray(steps.matched)[:positions, None] + index.astype(float),
            PREVIOUS: -previous,
        }
    else:
        entropy = -np.log(np.maximum(stated, 1e-30))
        top = np.asarray(steps.drafts[f"{drafter} {TOP}"].acceptance, float)[:positions]
        before = np.concatenate([previous[:, :1], entropy[:, :-1]], 1)
        signals |= {DRAFT_ENTROPY: -entropy, TOP_PROBABILITY: top, ADAEDL: adaedl(entropy)}
        signals |= {PREVIOUS: -before}
    rng, there = np.random.default_rng(seed), np.flatnonzero(offered > 0)
    for number in range(SHUFFLES):
        exchanged = signals[signal_of(drafter)].copy()
        exchanged[there] = exchanged[rng.permutation(there)]
        signals[f"{SHUFFLED} {number}"] = exchanged
    nothing = np.zeros(0)
    accepted = num_accepted(tokens, offered, np.asarray(text))
    drafts = Drafts(accepted, offered, signals, nothing, nothing)
    return Record(drafts, stated, np.asarray(steps.length)[:positions])
