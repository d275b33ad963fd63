"""Machine code of the kernels: compiled once, kept on disk, loaded.

A kernel is described by a function that yields its C functions in the order in which they need one another,
`(symbol, function)` each, compiled by Numba. Their objects are kept in a folder of their own for every
processor and every state of the sources. Whoever finds them there imports no Numba.

Objects refer to one another, to the threads' board and to the C library by name, never by address.
ENTROPIC_KERNEL_CACHE names another folder; if it is empty, nothing is kept.
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

from .run_once import once

LOG = logging.getLogger("entropic_jax.kernels")
VARIABLE = "ENTROPIC_KERNEL_CACHE"
PREFIX = "entropic_"  # of every symbol of ours
# What the objects may call besides: anything else would need a library that is not there without Numba.
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

Parts = list[tuple[str, bytes]]
Source = Callable[[], Iterator[tuple[str, Any]]]
_alive: list[Any] = []  # compiled code must outlive every executable that calls it


@once
def compiled(name: str, source: Source) -> int:
    """The address of the last C function that `source` yields, whose symbol is `name`."""
    address = 0
    for symbol, code in _find(name) or ():
        address = _load(symbol, code)
    if address:
        return address
    parts: Parts = []
    whole = True
    for symbol, function in source():
        code = _object(function, symbol)
        if code is None:
            whole, address = False, function.address
            _alive.append(function)
            name_address(symbol, address)
        else:
            parts.append((symbol, code))
            address = _load(symbol, code)
    if whole:
        _keep(name, parts)
    return address


def name_address(symbol: str, address: int) -> None:
    """Let code that is loaded later find an address by its name."""
    import llvmlite.binding as llvm

    llvm.add_symbol(symbol, address)


def _machine() -> Any:
    """A target machine: an engine owns the one it is given."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    # For code that is loaded anywhere: nothing is near, so every address is a whole word.
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, codemodel="jitdefault", jit=True
    )


def _object(function: Any, symbol: str) -> bytes | None:
    """Machine code of a function that Numba compiled, under a name; None if it cannot stand alone."""
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(function.inspect_llvm())
    entry = module.get_function(function.native_name)
    entry.name = symbol
    for inner in module.functions:
        if not inner.is_declaration and inner.name != symbol:
            inner.linkage = "internal"
    _simplify(module)
    outside = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")}
    foreign = {name for name in outside if name not in C_LIBRARY and not name.startswith(PREFIX)}
    if foreign:
        LOG.debug("%s is not kept: it needs %s", symbol, ", ".join(sorted(foreign)))
        return None
    return _machine().emit_object(module)


def _simplify(module: Any) -> None:
    """Drop what only an error would reach: these functions raise none."""
    import llvmlite.binding as llvm

    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(_machine(), options)
    builder.getModulePassManager().run(module, builder)


def _load(symbol: str, code: bytes) -> int:
    """Put an object into memory; the address of its symbol, which later objects find by name."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(symbol)
    _alive.append(engine)
    name_address(symbol, address)
    return address


@cache
def folder() -> Path | None:
    """Where the objects of this processor and these sources lie; None if none are to be kept."""
    import llvmlite.binding as llvm

    given = os.environ.get(VARIABLE)
    if given == "":
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    here = Path(__file__).resolve().parent
    sources = sorted(
        [*here.glob("*.py"), *here.parent.glob("*/cpu*.py"), *here.parent.glob("*/reference.py")]
    )
    state = hashlib.sha256()
    for part in (
        platform.platform(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        *(f"{package} {metadata.version(package)}" for package in ("llvmlite", "numba", "numpy")),
        *(source.read_text("utf-8") for source in sources),
    ):
        state.update(part.encode() + b"\0")
    return (Path(given) if given else home / "entropic_jax") / f"kernels-{state.hexdigest()[:16]}"


def _file(name: str) -> Path | None:
    place = folder()
    return None if place is None else place / f"{re.sub(r'[^A-Za-z0-9_]', '-', name)}.kernel"


def _find(name: str) -> Parts | None:
    """The objects of a kernel as they were kept; None where there are none or they are damaged."""
    file = _file(name)
    try:
        data = file.read_bytes() if file else b""
    except OSError:
        return None
    head, _, body = data.partition(b"\n")
    try:
        index = json.loads(head)
        if index["digest"] != hashlib.sha256(body).hexdigest():
            raise ValueError("its contents have changed")
        sizes = [(str(symbol), int(size)) for symbol, size in index["parts"]]
    except (ValueError, KeyError, TypeError) as error:
        if data:
            LOG.debug("%s cannot be used: %s", file, error)
        return None
    found, place = [], 0
    for symbol, size in sizes:
        found.append((symbol, body[place : place + size]))
        place += size
    return found


def _keep(name: str, parts: Parts) -> None:
    """Write the objects of a kernel, all or nothing; a folder that cannot be written keeps none."""
    file = _file(name)
    if file is None:
        return
    body = b"".join(code for _, code in parts)
    index = {
        "parts": [(symbol, len(code)) for symbol, code in parts],
        "digest": hashlib.sha256(body).hexdigest(),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as stream:
            stream.write(json.dumps(index).encode() + b"\n" + body)
        os.replace(stream.name, file)
    except OSError as error:
        LOG.debug("%s is not kept: %s", name, error)
