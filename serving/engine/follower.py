"""Follower: a process of an engine that runs the launches of process 0, in its order, and nothing else."""

import dataclasses
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import jax

from entropic_jax import models
from entropic_jax.models import layer_stack
from entropic_jax.speculation import PassCosts

from ..executable_cache import source_digest
from ..options import draft_model
from ..options.control_options import Control
from . import broadcast, process_group
from .assembly import EngineParts, assemble
from .broadcast import COMPILED, name_of
from .device_state import DeviceState
from .embedding_programs import CREATE, Chunk, EmbeddingPrograms, Shape, named_shape
from .options import EngineOptions
from .process_group import STOP, ProcessGroup
from .warmup import examples_of

IDENTITY = "identity"
MODEL_FILES = ("config.json", "calibration.json", "model.safetensors.index.json", "converted.json")
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
ENDS = 65536  # bytes at the beginning and at the end of a file of weights that are compared
SETTINGS = ("ENTROPIC_KERNELS", layer_stack.VARIABLE, "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")


def check_identity(group: ProcessGroup, path: Path, options: EngineOptions) -> None:
    """End all processes unless each was started with the options, the code and the model of process 0.

    Args:
        group: the processes.
        path: the model directory.
        options: the options of the engine.
    """
    identity = identity_of(path, options)
    if not group.leads:
        group.send(IDENTITY, identity)
        return
    for _ in range(group.num_processes - 1):
        process_id, message = group.receive()
        for name, value in identity.items():
            if (other := message.values.get(name)) != value:
                group.leave(
                    f"{name} must be the same in all processes; "
                    f"got {value} in process 0 and {other} in process {process_id}"
                )


def identity_of(path: Path, options: EngineOptions) -> dict[str, str]:
    """The settings that all processes must share, by name."""
    fields = {field.name: repr(getattr(options, field.name)) for field in dataclasses.fields(options)}
    for name in MODEL_FILES:
        file = path / name
        fields[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else "missing"
    fields["model weights"] = weights_digest(path)
    settings = {name: os.environ.get(name, "") for name in SETTINGS}
    return {**fields, **settings, "source code": source_digest()[:16], "jax version": jax.__version__}


def weights_digest(path: Path) -> str:
    """A digest of the names and sizes of the files of weights, and of how each begins and ends.

    Args:
        path: a model directory, or a file of weights.
    """
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(x for kind in WEIGHT_FILES for x in path.glob(kind)):
        size = file.stat().st_size
        with file.open("rb") as stream:
            digest.update(f"{file.name} {size} ".encode() + stream.read(ENDS))
            stream.seek(max(0, size - ENDS))
            digest.update(stream.read(ENDS))
    return digest.hexdigest()[:16]


def follow(
    model: models.Model,
    options: EngineOptions,
    calibration: Any,
    control: Control | None,
    group: ProcessGroup,
) -> int:
    """Run what process 0 runs until it ends; the exit status.

    Args:
        model: with its tokenizer, divided over the mesh.
        options: the options of the engine.
        calibration: the calibration of the model, None without one.
        control: default control of the requests.
        group: the processes.
    """
    _, message = group.receive()
    if message.kind == STOP:
        return 0
    options = dataclasses.replace(options, num_pages=message.values["num_pages"])
    costs = message.values["costs"] and PassCosts.from_json(message.values["costs"])
    parts = assemble(model, options, calibration, control=control, costs=costs)
    return Follower(group, model, parts).run()


class Follower:
    """The programs and the device state of a process that follows process 0."""

    def __init__(self, group: ProcessGroup, model: models.Model, parts: EngineParts) -> None:
        """A follower that has compiled nothing.

        Args:
            group: the processes.
            model: the model.
            parts: the parts of an engine, which has no thread.
        """
        self._group, self._programs = group, parts.programs
        self._device_state = parts.scheduler.device_state
        examples = examples_of(parts.programs, parts.scheduler)
        self._examples = {name_of(key): (key, example) for key, example in examples.items()}
        self._embedding = EmbeddingPrograms(draft_model.target_of(model))
        self._embedding_cache: Any = None  # of the texts that are read

    def run(self) -> int:
        """Run what process 0 runs until it ends; the exit status."""
        while True:
            _, message = self._group.receive()
            match message.kind:
                case process_group.STOP:
                    return 0
                case broadcast.COMPILE:
                    # Process 0 compiles no more programs at once than it has threads for that.
                    name = message.values["program"]
                    threading.Thread(target=self._compile, args=(name,), name="compiler", daemon=True).start()
                case broadcast.RUN:
                    try:
                        self._run(message.values["program"], message.values["leaves"], message.arrays)
                    except Exception as error:
                        self._group.fail(error)

    def _compile(self, name: str) -> None:
        try:
            if (embedding := named_shape(name)) is not None:
                self._embedding.compiled(embedding[1], self._embedding_cache)
            else:
                self._programs.compile(*self._examples[name])
        except Exception as error:
            self._group.fail(error)
        self._group.send(COMPILED, {"program": name})

    def _run(self, name: str, numbers: list[int], arrays: Any) -> None:
        """Launch a program.

        Args:
            name: its name.
            numbers: the numbers of the leaves of its arguments that process 0 has sent.
            arrays: these leaves.
        """
        if (embedding := named_shape(name)) is not None:
            self._embed(name, *embedding, arrays)
            return
        key, example = self._examples[name]
        arguments = tuple(self._device_state if isinstance(x, DeviceState) else x for x in example)
        leaves, structure = jax.tree.flatten(arguments)
        for number, array in zip(numbers, arrays, strict=True):
            leaves[number] = array
        result = self._programs.compiled(key)(*jax.tree.unflatten(structure, leaves))
        state, outputs = result if type(result) is tuple else (result, None)
        if isinstance(state, DeviceState):
            self._device_state = state
        if outputs is not None:
            self._group.watch(name, outputs)

    def _embed(self, name: str, word: str, shape: Shape, arrays: Any) -> None:
        """Launch a program for embeddings.

        Args:
            name: its name.
            word: whether a cache is created, or a chunk is read.
            shape: the shapes of the program.
            arrays: those of the chunk.
        """
        if word == CREATE:
            self._embedding_cache = self._embedding.new_cache(shape)
            return
        program = self._embedding.compiled(shape, self._embedding_cache)
        self._embedding_cache, outputs = program(self._embedding_cache, Chunk(*arrays))
        self._group.watch(name, outputs)
