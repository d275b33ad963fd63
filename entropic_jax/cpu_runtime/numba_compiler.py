"""Numba without machine code: `njit` and `cfunc` for functions that become parts of a kernel.

Numba makes machine code of every function that another one calls, and wrappers by which Python could call
it. A kernel needs neither: `code_cache` emits it as a whole, from LLVM's intermediate code. So neither is
made, and the first start on a machine waits less.

Python cannot call these functions; a function of `numba.njit` can.
"""

from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import Compiler
from numba.core.registry import cpu_target
from numba.core.runtime.context import NRTContext

UNWRAPPED = dict(no_cpython_wrapper=True, no_cfunc_wrapper=True)


class _Library(JITCodeLibrary):
    """The intermediate code of a function and of those that it calls."""

    def _finalize_specific(self) -> None:
        """Make no machine code."""

    def _optimize_final_module(self) -> None:
        """Inline and drop the counts of references, and no more: `code_cache` optimises whole kernels."""
        cheap, builder = self._codegen._module_pass_manager(
            loop_vectorize=False, slp_vectorize=False, opt=0, cost="cheap"
        )
        cheap.run(self._final_module, builder)

    def get_pointer_to_function(self, name: str) -> int:
        """Link the code; zero, which stands for a function that is not there."""
        self._ensure_finalized()
        return 0


class _Codegen(JITCPUCodegen):
    """Intermediate code as Numba's, for the same processor."""

    _library_class = _Library

    def _add_module(self, module: Any) -> None:
        """Leave the module to its library."""


def _stand_in(library: Any, fndesc: Any, env: Any) -> Any:
    """Placeholder for the machine code of a function: a C method, equal to no other, which fails.

    Args:
        library: the code of the function.
        fndesc: its names and types.
        env: the Python objects that it refers to.
    """
    return "{{{}}}".format("Python cannot call a part of a kernel").format  # it finds nothing of that name


class _NoReferences(NRTContext):
    """Numba's runtime for kernels: their arrays own no memory, so nobody counts who refers to it."""

    def incref(self, builder: Any, typ: Any, value: Any) -> None:
        """Emit nothing."""

    def decref(self, builder: Any, typ: Any, value: Any) -> None:
        """Emit nothing."""


_context = cpu_target.target_context.subtarget(
    _internal_codegen=_Codegen("entropic_jax"),
    get_executable=_stand_in,
    nrt=_NoReferences(cpu_target.target_context, True),
)


class _Compiler(Compiler):
    """Numba's compiler for functions that are parts of kernels."""

    def __init__(self, typingctx: Any, targetctx: Any, *rest: Any) -> None:
        super().__init__(typingctx, _context, *rest)


def njit(function: Any = None, **options: Any) -> Any:
    """`numba.njit` for a function that kernels call.

    Args:
        function: the Python function; without it, the result is a decorator.
        **options: those of `numba.njit`.
    """
    return numba.njit(function, pipeline_class=_Compiler, **UNWRAPPED, **options)


def cfunc(signature: Any) -> Any:
    """`numba.cfunc` for the function by which a kernel is called.

    Args:
        signature: the types of its result and arguments.
    """
    return numba.cfunc(signature, pipeline_class=_Compiler)
