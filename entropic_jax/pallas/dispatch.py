"""Which back end serves an operation: the first that accepts, or the one that is named.

`ENTROPIC_KERNELS` names a back end for every operation that has one of that name: `xla` (plain JAX, the
reference), `cpu`, `tpu`, `gpu`, or `interpret`, which runs the TPU's kernels in Pallas's interpreter on any
device. The argument `back_end` of a call comes before it. Both are read while a program is traced: one that
is compiled stays as it is. What was chosen, and why the others declined, is logged once at debug level by
the logger `entropic_jax.kernels`.
"""

import importlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

LOG = logging.getLogger("entropic_jax.kernels")
VARIABLE = "ENTROPIC_KERNELS"
NAMES = ("xla", "cpu", "tpu", "gpu", "interpret")
PLAIN = "xla"
ONLY_BY_NAME = ("interpret",)
CAPABILITY = "9.0"  # of the GPUs that the kernels are written for: Hopper
_said: set[str] = set()

BackEnd = Callable[..., Any]


def device() -> jax.Device:
    """The device that what is traced now is meant for: the default one, which may be that of a compiler."""
    settings: Any = jax.config
    chosen = settings.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def on(platform: str, module: str, name: str) -> BackEnd:
    """A function of a module, for one kind of device; on another one it declines.

    The module is imported where it is needed: Pallas's parts for TPU and GPU cost 0.7 seconds.
    """

    def call(*arguments: Any) -> Any:
        here = device()
        if here.platform != platform:
            raise NotImplementedError(f"the default device is a {here.platform}")
        if platform == "gpu" and (capability := here.compute_capability) != CAPABILITY:
            raise NotImplementedError(f"compute capability {capability}: {CAPABILITY} is served")
        return getattr(importlib.import_module(module), name)(*arguments)

    return call


def interpreted(module: str, name: str) -> BackEnd:
    """A kernel for TPU in the interpreter."""

    def call(*arguments: Any) -> Any:
        from jax.experimental.pallas import tpu as pltpu

        with pltpu.force_tpu_interpret_mode():
            return getattr(importlib.import_module(module), name)(*arguments)

    return call


class Operation(NamedTuple):
    """An operation, and its back ends by name, in the order in which they are tried."""

    name: str
    back_ends: Mapping[str, BackEnd]

    def __call__(self, *arguments: Any, back_end: str | None = None) -> Any:
        """The result of the first back end that accepts, or of the one named; see the module.

        A back end declines with NotImplementedError. Raises ExceptionGroup with every reason if all that
        were tried decline, ValueError for a name that is none.
        """
        reasons: list[Exception] = []
        for name in self.candidates(back_end):
            try:
                result = self.back_ends[name](*arguments)
            except NotImplementedError as declined:
                reasons.append(NotImplementedError(f"{name}: {declined}"))
                continue
            because = "; ".join(map(str, reasons)) or "none"
            _say_once(f"{self.name}: {name} is chosen; declined: {because}")
            return result
        raise ExceptionGroup(f"no back end accepts {self.name}", reasons)

    def candidates(self, back_end: str | None = None) -> list[str]:
        """The names of the back ends to try, in order."""
        if back_end is not None and back_end not in self.back_ends:
            accepted = ", ".join(self.back_ends)
            raise ValueError(f"back_end is {back_end!r}; {self.name} accepts {accepted}")
        wanted = back_end or os.environ.get(VARIABLE) or None
        if wanted is not None and wanted not in NAMES:
            raise ValueError(f"{VARIABLE} is {wanted!r}; accepted are {', '.join(NAMES)}")
        if wanted in self.back_ends:
            return [wanted]
        return [name for name in self.back_ends if name not in ONLY_BY_NAME]

    def kernel(self, *arguments: Any) -> str | None:
        """The name of the back end that serves these arguments, or None if it is plain JAX; nothing runs."""
        before = itertools.takewhile(lambda name: name != PLAIN, self.candidates())
        return next((name for name in before if self._why_not(name, arguments) is None), None)

    def verdicts(self, *arguments: Any) -> dict[str, str | None]:
        """For each back end the reason why it declines these arguments; None where it accepts them.

        Nothing runs: what is found out while a program is traced. Those that serve by name alone are left
        out unless they are named.
        """
        found: dict[str, str | None] = {}
        for name in self.back_ends:
            if name in ONLY_BY_NAME and name not in self.candidates():
                continue
            found[name] = self._why_not(name, arguments)
        return found

    def _why_not(self, name: str, arguments: tuple[Any, ...]) -> str | None:
        try:
            # Without parameters, so that what is static may be among the arguments.
            jax.eval_shape(lambda: self.back_ends[name](*arguments))
        except NotImplementedError as declined:
            return str(declined)
        return None


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        LOG.debug(text)
