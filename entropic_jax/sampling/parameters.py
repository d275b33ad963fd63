"""Sampling parameters, one value per row, validated on the host."""

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from ..state import Sampling

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
