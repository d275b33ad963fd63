"""Process group: the processes of one engine, their channels, and the end of all when one of them ends.

Process 0 has a channel to each of the others. A process counts as dead when its channel ends, or when it is
silent: every process sends a heartbeat each second. Programs of a mesh cannot continue without one of its
processes, so the others then exit with a message and status 1; a supervisor restarts them.
"""

import atexit
import contextlib
import logging
import math
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, PartitionSpec

from entropic_jax.mesh import SHARDS
from entropic_jax.parameter_tables.table import ParameterError

from ..options.processes import ProcessOptions, address_of
from .coordinator_address import check_own, wait_for
from .process_channel import Connection, Message, accept, connect, listen

log = logging.getLogger(__name__)
ENDED = 1  # exit status of a process that cannot go on
BEAT = 1.0  # seconds between signs of life
SILENT_BEATS = 8  # without one, after which a process counts as dead
FIRST_LAUNCH = 300  # seconds that a program's first launch may take before it counts as stuck in a collective
LAUNCH = 8  # seconds that its later ones may take at least,
LAUNCH_RATIO = 100  # and as a multiple of the longest before, up to FIRST_LAUNCH
GRACE = 2.0  # seconds in which the death of a process explains why a program has failed
FAREWELL = 1.0  # seconds in which clients are told that another process has died
MARGIN = 60  # seconds: JAX's timeouts, which abort the process, come after those of this module
KEY = "entropic_jax/channel"  # in JAX's key-value store
ALIVE, STOP = "alive", "stop"


def start_processes(options: ProcessOptions) -> "ProcessGroup | None":
    """Connect this process with the others, before JAX is used; None for a process that is alone.

    Raises:
        ParameterError: The coordinator's address cannot be used, or the environment does not say which.
    """
    if options.alone:
        return None
    address = address_of(options)
    if address is not None and options.process_id == 0:
        check_own(address)
    elif address is not None and options.process_id is not None:
        wait_for(address, options.initialization_timeout)
    seconds = int(options.initialization_timeout)
    timer = threading.Timer(seconds, end_process, (_late(options),))
    timer.daemon = True
    timer.start()
    try:
        return _connected(options, seconds)
    finally:
        timer.cancel()


def _connected(options: ProcessOptions, seconds: int) -> "ProcessGroup | None":
    """The processes, connected with each other within so many seconds. Raises ParameterError."""
    try:
        jax.distributed.initialize(
            options.coordinator_address,
            options.num_processes,
            options.process_id,
            cluster_detection_method=None if options.distributed else "deactivate",
            initialization_timeout=seconds + MARGIN,
        )
    except (ValueError, RuntimeError) as error:
        raise ParameterError(
            "distributed must be set where JAX detects the processes, before JAX is used; "
            f"got {type(error).__name__}: {str(error).splitlines()[0]}",
            "distributed",
        ) from None
    state = distributed.global_state
    if state.num_processes == 1:
        return None
    host = str(state.coordinator_address).rpartition(":")[0].strip("[]")
    try:
        connections = _connections(state.client, host, state.process_id, state.num_processes, seconds)
    except OSError as error:
        raise ParameterError(f"{_late(options)} ({error})", "num_processes") from None
    return ProcessGroup(state.process_id, state.num_processes, connections)


def _late(options: ProcessOptions) -> str:
    return (
        f"num_processes must be the number of processes that start; got {options.num_processes}, and not all "
        f"of them connected within {options.initialization_timeout:g} s"
    )


def _connections(
    client: Any, host: str, process_id: int, num_processes: int, seconds: int
) -> list[Connection]:
    """The channels of a process, whose port and token go through JAX's key-value store.

    Args:
        client: JAX's client of the store.
        host: the host of process 0.
        process_id: the number of this process.
        num_processes: how many there are.
        seconds: to wait for each other.
    """
    if process_id == 0:
        listener, token = listen(host), secrets.token_bytes(32)
        client.key_value_set(KEY, f"{listener.getsockname()[1]} {token.hex()}")
        return accept(listener, token, num_processes, seconds + MARGIN)
    port, token = client.blocking_key_value_get(KEY, 1000 * (seconds + MARGIN)).split()
    return [connect((host, int(port)), bytes.fromhex(token), process_id)]


