"""Pass costs of this machine: times forward passes of a model over several tokens, for the draft-length law.

The passes run on scratch pages, a few times each and in turn. The shortest time counts: what else the machine
does only adds to it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..attention.attend import TokenSpan, attend_to
from ..cache import Cache, allocate, grant
from ..forward import Decoder
from ..speculation.pass_costs import PassCosts

SHORT = 64  # cached positions of a row where products are timed
LARGEST_WIDTH = 16  # tokens of a row; a larger pass has more rows
PASSES = 4  # of a launch, so that dispatching it counts little


class PassShape(NamedTuple):
    """The size of a pass."""

    rows: int
    width: int  # tokens of a row
    length: int  # cached positions of a row


def measure_pass_costs(
    decoder: Decoder,
    params: Any,
    *,
    most_tokens: int = 256,
    context: int = 2048,
    page_size: int | None = None,
    dtype: Any = jnp.float32,
    repeat: int = 5,
) -> PassCosts:
    """Times passes of 1, 2, 4, … tokens, and what a long context adds to those of one row.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        most_tokens: of a pass, at least 2.
        context: cached positions of a row where attention is timed, above 64.
        page_size: positions per page, by default that of the device.
        dtype: of keys and values, as for `cache.allocate`.
        repeat: how often each pass is timed, at least once.

    Raises:
        ValueError: for an argument out of range.
    """
    for name, value, least in (("most_tokens", most_tokens, 2), ("context", context, SHORT + 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1; got {repeat}")
    sizes = [1 << n for n in range(most_tokens.bit_length())]
    widths = [size for size in sizes if size <= LARGEST_WIDTH]
    short = [PassShape(-(-size // LARGEST_WIDTH), min(size, LARGEST_WIDTH), SHORT) for size in sizes]
    long = [PassShape(1, width, context) for width in widths]
    run = lambda shape: _pass(decoder, params, shape, page_size, dtype)
    seconds = _least_seconds([run(shape) for shape in (*short, *long)], repeat)
    products, attention = seconds[: len(sizes)], seconds[len(sizes) :]
    slopes = _ascending(np.subtract(attention, products[: len(widths)]) / (context - SHORT))
    reading = [s.rows * s.length * slopes[widths.index(s.width)] for s in short]
    base = _ascending(np.subtract(products, reading))
    return PassCosts(tuple(sizes), tuple(base.tolist()), tuple(widths), tuple(slopes.tolist()))


def _ascending(seconds: np.ndarray) -> np.ndarray:
    """Costs without disturbances: a pass does not cost more than a larger one, nor less than nothing."""
    return np.maximum(0.0, np.minimum.accumulate(seconds[::-1])[::-1])


def _pass(
    decoder: Decoder, params: Any, shape: PassShape, page_size: int | None, dtype: Any
) -> Callable[[], None]:
    """A function that runs a launch of passes of one shape and waits for it."""
    rows, width, length = shape
    cache = allocate(decoder.shape, rows, length + width, page_size=page_size, dtype=dtype)
    cache, _ = grant(cache, jnp.full(rows, length + width, jnp.int32))
    span = TokenSpan(jnp.full(rows, length, jnp.int32), jnp.full(rows, width, jnp.int32))
    position = span.start[:, None] + jnp.arange(width)

    def launch(params: Any, cache: Cache) -> tuple[Cache, jax.Array]:
        def body(_: Any, carry: Any) -> Any:
            layers, tokens = carry
            attend = attend_to(cache._replace(layers=layers), span)
            hidden, layers = decoder.hidden(params, tokens, position, layers, attend)
            # The next pass depends on the logits of this one, so that none is left out.
            likeliest = decoder.logits(params, hidden).argmax(-1).astype(jnp.int32)
            return layers, jnp.minimum(likeliest, 1)

        start = cache.layers, jnp.zeros((rows, width), jnp.int32)
        layers, tokens = jax.lax.fori_loop(0, PASSES, body, start)
        return cache._replace(layers=layers), tokens

    program = jax.jit(launch, donate_argnums=1)

    def run() -> None:
        nonlocal cache
        cache, tokens = program(params, cache)
        tokens.block_until_ready()

    return run


def _least_seconds(launches: Sequence[Callable[[], None]], repeat: int) -> list[float]:
    """Seconds of a pass of each launch: the least of `repeat` turns, after one that compiles."""
    seconds: list[list[float]] = [[] for _ in launches]
    for repetition in range(repeat + 1):
        for launch, values in zip(launches, seconds, strict=True):
            began = time.perf_counter()
            launch()
            if repetition:
                values.append((time.perf_counter() - began) / PASSES)
    return [min(values) for values in seconds]
