"""Logits processors: penalties and logit bias, with the history they read.

Rows are independent, and `lax.cond` skips the work where no row of the batch asks for it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..state import History, Sampling

WINDOW = 256  # latest tokens of prompt and text, in which runs are sought
LONGEST_RUN = 32  # tokens that are compared; the largest `dry_allowed_length`


def history(rows: int, vocabulary: int) -> History:
    """The history of `rows` sequences before their first token."""
    return History(
        prompt=jnp.zeros((rows, vocabulary), bool),
        generated=jnp.zeros((rows, vocabulary), jnp.int32),
        latest=jnp.full((rows, WINDOW), -1, jnp.int32),
        number=jnp.zeros(rows, jnp.int32),
    )


def latest_of(text: Sequence[int]) -> np.ndarray:
    """`History.latest` of a row with these tokens, int32 `[window]`.

    >>> latest_of(range(300))[[0, 43, 44, 255]].tolist(), latest_of([7])[:2].tolist()
    ([256, 299, 44, 255], [7, -1])
    """
    latest = np.full(WINDOW, -1, np.int32)
    latest[np.arange(len(text))[-WINDOW:] % WINDOW] = np.asarray(text[-WINDOW:], np.int32)
    return latest


def with_prompts(blank: History, prompts: Sequence[Sequence[int]]) -> History:
    """A blank history with the prompt of each row, whose new arrays are NumPy's."""
    if not any(map(len, prompts)):
        return blank  # of a plan, too, whose vocabulary may be larger than memory
    mask = np.zeros(blank.prompt.shape, bool)
    for row, prompt in enumerate(prompts):
        mask[row, np.asarray(prompt, np.int64)] = True
    arrays: dict[str, Any] = {
        "prompt": mask,
        "latest": np.stack([latest_of(prompt) for prompt in prompts]),
        "number": np.asarray([len(prompt) for prompt in prompts], np.int32),
    }
    return blank._replace(**arrays)


def _inside(tokens: jax.Array, valid: jax.Array | bool, vocabulary: int) -> jax.Array:
    # A negative index would wrap around; an index past the end is dropped by the scatter.
    return jnp.where(valid & (tokens >= 0), tokens, vocabulary)


def record(history: History, tokens: jax.Array, active: jax.Array) -> History:
    """Enters generated tokens; two scatters, in place where the history is donated or carried.

    Args:
        history: the rows' history.
        tokens: int32 `[rows]` or `[n, rows]`, in their order; one outside the vocabulary is not counted.
        active: bool of the same shape; a token that is not active changes nothing.

    >>> record(history(2, 3), jnp.array([1, 2]), jnp.array([True, False])).generated.tolist()
    [[0, 1, 0], [0, 0, 0]]
    """
    rows, vocabulary = history.generated.shape
    row, entered = jnp.arange(rows), jnp.asarray(active, jnp.int32).reshape(-1, rows)
    before = history.number + jnp.cumsum(entered, 0) - entered
    place = jnp.where(active, before.reshape(active.shape) % WINDOW, WINDOW)
    return History(
        prompt=history.prompt,
        generated=history.generated.at[row, _inside(tokens, active, vocabulary)].add(1, mode="drop"),
        latest=history.latest.at[row, place].set(tokens, mode="drop"),
        number=history.number + entered.sum(0),
    )


def adjusts(sampling: Sampling) -> jax.Array:
    """Whether any row has a penalty or a bias, bool `[]`; otherwise `penalise` changes nothing.

    >>> from entropic_jax.sampling import parameters
    >>> bool(adjusts(parameters(2))), bool(adjusts(parameters(2, presence_penalty=[0.0, 0.5])))
    (False, True)
    """
    biased = jnp.any(sampling.bias_tokens >= 0, axis=-1)
    return jnp.any(_penalising(sampling) | biased | (sampling.dry_multiplier > 0))


def _penalising(sampling: Sampling) -> jax.Array:
    penalties = sampling.presence_penalty, sampling.frequency_penalty
    return (sampling.repetition_penalty != 1) | (penalties[0] != 0) | (penalties[1] != 0)


