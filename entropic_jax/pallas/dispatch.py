"""Kernel dispatch: which back end computes an operation.

An operation takes the first of its back ends that supports the arguments. A back end declines a case by
raising NotImplementedError with the reason. A caller can name a back end with the argument `backend`, and the
environment variable ENTROPIC_KERNELS names one for every operation that has a back end of that name; the
argument comes first. The names are

* `xla`: plain JAX, the reference,
* `cpu`, `tpu`, `gpu`: the kernels for this kind of device,
* `interpret`: the TPU kernels in Pallas's interpreter, on any device. It serves only where it is named.

Both settings are read while a program is traced; a compiled program does not change. The logger
`entropic_jax.kernels` says once, at debug level, which back end was chosen and why others declined.
"""

import importlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from ..mesh.devices import default_device

LOG = logging.getLogger("entropic_jax.kernels")
VARIABLE = "ENTROPIC_KERNELS"
NAMES = ("xla", "cpu", "tpu", "gpu", "interpret")
REFERENCE = "xla"
ONLY_BY_NAME = ("interpret",)
COMPUTE_CAPABILITY = "9.0"  # of the GPUs that the kernels are written for: Hopper
_logged: set[str] = set()

Backend = Callable[..., Any]


def for_platform(platform: str, module: str, name: str) -> Backend:
    """A back end that declines unless the default device is of the given platform.

    The module is imported when the back end is used: Pallas's parts for TPU and GPU take 0.7 seconds to
    import.

    Args:
        platform: `tpu` or `gpu`.
        module: the full name of the module that holds the kernel.
        name: the function in that module.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        device = default_device()
        if device.platform != platform:
            raise NotImplementedError(f"the default device is a {device.platform}")
        if platform == "gpu" and (capability := device.compute_capability) != COMPUTE_CAPABILITY:
            raise NotImplementedError(
                f"compute capability {capability}: only {COMPUTE_CAPABILITY} is supported"
            )
        return getattr(importlib.import_module(module), name)(*arguments, **options)

    return call


def interpreted(module: str, name: str) -> Backend:
    """A back end that runs a TPU kernel in Pallas's interpreter."""

    def call(*arguments: Any, **options: Any) -> Any:
        from jax.experimental.pallas import tpu as pltpu

        with pltpu.force_tpu_interpret_mode():
            return getattr(importlib.import_module(module), name)(*arguments, **options)

    return call


class Operation(NamedTuple):
    """An operation and its back ends by name, in the order in which they are tried."""

    name: str
    backends: Mapping[str, Backend]

    def __call__(self, *arguments: Any, backend: str | None = None, **options: Any) -> Any:
        """Compute the operation with the first back end that supports it, or with the named one.

        `options` are keyword arguments that every back end of the operation takes.

        Raises:
            ExceptionGroup: every back end that was tried declined; it holds their reasons.
            ValueError: the operation has no back end of this name.
        """
        declined: list[Exception] = []
        for name in self.candidates(backend):
            try:
                result = self.backends[name](*arguments, **options)
            except NotImplementedError as reason:
                declined.append(NotImplementedError(f"{name}: {reason}"))
                continue
            reasons = "; ".join(map(str, declined)) or "none"
            _log_once(f"{self.name}: {name} is chosen; declined: {reasons}")
            return result
        raise ExceptionGroup(f"no back end supports {self.name}", declined)

    def candidates(self, backend: str | None = None) -> list[str]:
        """The names of the back ends to try, in order."""
        if backend is not None and backend not in self.backends:
            accepted = ", ".join(self.backends)
            raise ValueError(f"backend of {self.name} must be one of {accepted}; got {backend!r}")
        requested = backend or os.environ.get(VARIABLE) or None
        if requested is not None and requested not in NAMES:
            raise ValueError(f"{VARIABLE} must be one of {', '.join(NAMES)}; got {requested!r}")
        if requested in self.backends:
            return [requested]
        return [name for name in self.backends if name not in ONLY_BY_NAME]

    def kernel_name(self, *arguments: Any) -> str | None:
        """The back end that would compute these arguments; None if it is plain JAX. Nothing runs."""
        kernels = itertools.takewhile(lambda name: name != REFERENCE, self.candidates())
        return next((name for name in kernels if self._decline_reason(name, arguments) is None), None)

    def decline_reasons(self, *arguments: Any) -> dict[str, str | None]:
        """The reason why each back end declines these arguments; None for one that supports them.

        Nothing runs; the reasons are found by tracing, so arrays may be ShapeDtypeStructs. A back end that
        serves only by name is left out unless it is named.
        """
        reasons: dict[str, str | None] = {}
        for name in self.backends:
            if name in ONLY_BY_NAME and name not in self.candidates():
                continue
            reasons[name] = self._decline_reason(name, arguments)
        return reasons

    def _decline_reason(self, name: str, arguments: tuple[Any, ...]) -> str | None:
        leaves, structure = jax.tree.flatten(arguments)
        abstract = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]

        # Only shapes are parameters, so that static arguments may be among the others.
        def call(*arrays: Any) -> Any:
            operands = list(leaves)
            for i, array in zip(abstract, arrays, strict=True):
                operands[i] = array
            return self.backends[name](*jax.tree.unflatten(structure, operands))

        try:
            jax.eval_shape(call, *(leaves[i] for i in abstract))
        except NotImplementedError as reason:
            return str(reason)
        return None


def _log_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        LOG.debug(text)