class ProcessGroup:
    """This process among those of an engine."""

    def __init__(self, process_id: int, num_processes: int, connections: list[Connection]) -> None:
        """Begin to listen to the others, and to watch them.

        Args:
            process_id: the number of this process.
            num_processes: how many there are.
            connections: to all others in process 0, to process 0 in the others.
        """
        self.process_id, self.num_processes = process_id, num_processes
        self._connections = connections
        self._received: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._silent = dict.fromkeys((c.process_id for c in connections), 0)  # beats
        self._launched: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waited = 0  # beats that the oldest launch has taken
        self._launch_limit = FIRST_LAUNCH  # beats that it may take
        self._closing = False
        self._failed = threading.Event()
        for number, connection in enumerate(connections):
            self._start(f"process-channel-{number}", self._listen, connection)
        for name, function in (("beat", self._beat), ("watch", self._watch), ("launches", self._wait)):
            self._start(f"process-{name}", function)
        self.at_exit: Callable[[], Any] | None = None  # closes the engine, once there is one
        self.at_loss: Callable[[str], Any] | None = None  # tells the engine's clients that another has died
        atexit.register(self._exit)  # runs before JAX's, which waits for all processes

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.process_id == 0

    def settle(self, mesh: Mesh) -> None:
        """Connect the devices of a mesh by running a collective.

        JAX's own supervision aborts a process when process 0 dies, without a message that names it. On CPUs
        it is not needed any more once the devices are connected, and ends here.
        """
        ones = np.ones(1, np.int32)
        program = jax.shard_map(
            lambda x: jax.lax.psum(x, SHARDS),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        jax.block_until_ready(jax.jit(program)(ones))
        if jax.default_backend() == "cpu":
            jax.distributed.shutdown()

    def send(self, kind: str, values: Mapping[str, Any] | None = None, arrays: Any = ()) -> None:
        """Send a message: from process 0 to all others, from the others to process 0.

        Args:
            kind: its name.
            values: what JSON can hold.
            arrays: NumPy arrays.
        """
        for connection in self._connections:
            try:
                connection.send(Message(kind, values or {}, arrays))
            except OSError:
                self._lost(connection.process_id)

    def receive(self) -> tuple[int, Message]:
        """The next message and the process that has sent it."""
        return self._received.get()

    def watch(self, program: str, outputs: Any) -> None:
        """Watch that a launch ends.

        Args:
            program: the name of the program.
            outputs: arrays of it that no later launch consumes.
        """
        self._launched.put((program, outputs))

    def close(self) -> None:
        """End the group in order. In process 0, the others end as well, with the status 0."""
        if self._closing:
            return
        self._closing = True
        if self.leads:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # it has gone
                    connection.send(Message(STOP, {}))
        jax.distributed.shutdown()

    def finish(self) -> None:
        """End the group in order once process 0 has come here, too."""
        while not self.leads and self.receive()[1].kind != STOP:
            pass
        self.close()

    def fail(self, error: BaseException) -> NoReturn:
        """End this process, and thereby the others, because a program or the engine has failed.

        If another process has died, that is the reason, and the message says so.
        """
        if self._failed.wait(GRACE):
            time.sleep(2 * FAREWELL)  # the thread that has noticed ends this process
        log.error("the engine has failed", exc_info=error)
        message = f"process {self.process_id} has failed: {error}"
        self._take_leave(message)
        self.leave(message)

    def leave(self, message: str, status: int = ENDED) -> NoReturn:
        """End this process at once. The others notice, and end as well.

        Args:
            message: a message of one line.
            status: the exit status.
        """
        end_process(message, status)

    def _exit(self) -> None:
        """End the group when Python exits, in order if there is an engine."""
        if self.at_exit is not None:
            self.at_exit()
        if not self._closing:
            _flush()
            os._exit(ENDED)

    # Threads.

    def _start(self, name: str, function: Any, *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, name=name, daemon=True).start()

    def _listen(self, connection: Connection) -> None:
        """Queue what comes over a channel until its end."""
        while True:
            try:
                message = connection.receive()
            except Exception as error:  # whatever is no message ends the channel
                log.debug("channel to process %d: %s", connection.process_id, error)
                message = None
            if message is None:
                self._lost(connection.process_id)
                return
            self._silent[connection.process_id] = 0
            if message.kind == STOP:
                self._closing = True
            if message.kind != ALIVE:
                self._received.put((connection.process_id, message))

    def _beat(self) -> None:
        while not self._closing:
            self.send(ALIVE)
            time.sleep(BEAT)

    def _watch(self) -> None:
        """Count beats rather than seconds, so that time in which this process was paused is no silence."""
        while not self._closing:
            time.sleep(BEAT)
            for process_id in self._silent:
                self._silent[process_id] += 1
                if self._silent[process_id] > SILENT_BEATS and not self._closing:
                    self._lost(process_id, f"gave no sign of life for {SILENT_BEATS} s")
            self._waited += 1
            if self._waited > self._launch_limit and not self._closing:
                message = f"a launch has not ended within {self._launch_limit} s: stuck in a collective"
                self._take_leave(message)
                self.leave(message)

    def _wait(self) -> None:
        """Wait for the launches in their order."""
        limits: dict[str, int] = {}
        while True:
            self._waited = -(2**31)  # no launch runs
            program, outputs = self._launched.get()
            self._launch_limit = limits.get(program, FIRST_LAUNCH)
            self._waited, begin = 0, time.monotonic()
            try:
                jax.block_until_ready(outputs)
            except Exception as error:
                if not self._closing:
                    self.fail(error)
            limit = max(LAUNCH, math.ceil(LAUNCH_RATIO * (time.monotonic() - begin)))
            limits[program] = min(FIRST_LAUNCH, max(limit, limits.get(program, 0)))

    def _lost(self, process_id: int, reason: str = "has ended") -> None:
        """End this process because another is dead, unless all are about to end."""
        if self._closing:
            return
        self._failed.set()
        message = f"process {process_id} of {self.num_processes} {reason}; without it, this process ends"
        self._take_leave(message)
        self.leave(message)

    def _take_leave(self, message: str) -> None:
        """Tell the clients of the engine why this process is about to end."""
        tell, self.at_loss = self.at_loss, None
        if tell is not None:
            with contextlib.suppress(Exception):  # of an engine that is in the middle of something
                tell(message)
                time.sleep(FAREWELL)


_LEAVING = threading.Lock()


def end_process(message: str, status: int = ENDED) -> NoReturn:
    """End this process at once; threads stuck in a collective cannot be interrupted otherwise.

    Args:
        message: a message of one line.
        status: the exit status.
    """
    with _LEAVING:  # the first message counts, and the process never leaves this block
        log.error(message)
        _flush()
        os._exit(status)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):  # closed
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
