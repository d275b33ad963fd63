"""The bridge from XLA to a Numba function: call frames, buffers, memory, and names that are found later.

The layout of the structures is that of `xla/ffi/api/c_api.h`, whose stability XLA promises; every field is a
machine word here.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

BYTES = ir.IntType(8).as_pointer()


@intrinsic
def pointer(context, address):
    """An integer as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@intrinsic
def address(context, value):
    """A pointer as an integer."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], context.get_value_type(types.intp))

    return types.intp(types.voidptr), generate


@njit(nogil=True)
def words(place, count):
    """`count` machine words at an address."""
    return carray(pointer(place), (count,), np.intp)


@njit(nogil=True)
def _buffer(table, place):
    fields = words(words(table, place + 1)[place], 6)  # XLA_FFI_Buffer
    return fields[3], carray(pointer(fields[5]), (fields[4],), np.int64)


@njit(nogil=True)
def operand(frame, place):
    """Address of the data, and the dimensions, of an operand."""
    return _buffer(words(frame, 15)[9], place)


@njit(nogil=True)
def result(frame, place):
    """Address of the data, and the dimensions, of a result."""
    return _buffer(words(frame, 15)[14], place)


def symbol(name: str) -> Any:
    """A function of no arguments for Numba code: the address that goes by a name when the code is loaded."""

    @intrinsic
    def place(context):
        def generate(context, builder, signature, arguments):
            found = builder.module.globals.get(name)
            if found is None:
                found = ir.GlobalVariable(builder.module, ir.IntType(8), name)
            return builder.ptrtoint(found, context.get_value_type(types.intp))

        return types.intp(), generate

    return place


@intrinsic
def allocate(context, size):
    """The address of so many bytes of memory, to be given back with `release`."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(BYTES, [context.get_value_type(types.intp)])
        function = builder.module.globals.get("malloc") or ir.Function(builder.module, kind, "malloc")
        return builder.ptrtoint(builder.call(function, arguments), context.get_value_type(types.intp))

    return types.intp(types.intp), generate


@intrinsic
def release(context, place):
    """Give memory of `allocate` back."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [BYTES])
        function = builder.module.globals.get("free") or ir.Function(builder.module, kind, "free")
        builder.call(function, [builder.inttoptr(arguments[0], BYTES)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@njit(nogil=True)
def floats(place, shape):
    """An array of float32 at an address."""
    return carray(pointer(place), shape, np.float32)


def handler(body: Any) -> Any:
    """`body(frame)`, compiled by Numba, as a C function that XLA calls."""

    @cfunc(types.intp(types.voidptr))
    def call(argument):
        frame = words(address(argument), 15)
        if frame[1] != 0:  # XLA asks for the handler's metadata: answer with the version of its interface
            metadata = words(words(frame[1], 4)[3], 5)
            metadata[3] = words(frame[2] + 4 * 8, 1)[0]  # of XLA's own table of functions
            return 0
        body(address(argument))
        return 0

    return call


def task(function: Any) -> Any:
    """`function(argument, chunk)`, compiled by Numba, as a C function for `pool.parallel`."""

    @cfunc(types.void(types.intp, types.intp))
    def entry(argument, chunk):
        function(argument, chunk)

    return entry
