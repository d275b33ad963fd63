"""The bridge from XLA to a Numba function: call frames, buffers, and the registration of a kernel.

The layout of the structures is that of `xla/ffi/api/c_api.h`, whose stability XLA promises; every field is a
machine word here.
"""

import ctypes
from typing import Any

import jax
import numpy as np
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

_alive: list[Any] = []  # compiled code must outlive every executable that calls it


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


def register(name: str, body: Any) -> None:
    """Make `body(frame)`, compiled by Numba, known to XLA's CPU client as the target `name`."""

    @cfunc(types.intp(types.voidptr))
    def handler(argument):
        frame = words(address(argument), 15)
        if frame[1] != 0:  # XLA asks for the handler's metadata: answer with the version of its interface
            metadata = words(words(frame[1], 4)[3], 5)
            metadata[3] = words(frame[2] + 4 * 8, 1)[0]  # of XLA's own table of functions
            return 0
        body(address(argument))
        return 0

    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, capsule(handler.address, None, None), platform="cpu")
    _alive.append(handler)


def task(function: Any) -> int:
    """The address of `function(frame, chunk)`, compiled by Numba, for `pool.parallel`."""

    @cfunc(types.void(types.intp, types.intp))
    def entry(argument, chunk):
        function(argument, chunk)

    _alive.append(entry)
    return entry.address
