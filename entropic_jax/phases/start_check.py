"""Validation of the arguments of `start`, `generate` and `replay`.

Each error names the argument, what it accepts, and the value. Values that are traced are not checked.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..state import Hardware, Sampling
from ..state.cache import Cache, ModelShape

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


def check_controller_and_cache(controller: Any, cache: Any) -> None:
    """Raises ValueError for a control law, or a cache, that `start` does not take.

    Args:
        controller: a `Controller`.
        cache: as `allocate` makes it; nothing may be in it.
    """
    _check_controller(controller)
    if not isinstance(cache, Cache):
        raise ValueError(f"cache must be a Cache, as `allocate` makes it; got {_described(cache)}")
    _check_unconsumed("cache", cache, "one that `allocate` has just made")
    if _is_known(cache.granted) and np.asarray(cache.granted).any():
        raise ValueError(f"cache must be empty; got one with {np.asarray(cache.granted).sum()} pages granted")


def _check_controller(controller: Any) -> None:
    """Raises ValueError for what cannot be a `Controller`."""
    if not _has_methods(controller, "init"):
        raise ValueError(
            f"controller must have a method `init`, as `chain()` has; got {_described(controller)}"
        )


def _check_unconsumed(name: str, value: Any, accepted: str) -> None:
    """Raises ValueError for arrays that an earlier call has consumed.

    Args:
        name: the name of the argument.
        value: a pytree of arrays.
        accepted: the one that the argument must be.
    """
    arrays = (x for x in jax.tree.leaves(value) if isinstance(x, jax.Array))
    if any(not isinstance(x, jax.core.Tracer) and x.is_deleted() for x in arrays):
        raise ValueError(f"{name} must be {accepted}; got one that an earlier call has consumed")


def check_controlled(controller: Any, state: Any) -> None:
    """Raises ValueError for a state that was not started with such a controller.

    Args:
        controller: the control law.
        state: the loop's state.
    """

    def shapes(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]

    if shapes(jax.eval_shape(controller.init, state.action)) != shapes(state.control):
        raise ValueError(
            "controller must be the one that the state was started with, but for its gains; "
            f"got {controller!r:.200}"
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
    if not is_random_key(key):
        raise ValueError(f"key must be a random key, as `jax.random.key` makes it; got {_described(key)}")
    if not _is_positive(belief_temperature):
        raise ValueError(
            f"belief_temperature must be a number above 0 and finite; got {_described(belief_temperature)}"
        )


def is_random_key(value: Any) -> bool:
    """Whether a value is one random key of JAX, of the new kind or the old."""
    if not isinstance(value, (jax.Array, np.ndarray)):
        return False
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.ndim == 0
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return value.dtype == data.dtype and value.shape == data.shape


def _is_positive(value: Any) -> bool:
    """Whether a value is a number above 0 and finite, not a bool; a traced one may be any."""
    if isinstance(value, jax.core.Tracer):
        return value.ndim == 0
    if isinstance(value, bool) or not isinstance(value, (int, float, np.ndarray, np.generic, jax.Array)):
        return False
    kind = jnp.result_type(value)
    is_real = jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating)
    return is_real and np.ndim(value) == 0 and 0 < float(value) < np.inf


def _described(value: Any) -> str:
    """A value in an error: its text, of an array with axes its dtype and shape."""
    if isinstance(value, (np.ndarray, jax.Array)) and value.ndim > 0:
        return f"an array of {value.dtype} and shape {value.shape}"
    return f"{value!r:.200}"


def check_parts(hardware: Any, page_policy: Any, expert_policy: Any, shape: ModelShape) -> None:
    """Raises ValueError for a roofline, a page policy or an expert policy that `start` does not take.

    Args:
        hardware: a `Hardware`, or None.
        page_policy: a `PagePolicy`, or None.
        expert_policy: an `ExpertPolicy`, or None.
        shape: sizes of the model.
    """
    if hardware is not None and not (isinstance(hardware, Hardware) and all(map(_is_positive, hardware))):
        raise ValueError(
            "hardware must be None or a Hardware whose peak and bandwidth are above 0 and finite; "
            f"got {_described(hardware)}"
        )
    if page_policy is not None and not _has_methods(page_policy, "memory", "reader", "prompt_reader"):
        raise ValueError(
            f"page_policy must be None or a page policy, such as a Selection; got {_described(page_policy)}"
        )
    if expert_policy is not None and not _has_methods(expert_policy, "num_experts"):
        raise ValueError(
            "expert_policy must be None or an expert policy, such as a TopPExperts; "
            f"got {_described(expert_policy)}"
        )
    if expert_policy is not None and not shape.expert_weights:
        raise ValueError(
            f"expert_policy must be None for a model without experts; got {_described(expert_policy)}"
        )


def check_speculator(speculator: Any) -> None:
    """Raises ValueError unless this is a `Speculator` or None."""
    if speculator is not None and not _has_methods(speculator, "init", "features"):
        raise ValueError(
            "speculator must be None or a Speculator, as `speculation.speculator` makes it; "
            f"got {_described(speculator)}"
        )


def _has_methods(value: Any, *names: str) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in names)


class CheckedProgram:
    """A jitted function, and a check of its arguments before it is traced, when their values are known.

    Args:
        program: the jitted function.
        check: called with the arguments of the program by name; raises ValueError.
    """

    def __init__(self, program: Any, check: Callable[..., None]) -> None:
        self.program, self.check = program, check
        self.signature = inspect.signature(program)
        functools.update_wrapper(self, program)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The program's result."""
        self._check(args, kwargs)
        return self.program(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.jit(…).lower` of the program."""
        self._check(args, kwargs)
        return self.program.lower(*args, **kwargs)

    def _check(self, args: Any, kwargs: Any) -> None:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.check(**bound.arguments)


def check_generated(
    *, controller: Any, state: Any, steps: Any, capacity: Any, width: Any, speculator: Any, **others: Any
) -> None:
    """Raises ValueError for sizes, a state, a law or a speculator that `generate` does not take.

    Args:
        controller: the control law.
        state: the loop's state, which no call has consumed.
        steps: as `generate` takes it, like the others.
        capacity: steps of the trace.
        width: computed rows of a step, or None.
        speculator: a `Speculator`, or None.
        **others: not checked.
    """
    _check_controller(controller)
    _check_unconsumed("state", state, "the one that the last call returned")
    if _is_known(steps):
        check_integer("steps", steps, 0, LARGEST_INT)
    elif not is_integer(steps):
        raise ValueError(f"steps must be an integer; got {steps.dtype} of shape {steps.shape}")
    check_integer("capacity", capacity, 1, LARGEST_INT)
    if width is not None:
        check_integer("width", width, 1, LARGEST_INT)
    check_speculator(speculator)


def _is_known(value: Any) -> bool:
    """Whether the host can read a value: it is not traced, nor in part on devices of other processes."""
    if isinstance(value, jax.core.Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


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


def check_replayed(*, decoder: Any, controller: Any, state: Any, tokens: Any, **others: Any) -> None:
    """Raises ValueError unless tokens to replay are integers `[rows, steps]`, each in the vocabulary.

    Args:
        decoder: the model's pure functions.
        controller: the control law.
        state: the loop's state.
        tokens: the array.
        **others: not checked.
    """
    _check_controller(controller)
    _check_unconsumed("state", state, "the one that the last call returned")
    rows, vocabulary = state.length.shape[0], decoder.shape.vocabulary
    if not isinstance(tokens, (np.ndarray, jax.Array)):
        raise ValueError(f"tokens must be an array of shape ({rows}, steps); got {tokens!r:.200}")
    shape, dtype = jnp.shape(tokens), jnp.result_type(tokens)
    if len(shape) != 2 or shape[0] != rows or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"tokens must be integers of shape ({rows}, steps); got {dtype} of shape {shape}")
    if _is_known(tokens):
        values = np.asarray(tokens)
        if (outside := values[(values < 0) | (values >= vocabulary)]).size:
            raise ValueError(f"tokens must be between 0 and {vocabulary - 1}; got {outside[0]}")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python, NumPy or JAX, not a bool."""
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
    if (
        set(map(type, values)) <= {int}
        and low <= min(values, default=low)
        and max(values, default=low) <= high
    ):
        return  # what nearly all are, many times as fast as one by one
    for value in values:
        if not is_integer(value) or not low <= int(value) <= high:
            raise ValueError(f"{name} must hold {accepted}; got {value!r:.200}")
