"""Registration of CPU kernels as targets of XLA's custom calls."""

import ctypes

from .code_cache import KernelBuilder, load_or_compile
from .threads import start


def register(name: str, build: KernelBuilder) -> None:
    """Register the kernel `name` with XLA's CPU client under that name; see `load_or_compile`."""
    import jax

    start()
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    address = load_or_compile(name, build)
    jax.ffi.register_ffi_target(name, capsule(address, None, None), platform="cpu")
