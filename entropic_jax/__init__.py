"""Language-model decoding in JAX with entropy as the control signal."""

from .cache import Cache, ModelShape, allocate
from .control import chain
from .loop import generate, replay, start, step
from .sampling import Sampling, parameters
from .state import Action, Signal, State, Trace

__all__ = [
    "Action",
    "Cache",
    "ModelShape",
    "Sampling",
    "Signal",
    "State",
    "Trace",
    "allocate",
    "chain",
    "generate",
    "parameters",
    "replay",
    "start",
    "step",
]
