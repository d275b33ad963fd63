"""Penalise, truncate and sample: one next token per sequence, with sampling parameters of its own.

`rows` is the axis of sequences, `vocabulary` the axis of tokens. Rows are independent: what a row gets is,
bit for bit, the same whatever its neighbours ask for. Parameters are arrays, so new values never retrace, and
`lax.cond` skips a computation that no row of the batch asks for: a greedy batch draws no random numbers, a
batch of plain sampling finds no thresholds and reads no history.

Nothing is sorted: on a CPU, XLA takes far longer to sort a vocabulary than to bisect for a threshold.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .randomness import random_bits, row_keys
from .state import History, Sampling
from .truncation import SMALLEST, truncate

_ACCEPTED: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "temperature": (lambda x: np.isfinite(x) & (x >= 0), "finite numbers >= 0 (0 is greedy)"),
    "top_k": (lambda x: (x >= 0) & (x == np.floor(x)) & (x < 2**31), "integers >= 0 (0 is off)"),
    "top_p": (lambda x: (x >= 0) & (x <= 1), "numbers in [0, 1] (1 is off)"),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "numbers in [0, 1] (0 is off)"),
    "typical_p": (lambda x: (x >= 0) & (x <= 1), "numbers in [0, 1] (1 is off)"),
    "top_n_sigma": (lambda x: np.isfinite(x) & (x >= 0), "finite numbers >= 0 (0 is off)"),
    "repetition_penalty": (lambda x: np.isfinite(x) & (x > 0), "finite numbers > 0 (1 is off)"),
    "presence_penalty": (np.isfinite, "finite numbers (0 is off)"),
    "frequency_penalty": (np.isfinite, "finite numbers (0 is off)"),
}


def _per_row(name: str, value, rows: int) -> np.ndarray:
    acceptable, accepted = _ACCEPTED[name]
    values = np.asarray(value, np.float64)
    if values.shape not in ((), (rows,)):
        raise ValueError(f"{name} has shape {values.shape}; accepted are () and ({rows},), one per row")
    if not np.all(acceptable(values)):
        raise ValueError(f"{name} is {value}; accepted are {accepted}")
    return np.broadcast_to(values, (rows,)).astype(np.int32 if name == "top_k" else np.float32)


def _bias(logit_bias, rows: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    if logit_bias is None or isinstance(logit_bias, Mapping):
        logit_bias = [logit_bias] * rows
    if len(logit_bias) != rows:
        raise ValueError(f"logit_bias has {len(logit_bias)} entries; accepted are {rows}, one per row")
    tokens, values = np.full((rows, slots), -1, np.int32), np.zeros((rows, slots), np.float32)
    for row, biases in enumerate(logit_bias):
        biases = {} if biases is None else biases
        if len(biases) > slots:
            raise ValueError(f"logit_bias has {len(biases)} tokens; accepted are up to bias_slots = {slots}")
        for slot, (token, value) in enumerate(biases.items()):
            if int(token) != token or not 0 <= token < 2**31:
                raise ValueError(f"logit_bias has the token {token!r}; accepted are integers >= 0")
            if np.isnan(value) or value == np.inf:
                raise ValueError(f"logit_bias of {token} is {value}; accepted are finite numbers and -inf")
            tokens[row, slot], values[row, slot] = token, value
    return tokens, values


def parameters(
    rows: int,
    *,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    typical_p=1.0,
    top_n_sigma=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    bias_slots: int = 8,
) -> Sampling:
    """Sampling parameters for `rows` sequences, validated on the host.

    Every parameter is a number, or a sequence of `rows` numbers; `logit_bias` maps a token to what is added
    to its logit (−inf bans it), one mapping for all rows or one per row. The defaults switch everything off.
    A biased token outside the vocabulary has no effect. Raises ValueError, naming the parameter, for values
    outside the ranges documented on `Sampling`.

    >>> sampling = parameters(2, temperature=[0.0, 0.8], top_p=0.9, logit_bias={7: -1.0})
    >>> sampling.top_p.tolist(), sampling.bias_tokens[:, :2].tolist()
    ([0.8999999761581421, 0.8999999761581421], [[7, -1], [7, -1]])
    >>> parameters(2, top_p=1.5)
    Traceback (most recent call last):
    ValueError: top_p is 1.5; accepted are numbers in [0, 1] (1 is off)
    """
    for name, value in (("rows", rows), ("bias_slots", bias_slots)):
        if value < 1:
            raise ValueError(f"{name} is {value}; accepted are integers >= 1")
    given = dict(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        top_n_sigma=top_n_sigma,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    fields = {name: jnp.asarray(_per_row(name, value, rows)) for name, value in given.items()}
    tokens, values = _bias(logit_bias, rows, bias_slots)
    return Sampling(**fields, bias_tokens=jnp.asarray(tokens), bias_values=jnp.asarray(values))


def history(rows: int, vocabulary: int) -> History:
    """An empty history for `rows` sequences."""
    return History(jnp.zeros((rows, vocabulary), bool), jnp.zeros((rows, vocabulary), jnp.int32))


def _inside(tokens: jax.Array, valid: jax.Array | bool, vocabulary: int) -> jax.Array:
    # A negative index would wrap around; an index past the end is dropped by the scatter.
    return jnp.where(valid & (tokens >= 0), tokens, vocabulary)


def record(history: History, tokens: jax.Array, active: jax.Array) -> History:
    """Count one generated token per row.

    tokens int32 `[rows]`, active bool `[rows]`: a row that is not active, or a token outside the vocabulary,
    changes nothing. One scatter of `rows` elements, in place where the history is donated or carried by a
    loop.

    >>> record(history(2, 3), jnp.array([1, 2]), jnp.array([True, False])).generated.tolist()
    [[0, 1, 0], [0, 0, 0]]
    """
    rows, vocabulary = history.generated.shape
    where = (jnp.arange(rows), _inside(tokens, active, vocabulary))
    return history._replace(generated=history.generated.at[where].add(1, mode="drop"))


def record_prompt(history: History, tokens: jax.Array, valid: jax.Array) -> History:
    """Mark prompt tokens int32 `[rows, n]`, those of them that are valid, bool `[rows, n]`.

    >>> record_prompt(history(1, 4), jnp.array([[3, 1]]), jnp.array([[True, False]])).prompt.tolist()
    [[False, False, False, True]]
    """
    rows, vocabulary = history.prompt.shape
    where = (jnp.arange(rows)[:, None], _inside(tokens, valid, vocabulary))
    return history._replace(prompt=history.prompt.at[where].set(True, mode="drop"))


def forget(history: History, rows: jax.Array) -> History:
    """Clear the history of the rows flagged in bool `[rows]`: a row begins a new sequence.

    >>> forget(record(history(1, 2), jnp.array([1]), jnp.array([True])), jnp.array([True])).generated.tolist()
    [[0, 0]]
    """
    keep = ~rows[:, None]
    return History(history.prompt & keep, jnp.where(keep, history.generated, 0))


def adjusts(sampling: Sampling) -> jax.Array:
    """Whether any row penalises or biases, bool `[]`: `penalise` changes nothing otherwise.

    >>> bool(adjusts(parameters(2))), bool(adjusts(parameters(2, presence_penalty=[0.0, 0.5])))
    (False, True)
    """
    return jnp.any(_penalising(sampling) | jnp.any(sampling.bias_tokens >= 0, axis=-1))


def _penalising(sampling: Sampling) -> jax.Array:
    penalties = sampling.presence_penalty, sampling.frequency_penalty
    return (sampling.repetition_penalty != 1) | (penalties[0] != 0) | (penalties[1] != 0)


def penalise(logits: jax.Array, sampling: Sampling, history: History) -> jax.Array:
    """Logits after repetition, presence and frequency penalty and bias, in this order.

        z' = (z / r if z > 0 else z · r)  for tokens of the prompt or generated ones
        z'' = z' − presence · [count > 0] − frequency · count + bias

    float32 `[rows, vocabulary]`. Counts are of generated tokens only. Where no row penalises or biases, the
    history is not read. Masked tokens (−inf) stay masked. Differentiable in the logits and in the real-valued
    parameters.
    Repetition: Keskar et al. 2019, arXiv 1909.05858, as in transformers; presence and frequency: OpenAI API.

    >>> sampling = parameters(1, repetition_penalty=2.0, logit_bias={2: 1.5})
    >>> seen = record(history(1, 3), jnp.array([0]), jnp.array([True]))
    >>> penalise(jnp.array([[3.0, 3.0, 3.0]]), sampling, seen).tolist()
    [[1.5, 3.0, 4.5]]
    """
    logits = logits.astype(jnp.float32)
    repeating = sampling.repetition_penalty != 1
    penalising = _penalising(sampling)

    def apply(logits):
        count = history.generated
        penalty = sampling.repetition_penalty[:, None]
        repeated = (history.prompt | (count > 0)) & repeating[:, None]
        changed = jnp.where(repeated, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
        changed -= jnp.where(count > 0, sampling.presence_penalty[:, None], 0.0)
        changed -= sampling.frequency_penalty[:, None] * count.astype(jnp.float32)
        # A row that does not penalise keeps its very bits, whatever the compiler contracts above.
        changed = jnp.where(penalising[:, None], changed, logits)
        rows, vocabulary = logits.shape
        where = (jnp.arange(rows)[:, None], _inside(sampling.bias_tokens, True, vocabulary))
        return changed.at[where].add(sampling.bias_values, mode="drop")

    return lax.cond(adjusts(sampling), apply, lambda logits: logits, logits)


def _limit_surprisal(scaled: jax.Array, limit: jax.Array) -> jax.Array:
    highest = jnp.max(scaled, axis=-1)
    floor = jnp.minimum(jax.nn.logsumexp(scaled, axis=-1) - limit, highest)
    return jnp.where(scaled < floor[:, None], -jnp.inf, scaled)


def _first_largest(values: jax.Array) -> jax.Array:
    # As argmax, NaN included: XLA's CPU backend vectorises two plain reductions, but not one over pairs.
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    largest = jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where((values == largest) | jnp.isnan(values), index, values.shape[-1] - 1), axis=-1)


def gumbel(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise from uniform uint32, finite, between −2.8 and 22.9.

    Differs from jax.random.gumbel: all 32 bits count where the noise is large, so that tokens of a
    probability below 2⁻²³ are drawn as often as they should.
    """
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def sample(
    logits: jax.Array,
    sampling: Sampling,
    temperature: jax.Array,
    key: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    surprisal_limit: jax.Array | None = None,
) -> jax.Array:
    """One token per row, int32 `[rows]`, drawn from softmax(truncate(logits / T)).

        token = argmax(truncate(z / T) + G),  G Gumbel noise from fold_in(fold_in(key, seed), position)

    logits float32 `[rows, vocabulary]`, already penalised; temperature float32 `[rows]`, what the controller
    asks for now, in place of `sampling.temperature`; key a PRNG key, typed or raw; seed and position int32
    `[rows]`; surprisal_limit float32 `[rows]` in nats: tokens with −ln softmax(z / T) above it are cut off
    first, all but the most probable. Where T is 0 the row is greedy: the exact argmax, the first of ties,
    without truncation. A token with the logit −inf is drawn only if there is no other; a row with NaN gives a
    valid but arbitrary token. Not differentiable.

    >>> logits = jnp.array([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    >>> temperature, seed, position = jnp.array([0.0, 5.0]), jnp.arange(2), jnp.zeros(2, jnp.int32)
    >>> sample(logits, parameters(2, top_k=1), temperature, jax.random.key(0), seed, position).tolist()
    [1, 1]
    """
    logits = logits.astype(jnp.float32)
    warm = temperature > 0

    def draw():
        # The largest logit is moved to 0 so that no temperature, however small, overflows.
        highest = jnp.max(logits, axis=-1, keepdims=True)
        shifted = logits - jnp.where(jnp.isfinite(highest), highest, 0.0)
        scaled = shifted / jnp.where(warm, jnp.maximum(temperature, SMALLEST), 1.0)[:, None]
        if surprisal_limit is not None:
            scaled = lax.cond(
                jnp.any(warm & (surprisal_limit < jnp.inf)),
                _limit_surprisal,
                lambda z, _: z,
                scaled,
                surprisal_limit,
            )
        asked = sampling._replace(
            top_k=jnp.where(warm, sampling.top_k, 0),
            top_p=jnp.where(warm, sampling.top_p, 1.0),
            min_p=jnp.where(warm, sampling.min_p, 0.0),
            typical_p=jnp.where(warm, sampling.typical_p, 1.0),
            top_n_sigma=jnp.where(warm, sampling.top_n_sigma, 0.0),
        )

        noise = gumbel(random_bits(row_keys(key, seed, position), logits.shape[-1]))
        return _first_largest(jnp.where(warm[:, None], truncate(scaled, asked) + noise, logits))

    return lax.cond(jnp.any(warm), draw, lambda: _first_largest(logits))
