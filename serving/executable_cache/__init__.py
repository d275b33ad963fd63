"""Executable cache: compiled programs on disk, so that a later process neither traces nor compiles them.

JAX's compilation cache spares the work of XLA, but every process still traces a program to find its entry,
which takes seconds for a step that drafts tokens. Here the key is what the trace depends on: the program's
name and static arguments, the shapes of its arrays, the source text of this package, JAX's settings, and the
machine. Programs that the key cannot describe (laws or models defined elsewhere, callbacks) are compiled as
usual. Which devices of one kind run a program is not in the key, only the shape of their mesh: it is compiled
for some, and loaded for others.

Files are kept below XDG_CACHE_HOME (`~/.cache`), or in the folder that ENTROPIC_PROGRAM_CACHE names; if that
is empty, nothing is stored. Loading one runs what is in it, so files and folders that another user could have
written are ignored.
"""

import dataclasses
import hashlib
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from entropic_jax.cpu_runtime.threads import num_threads
from entropic_jax.mesh.devices import default_device, processor, user_cache

from .compilation import compile_program
from .program_files import PACKAGE, LoadedProgram, load_program, refusal, stored_program, write_program
from .read_ahead import ReadAhead

LOG = logging.getLogger("entropic_jax.programs")
VARIABLE = "ENTROPIC_PROGRAM_CACHE"
NAME = __name__.partition(".")[0]
DEPENDENCIES = ("jax", "jaxlib", "numpy", "flax", "llvmlite", "numba")
SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "ENTROPIC_KERNELS", "NPROC")  # read by tracing or compilation
# Of JAX: where it keeps and what it reports, which no program depends on. Of the default device, the kind is
# listed elsewhere.
OTHER_SETTINGS = ("cache", "log", "dump", "profiler", "traceback", "distributed", "default_device")


# One for each program: while a thread compiles it, others that need it wait to load it.
LOCKS: dict[str, threading.Lock] = {}


AHEAD = ReadAhead(lambda file: load_program(file, (default_device(),)))


class NotStorableError(Exception):
    """A program that the cache cannot hold, with the reason."""


def load_or_compile(
    function: Callable[..., Any], arguments: tuple[Any, ...], donate_argnums: int | tuple[int, ...] = ()
) -> tuple[Callable[..., Any], bool]:
    """The compiled program of a function, from the cache if it is there.

    Args:
        function: the function of `arguments`; its static arguments are bound by `functools.partial`.
        arguments: arrays, or their shapes; only these count.
        donate_argnums: those that the program consumes.

    Returns:
        The program, and whether it was compiled now.
    """
    file = _file(function, arguments, donate_argnums)
    # What could not be stored before is left to JAX's cache.
    if file is None or refusal(file).exists():
        return compile_program(function, arguments, donate_argnums), True
    with LOCKS.setdefault(file.name, threading.Lock()):
        return _load_or_compile(function, arguments, donate_argnums, file)


def begin_reading(
    function: Callable[..., Any], arguments: tuple[Any, ...], donate_argnums: int | tuple[int, ...] = ()
) -> Callable[[], Callable[..., Any] | None]:
    """Begin to read a stored program in a thread, which takes XLA a second for a large one.

    Args:
        function: as for `load_or_compile`.
        arguments: as for `load_or_compile`. They may be consumed while the thread runs.
        donate_argnums: as for `load_or_compile`.

    Returns:
        A function that waits for the program; it returns None where none is stored.
    """
    file = _file(function, arguments, donate_argnums)
    if file is None or not file.exists():
        return lambda: None
    devices, programs = _devices(arguments), list[LoadedProgram | None]()
    thread = threading.Thread(target=lambda: programs.append(_loaded(file, devices)))
    thread.start()

    def wait() -> Callable[..., Any] | None:
        thread.join()
        return None if programs[0] is None else programs[0].called_with(arguments)

    return wait


