"""Files of the executable cache: a program written, checked, and loaded for the devices that run it."""

import contextlib
import hashlib
import io
import logging
import os
import pickle
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import serialize_executable
from jaxlib import xla_client

import entropic_jax
from entropic_jax.cpu_runtime.custom_call import register_stored, registered

LOG = logging.getLogger("entropic_jax.programs")
PACKAGE = Path(entropic_jax.__file__).resolve().parent


class StoredProgram(NamedTuple):
    """Content of a file."""

    kernels: dict[str, str]  # CPU kernels that it calls, and their packages
    executable: bytes
    result: bytes  # pickled tree of the results, with numbers in place of arrays
    devices: tuple[int, ...]  # that it was compiled for, in their order


def _is_ours(path: Path) -> bool:
    """Whether only this user can have written a file or a folder."""
    if not hasattr(os, "getuid"):
        return True
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def stored_program(file: Path) -> StoredProgram | None:
    """The program in a file, with its kernels in this process; None if there is none that can be used."""
    try:
        if not file.exists():
            return None
        if not (_is_ours(file.parent) and _is_ours(file)):
            raise ValueError("another user could have written it")
        data = file.read_bytes()
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise ValueError("it is damaged")
        stored = StoredProgram(*pickle.loads(data[32:]))
        for kernel, package in stored.kernels.items():
            if not register_stored(kernel, PACKAGE / package):
                raise ValueError(f"the kernel {kernel} is not stored")
        return stored
    except Exception as error:  # whatever it is, the program can be compiled
        LOG.info("%s cannot be used: %s", file, error)
        return None


class LoadedProgram(NamedTuple):
    """A program that is loaded for its devices, without the structure of its arguments."""

    devices: tuple[jax.Device, ...]
    executable: Any
    arguments: list[Any]  # what is known of each
    result: bytes  # as in `StoredProgram`
    no_kwargs: bool

    def called_with(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """The program of arguments with the structure of these."""
        structure = jax.tree.structure((arguments, {}))
        result = jax.tree.structure(pickle.loads(self.result))
        described = structure.unflatten(self.arguments)
        return jax.stages.Compiled(self.executable, [], described, result, no_kwargs=self.no_kwargs)


def load_program(file: Path, devices: tuple[jax.Device, ...]) -> LoadedProgram | None:
    """The program in a file; None if there is none, or it cannot be used.

    Args:
        file: where it is stored.
        devices: the devices that run the program, of the kind that it was compiled for.
    """
    stored = stored_program(file)
    if stored is None:
        return None
    try:
        reader = _ForDevices(io.BytesIO(stored.executable), dict(zip(stored.devices, devices, strict=True)))
        unloaded, arguments, no_kwargs = reader.load()
        return LoadedProgram(devices, unloaded.load(), arguments, stored.result, no_kwargs)
    except Exception as error:
        LOG.info("%s cannot be used: %s", file, error)
        return None


class _ForDevices(pickle.Unpickler):
    """Loads a program that `serialize_executable.serialize` has stored, perhaps for other devices.

    JAX would look for the devices that the program was compiled for, and XLA's CPU client would run it there.
    """

    def __init__(self, stream: io.BytesIO, devices: dict[int, jax.Device]) -> None:
        super().__init__(stream)
        self.devices, self.client = devices, next(iter(devices.values())).client

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        """The executable, the device or the client that a persistent id stands for."""
        match pid:
            case ("exec", executable):
                devices = tuple(self.devices.values())
                return self.client.deserialize_executable(executable, devices, _assigned_to(devices))
            case ("device", number):
                return self.devices[number]
            case ("client",):
                return self.client
        raise pickle.UnpicklingError(f"it refers to {pid[:1]}")


def _assigned_to(devices: tuple[jax.Device, ...]) -> Any:
    """XLA's options of a program that runs on devices, each with a part."""
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = 1
    options.num_partitions = build.num_partitions = len(devices)
    build.use_spmd_partitioning = len(devices) > 1
    assignment = np.array([[device.id for device in devices]])
    build.device_assignment = xla_client.DeviceAssignment.create(assignment)
    return options


def write_program(file: Path, program: Any, devices: tuple[jax.Device, ...]) -> None:
    """Store a program. One that cannot be stored, or a folder that cannot be written to, is not an error.

    Args:
        file: where it is stored.
        program: compiled now.
        devices: the devices that the program was compiled for.
    """
    try:
        file.parent.mkdir(0o700, parents=True, exist_ok=True)  # whatever the umask says, see `_is_ours`
        executable, _, structure = serialize_executable.serialize(program)
        result = jax.tree.unflatten(structure, range(structure.num_leaves))
        text = program.as_text()
        kernels = {name: package for name, package in _packages() if f'custom_call_target="{name}"' in text}
        body = pickle.dumps(
            tuple(
                StoredProgram(
                    kernels, executable, pickle.dumps(result), tuple(device.id for device in devices)
                )
            )
        )
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as stream:
            stream.write(hashlib.sha256(body).digest() + body)
        os.replace(stream.name, file)
    except Exception as error:
        LOG.info("a program is not stored: %s", error)
        with contextlib.suppress(OSError):
            refusal(file).touch()


def refusal(file: Path) -> Path:
    """The file that exists where a program could not be stored."""
    return file.with_suffix(".refused")


def _packages() -> Iterator[tuple[str, str]]:
    """The CPU kernels of this process, and the packages that hold them, relative to this one."""
    for name, package in registered().items():
        yield name, package.relative_to(PACKAGE).as_posix()
