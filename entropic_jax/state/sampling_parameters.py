"""Sampling parameters as arrays, one value per row, validated on the host."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..parameter_tables.sampling_params import DEVICE_PARAMETERS, PARAMETERS
from ..parameter_tables.table import ParameterError
from . import Sampling


def parameters(
    rows: int,
    *,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    bias_slots: int = 8,
    **values: Any,
) -> Sampling:
    """Sampling parameters for `rows` sequences, validated on the host.

    The defaults switch everything off, apart from the temperature of 1.

    Args:
        rows: number of sequences.
        logit_bias: what is added to the logits of tokens (−inf bans one): one mapping from token ids for all
            rows, or one per row. A token outside the vocabulary has no effect.
        bias_slots: most tokens of a mapping.
        **values: parameters of `SamplingParams` that the device applies, each a number or `rows` numbers.

    Returns:
        `Sampling`, arrays `[rows]`.

    Raises:
        ParameterError: A ValueError, for a value that `SamplingParams` does not accept.
        TypeError: For a name that is no such parameter.

    >>> sampling = parameters(2, temperature=[0.0, 0.8], top_p=0.9, logit_bias={7: -1.0})
    >>> sampling.top_p.tolist(), sampling.bias_tokens[:, :2].tolist()
    ([0.8999999761581421, 0.8999999761581421], [[7, -1], [7, -1]])
    >>> parameters(2, top_p=1.5)
    Traceback (most recent call last):
    entropic_jax.parameter_tables.table.ParameterError: top_p must be a number above 0 and at most 1; got 1.5
    """
    for name, value in (("rows", rows), ("bias_slots", bias_slots)):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise ParameterError(f"{name} must be an integer of at least 1; got {value!r}", name)
    if unknown := sorted(values.keys() - DEVICE_PARAMETERS.keys()):
        raise TypeError(f"parameters got {unknown[0]}; it takes {', '.join(DEVICE_PARAMETERS)}")
    arrays: dict[str, Any] = {
        name: _per_row(name, values.get(name, line.default), rows) for name, line in DEVICE_PARAMETERS.items()
    }
    arrays["bias_tokens"], arrays["bias_values"] = _bias(logit_bias, rows, bias_slots)
    # All in one call: a call for each of the arrays takes milliseconds.
    return jax.device_put(Sampling(**arrays))


def defaults_unless(kept: jax.Array, sampling: Sampling) -> Sampling:
    """The sampling parameters of the kept rows, and in the other rows the defaults; biases stay.

    Args:
        kept: bool `[rows]`.
        sampling: parameters of the rows.

    >>> defaults_unless(jnp.array([True, False]), parameters(2, top_k=7, top_p=0.5)).top_k.tolist()
    [7, 0]
    """
    lines = DEVICE_PARAMETERS.items()
    return sampling._replace(
        **{name: jnp.where(kept, getattr(sampling, name), line.default) for name, line in lines}
    )


def _per_row(name: str, value: Any, rows: int) -> np.ndarray:
    """The value of each row, `[rows]`, in the parameter's type."""
    accepts = DEVICE_PARAMETERS[name].accepts
    shape = np.shape(value)
    if shape not in ((), (rows,)):
        raise ParameterError(f"{name} must have shape () or ({rows},), one per row; got {shape}", name)
    checked = np.array([accepts.check(name, x) for x in np.ravel(value).tolist()])
    dtype = np.int32 if accepts.kind is int else np.float32
    return np.broadcast_to(checked.reshape(shape), (rows,)).astype(dtype)


def _bias(logit_bias: Any, rows: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """The biased tokens and their biases, each `[rows, slots]`; −1 is an unused slot."""
    if logit_bias is None or isinstance(logit_bias, Mapping):
        logit_bias = [logit_bias] * rows
    if not isinstance(logit_bias, Sequence):
        raise ParameterError(
            f"logit_bias must be a mapping, or {rows} of them; got {logit_bias!r}", "logit_bias"
        )
    if len(logit_bias) != rows:
        raise ParameterError(
            f"logit_bias must have {rows} entries, one per row; got {len(logit_bias)}", "logit_bias"
        )
    tokens, values = np.full((rows, slots), -1, np.int32), np.zeros((rows, slots), np.float32)
    for row, entry in enumerate(logit_bias):
        biases = PARAMETERS["logit_bias"].accepts.check("logit_bias", {} if entry is None else entry)
        if len(biases) > slots:
            raise ParameterError(
                f"logit_bias must have at most bias_slots = {slots} tokens; got {len(biases)}", "logit_bias"
            )
        tokens[row, : len(biases)], values[row, : len(biases)] = list(biases), list(biases.values())
    return tokens, values