def read_ahead(work: str) -> None:
    """Begin to load the programs that the latest process with this work has used.

    Args:
        work: a name of all that decides which programs are used.
    """
    if (folder := _folder()) is not None:
        AHEAD.begin(folder, work)


def is_stored(
    function: Callable[..., Any], arguments: tuple[Any, ...], donate_argnums: int | tuple[int, ...] = ()
) -> bool:
    """Whether the cache holds the program of a function, sound and with its kernels; it is not loaded.

    Args:
        function: as for `load_or_compile`.
        arguments: as for `load_or_compile`.
        donate_argnums: as for `load_or_compile`.
    """
    file = _file(function, arguments, donate_argnums)
    return file is not None and stored_program(file) is not None


def _file(
    function: Callable[..., Any], arguments: tuple[Any, ...], donate_argnums: int | tuple[int, ...]
) -> Path | None:
    """The file of a stored program; None if it is not stored."""
    folder = _folder()
    if folder is None:
        return None
    try:
        return folder / f"{key(function, arguments, donate_argnums)[:32]}.program"
    except NotStorableError as reason:
        LOG.debug("a program is not stored: %s", reason)
        return None


def _load_or_compile(
    function: Callable[..., Any], arguments: tuple[Any, ...], donate_argnums: Any, file: Path
) -> tuple[Callable[..., Any], bool]:
    """Like `load_or_compile`, for a program that can be stored.

    Args:
        function: as for `load_or_compile`.
        arguments: as for `load_or_compile`.
        donate_argnums: as for `load_or_compile`.
        file: where it is stored.
    """
    program = _loaded(file, _devices(arguments))
    if program is not None:
        return program.called_with(arguments), False

    def named(*arguments: Any) -> Any:
        return function(*arguments)

    # XLA can store what it has compiled, but not what it has loaded. The name is part of the key of JAX's
    # cache, which therefore does not hold this program.
    named.__name__ = f"{_innermost(function).__name__}_{secrets.token_hex(4)}"
    compiled = compile_program(named, arguments, donate_argnums)
    write_program(file, compiled, _devices(arguments))
    return compiled, True


def _loaded(file: Path, devices: tuple[jax.Device, ...]) -> LoadedProgram | None:
    """The program in a file, which may have been read ahead; None if there is none that can be used."""
    ahead = AHEAD.take(file)
    return ahead if ahead is not None and ahead.devices == devices else load_program(file, devices)


def _innermost(function: Any) -> Any:
    """The function inside nested partials, which names the program in profiles."""
    while isinstance(function, partial):
        functions = [x for x in function.args if callable(x) and not isinstance(x, type | Mesh)]
        function = functions[-1] if functions else function.func
    return function


def key(
    function: Callable[..., Any], arguments: tuple[Any, ...], donate_argnums: int | tuple[int, ...] = ()
) -> str:
    """A hash of everything that the compiled program depends on.

    Args:
        function: as for `load_or_compile`.
        arguments: as for `load_or_compile`.
        donate_argnums: as for `load_or_compile`.

    Raises:
        NotStorableError: for a function or an argument that it cannot describe.
    """
    leaves, structure = jax.tree.flatten(arguments)
    _devices(arguments)
    parts = [_environment(), describe(function), repr(donate_argnums), _structure(structure)]
    parts += [_array(leaf) for leaf in leaves]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def describe(value: Any) -> str:
    """A text that is the same in every process for equal values, and different for others.

    Raises:
        NotStorableError: for a value of a kind that has no such text, or defined outside this package.

    >>> describe((1, "two", None))
    '(1,"two",None,)'
    """
    match value:
        case None | bool() | int() | float() | bytes():
            return repr(value)
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case Mesh():
            return f"Mesh{dict(value.shape)}{value.axis_types}"
        case np.dtype():
            return f"dtype {value}"
        case partial():
            return f"partial({describe(value.func)}{describe(value.args)}{describe(value.keywords)})"
        case Mapping():
            return "{" + "".join(f"{describe(k)}:{describe(v)}," for k, v in value.items()) + "}"
        case set() | frozenset():
            return describe(sorted(map(describe, value)))
        case _ if type(value) in (tuple, list):
            return "(" + "".join(f"{describe(item)}," for item in value) + ")"
        case type() if value.__module__.partition(".")[0] in (NAME, "builtins", "numpy", "jax", "ml_dtypes"):
            return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "__qualname__"):
        return _global_name(value)
    kind = type(value)
    fields: list[str] | tuple[str, ...] | None = getattr(kind, "_fields", None)
    if fields is None and dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
    if fields is None or kind.__module__.partition(".")[0] != NAME:
        raise NotStorableError(f"it depends on {kind.__module__}.{kind.__qualname__}")
    return describe(kind) + describe({name: getattr(value, name) for name in fields})


