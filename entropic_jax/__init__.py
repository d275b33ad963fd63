"""Language-model decoding in JAX with entropy as the control signal.

    from entropic_jax import LLM, SamplingParams

    llm = LLM(preset="full")
    llm.generate("def add(a, b):", SamplingParams(temperature=0.7, max_tokens=32))

Names are imported when they are first used: `import entropic_jax` itself imports neither JAX nor NumPy.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .control import chain
    from .loop import generate, replay, start, step
    from .parameter_tables.sampling_params import SamplingParams
    from .parameter_tables.structured_outputs import StructuredOutputsParams
    from .serving.llm import LLM, CompletionOutput, LoRARequest, RequestOutput
    from .state import Action, Sampling, Signal, State, Trace
    from .state.cache import Cache, ModelShape, allocate
    from .state.sampling_parameters import parameters

_HOMES = {
    "control": ("chain",),
    "loop": ("generate", "replay", "start", "step"),
    "parameter_tables.sampling_params": ("SamplingParams",),
    "parameter_tables.structured_outputs": ("StructuredOutputsParams",),
    "serving.llm": ("LLM", "CompletionOutput", "LoRARequest", "RequestOutput"),
    "state": ("Action", "Sampling", "Signal", "State", "Trace"),
    "state.cache": ("Cache", "ModelShape", "allocate"),
    "state.sampling_parameters": ("parameters",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "Action",
    "Cache",
    "CompletionOutput",
    "LoRARequest",
    "ModelShape",
    "RequestOutput",
    "Sampling",
    "SamplingParams",
    "Signal",
    "State",
    "StructuredOutputsParams",
    "Trace",
    "allocate",
    "chain",
    "generate",
    "parameters",
    "replay",
    "start",
    "step",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return metadata.version(__name__)
        except metadata.PackageNotFoundError:  # run from its source
            return "0"
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
