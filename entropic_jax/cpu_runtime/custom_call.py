"""Registration of CPU kernels as targets of XLA's custom calls."""

import ctypes
from pathlib import Path

from .code_cache import KernelBuilder, load_or_compile, load_stored, package_of
from .run_once import LOCK
from .threads import start

_registered: dict[str, Path] = {}  # the package of each kernel, by its name


def register(name: str, build: KernelBuilder) -> None:
    """Register the kernel `name` with XLA's CPU client under that name; see `load_or_compile`."""
    with LOCK:  # XLA refuses a second target of one name
        if name not in _registered:
            start()
            _register(name, load_or_compile(name, build), package_of(build))


def register_stored(name: str, package: Path) -> bool:
    """Register a kernel that the code cache holds; False if it does not hold it.

    Args:
        name: of the kernel.
        package: folder of its source text.
    """
    with LOCK:
        if name not in _registered:
            start()
            address = load_stored(name, package)
            if address is None:
                return False
            _register(name, address, package)
    return True


def registered() -> dict[str, Path]:
    """The kernels of this process, and the packages that hold them."""
    with LOCK:
        return dict(_registered)


def _register(name: str, address: int, package: Path) -> None:
    import jax

    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, capsule(address, None, None), platform="cpu")
    _registered[name] = package