def runs(history: History) -> tuple[jax.Array, jax.Array]:
    """Tokens that followed runs which the end of the text repeats, and the lengths of these runs.

    Returns:
        int32 `[rows, window − 1]` each: a token of the latest ones, and how many tokens before it are those
        at the end of the text, at most `LONGEST_RUN`.
    """
    order = (history.number[:, None] - 1 - jnp.arange(WINDOW)) % WINDOW
    newest = jnp.take_along_axis(history.latest, order, -1)  # the newest token first
    padded = jnp.pad(newest, ((0, 0), (0, LONGEST_RUN)), constant_values=-1)
    alike, length = jnp.ones(newest.shape, bool), jnp.zeros(newest.shape, jnp.int32)
    for number in range(LONGEST_RUN):
        end = newest[:, number : number + 1]
        alike &= (padded[:, number : number + WINDOW] == end) & (end >= 0)
        length += alike.astype(jnp.int32)
    return newest[:, :-1], length[:, 1:]


def _run_penalty(sampling: Sampling, history: History) -> jax.Array:
    """The penalty that DRY subtracts from the logits, float32 `[rows, vocabulary]`."""
    rows, vocabulary = history.generated.shape
    token, length = runs(history)
    excess = length - sampling.dry_allowed_length[:, None]
    penalty = sampling.dry_multiplier[:, None] * sampling.dry_base[:, None] ** excess.astype(jnp.float32)
    indices = (jnp.arange(rows)[:, None], _inside(token, excess >= 0, vocabulary))
    return jnp.zeros((rows, vocabulary), jnp.float32).at[indices].max(penalty, mode="drop")


def penalise(logits: jax.Array, sampling: Sampling, history: History) -> jax.Array:
    """Applies the repetition, presence and frequency penalties, the bias and DRY, in this order.

        z' = (z / r if z > 0 else z · r)  for tokens of the prompt or generated ones
        z'' = z' − presence · [count > 0] − frequency · count + bias

    DRY subtracts multiplier · base^(n − allowed) from the logit of a token that would make a run of n ≥
    allowed tokens at the end of the text, which stands in its latest 256 tokens already and was followed by
    that token there, one longer; n is that of the longest such run, at most 32. Differs from its release: no
    token interrupts a run.

    Counts are of generated tokens only. Where no row has a penalty or a bias, the history is not read. Masked
    tokens (−inf) stay masked. Differentiable in the logits and in the real-valued parameters.

    Args:
        logits: float32 `[rows, vocabulary]`.
        sampling: the parameters of the rows.
        history: tokens of the prompt and generated ones.

    Source: Keskar et al. 2019 (arXiv 1909.05858) for repetition, the OpenAI API for presence and frequency,
    p-e-w 2024 (text-generation-webui, pull request 5677) for DRY.

    >>> from entropic_jax.sampling import parameters
    >>> sampling = parameters(1, repetition_penalty=2.0, logit_bias={2: 1.5})
    >>> seen = record(history(1, 3), jnp.array([0]), jnp.array([True]))
    >>> penalise(jnp.array([[3.0, 3.0, 3.0]]), sampling, seen).tolist()
    [[1.5, 3.0, 4.5]]
    """
    logits = logits.astype(jnp.float32)
    return lax.cond(adjusts(sampling), lambda z: _penalised(z, sampling, history), lambda z: z, logits)


def _penalised(logits: jax.Array, sampling: Sampling, history: History) -> jax.Array:
    """See `penalise`."""
    repeating, penalising = sampling.repetition_penalty != 1, _penalising(sampling)
    count = history.generated
    penalty = sampling.repetition_penalty[:, None]
    repeated = (history.prompt | (count > 0)) & repeating[:, None]
    changed = jnp.where(repeated, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    changed -= jnp.where(count > 0, sampling.presence_penalty[:, None], 0.0)
    changed -= sampling.frequency_penalty[:, None] * count.astype(jnp.float32)
    # A row that does not penalise keeps its very bits, whatever the compiler contracts above.
    changed = jnp.where(penalising[:, None], changed, logits)
    rows, vocabulary = logits.shape
    indices = (jnp.arange(rows)[:, None], _inside(sampling.bias_tokens, True, vocabulary))
    changed = changed.at[indices].add(sampling.bias_values, mode="drop")
    is_dry = jnp.any(sampling.dry_multiplier > 0)
    return lax.cond(is_dry, lambda z: z - _run_penalty(sampling, history), lambda z: z, changed)
