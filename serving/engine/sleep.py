"""Sleep of an engine: its KV pool is released, and requests wait until it wakes up."""

import threading
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import jax

from entropic_jax.pallas.paged_attention import uninitialised

from ..memory import gibibytes
from ..request import RequestError
from .scheduler import Scheduler


class Sleep:
    """Puts a scheduler to sleep and wakes it up. All but `asleep` is for the engine's thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Awake.

        Args:
            scheduler: the scheduler whose device state holds the pool.
        """
        self.scheduler = scheduler
        self._asleep = threading.Event()
        self._waiting: list[Future[None]] = []  # to be resolved once it sleeps
        self._pool: Any = None  # shapes of the pool that was released
        self._reserved: Any = None  # a pool for `wake_up`
        self._held = False  # whether it stays awake or asleep until `wake_up` or `give_up`

    @property
    def asleep(self) -> bool:
        """Whether the pool is released; from any thread."""
        return self._asleep.is_set()

    def begin(self, done: "Future[None]") -> None:
        """Start no further sequence, and sleep when those that run have ended.

        Raises RequestError on an accelerator.
        """
        platforms = {d.platform for d in self._layers()[0].keys.devices()} if not self.asleep else {"cpu"}
        if platforms != {"cpu"}:
            raise RequestError(
                f"the device must be a CPU to sleep, where weights are in host memory; got {platforms.pop()}"
            )
        self.scheduler.paused = True
        self._waiting.append(done)

    def step(self) -> bool:
        """An iteration of the scheduler if it is awake; False if only a request can bring work."""
        scheduler = self.scheduler
        if not self.asleep:
            busy = scheduler.step()
            if not self._waiting or self._held or scheduler.batch.occupied:
                return busy
            scheduler.collect_all()
            scheduler.reset_prefix_cache()
            scheduler.apply_updates()
            self._release()
        scheduler.batch.deliver()
        for done in self._waiting:
            done.set_result(None)
        self._waiting.clear()
        return False

    def prepare(self) -> None:
        """Allocate the pool that `wake_up` will take; stay awake or asleep until then, or until `give_up`.

        Raises RuntimeError where there is not enough memory.
        """
        self._held = True
        if self.asleep and self._reserved is None:
            self._reserved = _allocate(self._pool)

    def give_up(self) -> None:
        """Undo `prepare`."""
        self._held = False
        if self._reserved is not None:
            jax.tree.map(lambda leaf: leaf.delete(), self._reserved)
            self._reserved = None

    def wake_up(self) -> None:
        """Allocate the pool again, and start the sequences that wait. Does nothing if it is awake.

        Raises RuntimeError, and stays asleep, where there is not enough memory.
        """
        if self.asleep:
            self._replace(_allocate(self._pool) if self._reserved is None else self._reserved)
            self._reserved = None
            self._asleep.clear()
        self._held = False
        for done in self._waiting:
            done.set_exception(RequestError("the server was woken up before it slept"))
        self._waiting.clear()
        self.scheduler.paused = False

    def _release(self) -> None:
        """Give back the memory of the pool; pages, tables and counts stay as they are."""
        layers = self._layers()
        shape_of = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        self._pool = jax.tree.map(shape_of, layers)
        self._replace(self._pool)
        jax.tree.map(lambda leaf: leaf.delete(), layers)
        self._asleep.set()

    def _layers(self) -> Any:
        return self.scheduler.device_state.state.cache.layers

    def _replace(self, layers: Any) -> None:
        device_state = self.scheduler.device_state
        cache = device_state.state.cache._replace(layers=layers)
        self.scheduler.device_state = device_state._replace(state=device_state.state._replace(cache=cache))


def _allocate(shapes: Any) -> Any:
    """Arrays of such shapes and shardings, which take memory as they are first written to."""
    leaves = jax.tree.leaves(shapes)
    create = lambda: jax.tree.map(lambda leaf: uninitialised(leaf.shape, leaf.dtype), shapes)
    mesh = getattr(leaves[0].sharding, "mesh", None)
    divided = nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    try:
        with divided:
            program = jax.jit(create, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))
            return jax.block_until_ready(program())
    except (RuntimeError, ValueError) as error:  # JAX raises either
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        size = gibibytes(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))
        raise RuntimeError(f"there is not enough memory for the KV cache of {size}") from error
