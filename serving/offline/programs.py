"""The compiled programs of offline generation, from the executable cache."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from entropic_jax import loop
from entropic_jax.phases.prefill import PrefillOutput
from entropic_jax.speculation import Speculator
from entropic_jax.state import State, Trace

from ..executable_cache import begin_reading, load_or_compile


class Launch(NamedTuple):
    """A program and what it is called with."""

    name: str  # of the program; what is static in it follows from the name and from the arguments' shapes
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: int  # the argument that it consumes


class Programs:
    """Programs by name and by the shapes of their arguments."""

    def __init__(self) -> None:
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._begun: dict[Any, Callable[[], Callable[..., Any] | None]] = {}

    def begin(self, launch: Launch) -> None:
        """Begin to read a program that a later launch needs, if it is stored."""
        key = _key(launch)
        if key not in self._programs and key not in self._begun:
            self._begun[key] = begin_reading(launch.function, launch.arguments, launch.donated)

    def run(self, launch: Launch) -> Any:
        """The result of a launch, whose program is loaded or compiled if it is the first of its shapes."""
        key = _key(launch)
        if key not in self._programs:
            begun = self._begun.pop(key, None)
            program = begun() if begun is not None else None
            self._programs[key] = program or load_or_compile(*launch[1:])[0]
        return self._programs[key](*launch.arguments)


def _key(launch: Launch) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(launch.arguments)
    shapes = tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
    return launch.name, structure, shapes


def generate(
    decoder: loop.Decoder,
    options: Mapping[str, Any],
    params: Any,
    controller: Any,
    state: State,
    steps: Any,
    speculator: Speculator | None,
) -> tuple[State, Trace]:
    """`loop.generate`, with what is static first.

    Args:
        decoder: the decoder of the model.
        options: static arguments by name.
        params: the parameters of the model.
        controller: the control law.
        state: consumed.
        steps: the most steps.
        speculator: drafts tokens; None for none.
    """
    return loop.generate(decoder, params, controller, state, steps, **options, speculator=speculator)


def prefill(
    decoder: loop.Decoder, params: Any, state: State, chunk: loop.PrefillChunk
) -> tuple[State, PrefillOutput]:
    """`loop.launch_prefill`, with what is static first.

    Args:
        decoder: the decoder of the model.
        params: the parameters of the model.
        state: consumed.
        chunk: the tokens, and the rows that they belong to.
    """
    return loop.launch_prefill(decoder, params, state, chunk)