def _global_name(function: Any) -> str:
    """The name under which a function of this package can be imported."""
    module, name = getattr(function, "__module__", None) or "", function.__qualname__
    imported: Any = sys.modules.get(module)
    for part in name.split("."):
        imported = getattr(imported, part, None)
    if module.partition(".")[0] != NAME or imported is not function:
        raise NotStorableError(f"{module}.{name} is not a function of this package")
    return f"{module}.{name}"


def _structure(tree: Any) -> str:
    """The description of a pytree's structure, with the static fields of its nodes."""
    node = tree.node_data()
    if node is None:
        return "*" if tree.num_leaves else "None"
    kind, static = node
    if kind.__module__.partition(".")[0] not in (NAME, "builtins"):
        raise NotStorableError(f"an argument is a {kind.__module__}.{kind.__qualname__}")
    return f"{describe(kind)}{describe(static)}[{','.join(map(_structure, tree.children()))}]"


def _array(leaf: Any) -> str:
    """The shape, type and division of an array, which may have been consumed: its numbers do not count."""
    device, division = default_device(), ""
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set != {device}:
        if not isinstance(leaf.sharding, NamedSharding):
            raise NotStorableError(f"an array is not on {device} alone, nor on a mesh")
        division = f"{describe(leaf.sharding.mesh)}{leaf.sharding.spec}"
    kind = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return f"{kind.dtype}{kind.shape}{getattr(kind, 'weak_type', False)}{division}"


def _devices(arguments: Any) -> tuple[jax.Device, ...]:
    """The devices that run a program with these arguments, in the order of their mesh if there is one."""
    leaves = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    orders = {
        tuple(leaf.sharding.mesh.devices.flat)
        for leaf in leaves
        if isinstance(leaf.sharding, NamedSharding) and len(leaf.sharding.device_set) > 1
    }
    if len(orders) > 1:
        raise NotStorableError("its arguments are on several meshes")
    return orders.pop() if orders else (default_device(),)


@cache
def source_digest() -> str:
    """A hash of the source text of this package."""
    state = hashlib.sha256()
    for folder, folders, files in os.walk(PACKAGE, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                state.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return state.hexdigest()


def _environment() -> str:
    """Everything that a program depends on besides its arguments."""
    device = default_device()
    jax_settings: Mapping[str, Any] = jax.config.values
    relevant = {k: v for k, v in jax_settings.items() if not any(word in k for word in OTHER_SETTINGS)}
    parts = [f"{name} {metadata.version(name)}" for name in DEPENDENCIES if find_spec(name)]
    parts += [f"{name}={os.environ.get(name, '')}" for name in SETTINGS]
    parts += [f"{name}={value}" for name, value in sorted(relevant.items())]
    parts += [source_digest(), _machine(), str(num_threads()), sys.version]
    parts += [f"process {jax.process_index()} of {jax.process_count()}"]  # each has devices of its own
    return "\0".join([*parts, device.platform, device.device_kind, device.client.platform_version])


@cache
def _machine() -> str:
    return processor()


def _folder() -> Path | None:
    parent = os.environ.get(VARIABLE)
    if parent == "":
        return None
    return (Path(parent) if parent else user_cache()) / f"programs-{source_digest()[:16]}"
