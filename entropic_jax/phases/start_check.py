"""Validation of the arguments of `start`: each error names the argument, what it accepts, and the value."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..state import Sampling
from ..state.cache import Cache

LARGEST_INT = 2**31 - 1  # what the device's integers hold
UNUSED = -1  # a slot of `stop` that holds no token


def check_prompts(prompts: Any, cache: Cache, vocabulary: int) -> None:
    """Raises ValueError unless there is one prompt per row, of known tokens, that fits the cache.

    Args:
        prompts: token ids, one sequence per row.
        cache: the cache of the rows.
        vocabulary: tokens that there are.
    """
    rows, context = cache.table.shape[0], cache.table.shape[1] * cache.page_size
    require_rows("prompts", prompts, rows, "one per row of the cache")
    for row, prompt in enumerate(prompts):
        name = f"prompts[{row}]"
        check_integers(name, prompt, "token ids", 0, vocabulary - 1)
        if len(prompt) > context:
            raise ValueError(
                f"{name} must have at most {context} tokens, the size of a row of the cache; "
                f"got {len(prompt)}"
            )


def check_limits(max_tokens: Any, seeds: Any, stop: Any, sample: Any, rows: int, vocabulary: int) -> None:
    """Raises ValueError for an argument of another type, of another number of rows, or out of range.

    Args:
        max_tokens: tokens to generate at most, for all rows or one number per row.
        seeds: one per row; None numbers the rows.
        stop: token ids that end a row, one sequence per row, −1 where unused; () for none.
        sample: sampling parameters; None for the defaults.
        rows: number of rows of the batch.
        vocabulary: tokens that there are.
    """
    per_row = "one per row"
    if is_sequence(max_tokens):
        require_rows("max_tokens", max_tokens, rows, f"{per_row}, or be an integer")
        check_integers("max_tokens", max_tokens, "integers", 0, LARGEST_INT)
    else:
        check_integer("max_tokens", max_tokens, 0, LARGEST_INT)
    if seeds is not None:
        require_rows("seeds", seeds, rows, per_row)
        check_integers("seeds", seeds, "integers", -LARGEST_INT - 1, LARGEST_INT)
    if not (is_sequence(stop) and len(stop) == 0):
        require_rows("stop", stop, rows, "a list of token ids for each row")
        for row, tokens in enumerate(stop):
            check_integers(f"stop[{row}]", tokens, "token ids", UNUSED, vocabulary - 1)
    if sample is not None:
        shape = np.shape(sample.temperature) if isinstance(sample, Sampling) else None
        if shape != (rows,):
            raise ValueError(
                f"sample must be a Sampling of {rows} rows, as `parameters` makes it; got "
                + (f"{sample!r:.200}" if shape is None else f"one of shape {shape}")
            )


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence or an array with an axis, and no text."""
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def require_rows(name: str, value: Any, rows: int, what: str) -> None:
    """Raises ValueError unless a value is a sequence of `rows` entries.

    Args:
        name: the name of the argument.
        value: the argument's value.
        rows: entries that it must have.
        what: these are.
    """
    if not is_sequence(value):
        raise ValueError(f"{name} must have {rows} entries, {what}; got {value!r:.200}")
    if len(value) != rows:
        raise ValueError(f"{name} must have {rows} entries, {what}; got {len(value)}")


def check_randomness_and_belief(key: Any, belief_temperature: Any) -> None:
    """Raises ValueError for a run key, or a temperature of the belief, that `start` does not take.

    Args:
        key: as `start` takes it; values that are traced are not checked.
        belief_temperature: likewise.
    """
    if not isinstance(key, (jax.Array, np.ndarray)) or not (
        jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) or key.dtype == jnp.uint32
    ):
        raise ValueError(f"key must be a random key, as `jax.random.key` makes it; got {key!r:.200}")
    if isinstance(belief_temperature, jax.core.Tracer):
        return
    number = isinstance(belief_temperature, (int, float, np.ndarray, np.generic, jax.Array))
    if not number or not 0 < float(belief_temperature) < np.inf:
        raise ValueError(
            f"belief_temperature must be a number above 0 and finite; got {belief_temperature!r:.200}"
        )


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raises ValueError unless a value is an integer from `low` to `high`.

    Args:
        name: the name of the argument.
        value: the argument's value.
        low: least accepted.
        high: most accepted.
    """
    if not is_integer(value) or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an integer between {low} and {high}; got {value!r:.200}")


def check_replayed(tokens: Any, rows: int) -> None:
    """Raises ValueError unless tokens to replay are integers `[rows, steps]`.

    Args:
        tokens: the array.
        rows: number of rows of the state.
    """
    shape, dtype = jnp.shape(tokens), jnp.result_type(tokens)
    if len(shape) != 2 or shape[0] != rows or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"tokens must be integers of shape ({rows}, steps); got {dtype} of shape {shape}")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python, NumPy or JAX, and no truth value."""
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.ndim == 0 and value.dtype.kind in "iu"
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_integers(name: str, values: Any, what: str, low: int, high: int) -> None:
    """Raises ValueError unless all values of a sequence are integers from `low` to `high`.

    Args:
        name: the name of the argument, with the index of the sequence in it.
        values: the values of the sequence.
        what: they are.
        low: least accepted.
        high: most accepted.
    """
    accepted = f"{what} between {low} and {high}"
    if isinstance(values, (np.ndarray, jax.Array)):
        values = np.asarray(values)
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise ValueError(
                f"{name} must hold {accepted}; got an array of {values.dtype} and shape {values.shape}"
            )
        values = values.tolist()
    if not is_sequence(values):
        raise ValueError(f"{name} must be a list of {accepted}; got {values!r:.200}")
    for value in values:
        if not is_integer(value) or not low <= int(value) <= high:
            raise ValueError(f"{name} must hold {accepted}; got {value!r:.200}")
