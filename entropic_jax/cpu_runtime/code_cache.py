"""Code cache of the CPU kernels: machine code is compiled once and stored on disk for later processes.

A kernel is described by a builder: a generator of `(symbol, function)` pairs, where each function was
compiled by Numba and later ones may call earlier ones. The objects are stored in a folder whose name is a
hash of the processor, the versions of the compilers, and the source text of this package and of the package
that holds the builder. A process that finds them there does not import Numba.

Objects refer to one another, to the mailbox of the threads and to the C library by name, never by address.
The environment variable ENTROPIC_KERNEL_CACHE names another parent folder; if it is empty, nothing is stored.
"""

import hashlib
import json
import logging
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ..mesh.devices import user_cache
from .run_once import run_once

LOG = logging.getLogger("entropic_jax.kernels")
VARIABLE = "ENTROPIC_KERNEL_CACHE"
PREFIX = "entropic_"  # of every symbol that kernels define
# The C functions that an object may call. Any other would need a library that only Numba loads.
C_LIBRARY = {
    "malloc",
    "free",
    "usleep",
    "prctl",
    "expf",
    "logf",
    "exp2f",
    "sqrtf",
    "memset",
    "memcpy",
    "memmove",
}

OPTIMISATIONS = 3  # of a module, at most: some error paths leave only after the first has inlined all

Objects = list[tuple[str, bytes]]  # symbol and machine code, in the order of loading
KernelBuilder = Callable[[], Iterator[tuple[str, Any]]]
_kept_alive: list[Any] = []  # compiled code must outlive every executable that calls it


@run_once
def load_or_compile(name: str, build: KernelBuilder) -> int:
    """The address of a kernel in memory, from the cache if it is there.

    Args:
        name: the name of the kernel and the symbol of the last function that `build` yields.
        build: the builder; it runs only if the cache does not hold the kernel. The folder of the file that
            defines it holds all source text, besides that of this package, on which the code depends.

    Returns:
        The address of that last function.
    """
    package = package_of(build)
    stored = load_stored(name, package)
    if stored is not None:
        return stored
    objects: Objects = []
    storable, address = True, 0
    for symbol, function in build():
        code, foreign = _emit_object(function, symbol)
        if foreign:  # what Numba has loaded
            storable = False
            LOG.warning("every start compiles %s: its machine code refers to %s", symbol, ", ".join(foreign))
        objects.append((symbol, code))
        address = _load_object(symbol, code)
    if storable:
        _write_objects(package, name, objects)
    return address


def package_of(build: KernelBuilder) -> Path:
    """The folder that holds the source text of a kernel."""
    return Path(build.__code__.co_filename).resolve().parent


def load_stored(name: str, package: Path) -> int | None:
    """The address of a kernel, loaded from the cache; None if the cache does not hold it.

    Args:
        name: of the kernel.
        package: folder of its source text.
    """
    address = None
    for symbol, code in _read_objects(package, name) or ():
        address = _load_object(symbol, code)
    return address


def define_symbol(symbol: str, address: int) -> None:
    """Define a symbol for the code that is loaded later."""
    import llvmlite.binding as llvm

    llvm.add_symbol(symbol, address)


def _target_machine() -> Any:
    """A new target machine: an engine takes ownership of the one it is given."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    # Code may be loaded anywhere, far from what it refers to, so every address takes a full word.
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, codemodel="jitdefault", jit=True
    )


def _emit_object(function: Any, symbol: str) -> tuple[bytes, list[str]]:
    """Machine code of a function under a symbol, and the names that it needs of other libraries."""
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(function.inspect_llvm())
    entry = module.get_function(function.native_name)
    entry.name = symbol
    for inner in module.functions:
        if not inner.is_declaration and inner.name != symbol:
            inner.linkage = "internal"
    foreign: list[str] = []
    for _ in range(OPTIMISATIONS):
        _optimise(module)
        if not (foreign := _foreign_names(module)):
            break
    return _target_machine().emit_object(module), foreign


def _foreign_names(module: Any) -> list[str]:
    """Names that a module needs of libraries which only Numba loads."""
    declared = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")}
    return sorted(name for name in declared if name not in C_LIBRARY and not name.startswith(PREFIX))


def _optimise(module: Any) -> None:
    """Optimise a module, which removes the error paths: these functions raise no errors."""
    import llvmlite.binding as llvm

    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(_target_machine(), options)
    builder.getModulePassManager().run(module, builder)


def _load_object(symbol: str, code: bytes) -> int:
    """Load an object into memory and define its symbol for later objects; returns its address."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    _kept_alive.append(engine)
    define_symbol(symbol, address)
    return address


@cache
def cache_folder(package: Path) -> Path | None:
    """The folder for the kernels of a package on this processor; None if nothing is to be stored."""
    import llvmlite.binding as llvm

    parent = os.environ.get(VARIABLE)
    if parent == "":
        return None
    sources = sorted({*Path(__file__).resolve().parent.glob("*.py"), *package.glob("*.py")})
    state = hashlib.sha256()
    for part in (
        platform.platform(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        *(f"{module} {metadata.version(module)}" for module in ("llvmlite", "numba", "numpy")),
        *(source.read_text("utf-8") for source in sources),
    ):
        state.update(part.encode() + b"\0")
    return (Path(parent) if parent else user_cache()) / f"kernels-{state.hexdigest()[:16]}"


def _file(package: Path, name: str) -> Path | None:
    folder = cache_folder(package)
    return None if folder is None else folder / f"{re.sub(r'[^A-Za-z0-9_]', '-', name)}.kernel"


def _read_objects(package: Path, name: str) -> Objects | None:
    """The stored objects of a kernel; None if there are none or they are damaged."""
    file = _file(package, name)
    try:
        data = file.read_bytes() if file else b""
    except OSError:
        return None
    header, _, body = data.partition(b"\n")
    try:
        index = json.loads(header)
        if index["digest"] != hashlib.sha256(body).hexdigest():
            raise ValueError("its contents have changed")
        sizes = [(str(symbol), int(size)) for symbol, size in index["objects"]]
    except (ValueError, KeyError, TypeError) as error:
        if data:
            LOG.debug("%s cannot be used: %s", file, error)
        return None
    objects, offset = [], 0
    for symbol, size in sizes:
        objects.append((symbol, body[offset : offset + size]))
        offset += size
    return objects


def _write_objects(package: Path, name: str, objects: Objects) -> None:
    """Store the objects of a kernel, all or none. A folder that cannot be written to is not an error."""
    file = _file(package, name)
    if file is None:
        return
    body = b"".join(code for _, code in objects)
    index = {
        "objects": [(symbol, len(code)) for symbol, code in objects],
        "digest": hashlib.sha256(body).hexdigest(),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as stream:
            stream.write(json.dumps(index).encode() + b"\n" + body)
        os.replace(stream.name, file)
    except OSError as error:
        LOG.debug("%s is not stored: %s", name, error)
