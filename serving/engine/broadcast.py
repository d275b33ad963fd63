"""Broadcast of launches: process 0 tells the others which program runs next, and with which host arrays.

A message names the program and holds the NumPy arrays among its arguments. What is on the devices already
(parameters, device state, arrays that every process has made alike) is not sent. A program is launched once
all processes have compiled it, so that none waits in a collective for a compiler.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from entropic_jax.speculation import PassCosts

from .process_group import ProcessGroup

CHOICES, COMPILE, COMPILED, RUN = "choices", "compile", "compiled", "run"
Key = tuple[Any, ...]  # of `Programs`


class Broadcaster:
    """Sends what process 0 compiles and launches, in its order."""

    def __init__(self, group: ProcessGroup) -> None:
        """A broadcaster that has sent nothing; `group` are the processes, of which this is process 0."""
        self._group = group
        self._changed = threading.Condition()
        self._compiled: Counter[str] = Counter()  # processes that have compiled a program, by its name
        self._sent: set[str] = set()
        threading.Thread(target=self._receive, name="compiled-programs", daemon=True).start()

    def send_choices(self, num_pages: int, costs: PassCosts | None) -> None:
        """Send what this process has chosen: the number of pages, and the costs of passes."""
        self._group.send(CHOICES, {"num_pages": num_pages, "costs": costs and costs._asdict()})

    def begin_compilation(self, key: Key) -> None:
        """Let the other processes compile a program."""
        name = name_of(key)
        with self._changed:
            if name in self._sent:
                return
            self._sent.add(name)
            self._group.send(COMPILE, {"program": name})

    def await_compilation(self, key: Key) -> None:
        """Wait until the other processes have compiled it."""
        name = name_of(key)
        with self._changed:
            self._changed.wait_for(lambda: self._compiled[name] == self._group.num_processes - 1)

    def launch(self, key: Key, arguments: tuple) -> None:
        """Let the other processes launch a program, which this one launches next.

        Args:
            key: the key of the program.
            arguments: the arguments of the program. NumPy arrays among them are sent.
        """
        leaves = jax.tree.leaves(arguments)
        sent = [number for number, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray | np.generic)]
        values = {"program": name_of(key), "leaves": sent}
        self._group.send(RUN, values, [leaves[number] for number in sent])

    def watch(self, key: Key, outputs: Any) -> None:
        """Watch that a launch of a program ends, see `ProcessGroup.watch`."""
        self._group.watch(name_of(key), outputs)

    def fail(self, error: BaseException) -> None:
        """End all processes because the engine has failed."""
        self._group.fail(error)

    def tell_at_loss(self, tell: Callable[[str], Any]) -> None:
        """Have a function called with a message when another process has died, before this one ends."""
        self._group.at_loss = tell

    def close_at_exit(self, close: Callable[[], Any]) -> None:
        """Have Python close the engine when it exits."""
        self._group.at_exit = close

    def close(self) -> None:
        """End the other processes."""
        self._group.close()

    def _receive(self) -> None:
        while True:
            _, message = self._group.receive()
            if message.kind == COMPILED:
                with self._changed:
                    self._compiled[message.values["program"]] += 1
                    self._changed.notify_all()


def name_of(key: Key) -> str:
    """The name of a program in messages, the same in every process.

    Args:
        key: the key of the program.

    >>> name_of(("decode", 4, None, False, True))
    'decode 4 None False True'
    """
    return " ".join(map(str, key))
