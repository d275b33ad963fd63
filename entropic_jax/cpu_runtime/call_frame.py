"""Call frames: the bridge from XLA's foreign function interface to Numba functions.

It gives Numba code access to the operands and results of a custom call, to memory, and to symbols that are
resolved when the code is loaded. The layout of the structures is that of `xla/ffi/api/c_api.h`, whose
stability XLA promises; every field that is used is a machine word.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from .instructions import CACHE_LINE
from .numba_compiler import cfunc, njit

BYTES = ir.IntType(8).as_pointer()


@intrinsic
def as_pointer(context: Any, address: Any) -> Any:
    """An integer as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@intrinsic
def _as_address(context, value):
    """A pointer as an integer."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], context.get_value_type(types.intp))

    return types.intp(types.voidptr), generate


@njit(nogil=True)
def words(address: int, count: int) -> Any:
    """An array of `count` machine words at an address."""
    return carray(as_pointer(address), (count,), np.intp)


@njit(nogil=True)
def _buffer(table, number):
    fields = words(words(table, number + 1)[number], 6)  # XLA_FFI_Buffer
    return fields[3], carray(as_pointer(fields[5]), (fields[4],), np.int64)


@njit(nogil=True)
def operand(frame: int, number: int) -> tuple[int, Any]:
    """The address of the data of an operand, and its dimensions."""
    return _buffer(words(frame, 15)[9], number)


@njit(nogil=True)
def result(frame: int, number: int) -> tuple[int, Any]:
    """The address of the data of a result, and its dimensions."""
    return _buffer(words(frame, 15)[14], number)


def symbol_address(name: str) -> Any:
    """A Numba function without arguments that returns the address of a symbol, resolved at load time."""

    @intrinsic
    def address_of_symbol(context):
        def generate(context, builder, signature, arguments):
            variable = builder.module.globals.get(name)
            if variable is None:
                variable = ir.GlobalVariable(builder.module, ir.IntType(8), name)
            return builder.ptrtoint(variable, context.get_value_type(types.intp))

        return types.intp(), generate

    return address_of_symbol


@intrinsic
def allocate(context: Any, size: Any) -> Any:
    """The address of `size` bytes of new memory, to be freed with `free`."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(BYTES, [context.get_value_type(types.intp)])
        function = builder.module.globals.get("malloc") or ir.Function(builder.module, kind, "malloc")
        return builder.ptrtoint(builder.call(function, arguments), context.get_value_type(types.intp))

    return types.intp(types.intp), generate


@intrinsic
def free(context: Any, address: Any) -> Any:
    """Free memory that `allocate` returned."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [BYTES])
        function = builder.module.globals.get("free") or ir.Function(builder.module, kind, "free")
        builder.call(function, [builder.inttoptr(arguments[0], BYTES)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


def stack_memory(size: int) -> Any:
    """A Numba function without arguments: the address of `size` bytes of the caller's stack."""

    @intrinsic
    def address(context):
        def generate(context, builder, signature, arguments):
            with builder.goto_entry_block():
                memory = builder.alloca(ir.IntType(8), size)
            memory.align = CACHE_LINE
            return builder.ptrtoint(memory, context.get_value_type(types.intp))

        return types.intp(), generate

    return address


@njit(nogil=True)
def floats(address: int, shape: tuple[int, ...]) -> Any:
    """An array of float32 at an address."""
    return carray(as_pointer(address), shape, np.float32)


def xla_handler(body: Any) -> Any:
    """Wrap `body(frame)`, compiled by Numba, as a C function that XLA calls."""

    @cfunc(types.intp(types.voidptr))
    def call(argument):
        frame = words(_as_address(argument), 15)
        if frame[1] != 0:  # XLA asks for the handler's metadata: answer with the version of its interface
            metadata = words(words(frame[1], 4)[3], 5)
            metadata[3] = words(frame[2] + 4 * 8, 1)[0]  # from XLA's own table of functions
            return 0
        body(_as_address(argument))
        return 0

    return call


def thread_task(function: Any) -> Any:
    """Wrap `function(argument, chunk)`, compiled by Numba, as a C function for `thread_pool.parallel_for`."""

    @cfunc(types.void(types.intp, types.intp))
    def entry(argument, chunk):
        function(argument, chunk)

    return entry
