"""Whether processes reach the coordinator's address, found out before JAX waits for it."""

import contextlib
import logging
import secrets
import socket
import time

from entropic_jax.parameter_tables.table import ParameterError

log = logging.getLogger(__name__)
RETRY = 0.3  # seconds between attempts to reach process 0
NAME_SECONDS = 10.0  # in which the name of its host must be known
ATTEMPT = 5.0  # seconds of an attempt to reach process 0

Address = tuple[str, int]  # host and port


def check_own(address: Address) -> None:
    """Raise ParameterError unless process 0 can listen on its port, and the address leads to process 0.

    JAX listens on all addresses of the host, and then connects process 0 to the stated one like the others.
    """
    _resolve(address)
    family = socket.AF_INET6 if (dual := socket.has_dualstack_ipv6()) else socket.AF_INET
    try:
        listener = socket.create_server(("", address[1]), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise _unusable(address, f"its port is not free: {error.strerror}") from None
    with listener:
        try:
            _call(listener, address)
        except OSError as error:
            reason = f"process 0 does not reach itself there: {error.strerror or error}"
            raise _unusable(address, reason) from None


def _call(listener: socket.socket, address: Address) -> None:
    """Raise OSError unless a connection to the address arrives at the listener; others may arrive before."""
    token, deadline = secrets.token_bytes(16), time.monotonic() + ATTEMPT
    with socket.create_connection(address, ATTEMPT) as caller:
        caller.sendall(token)
        while True:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(1.0)
                if connection.recv(len(token)) == token:
                    caller.close()  # first, so that its port is the one that stays reserved for a while
                    return


def wait_for(address: Address, seconds: float) -> None:
    """Wait until process 0 listens. Raises ParameterError where its host is unknown or cannot be reached.

    Args:
        address: the coordinator's address.
        seconds: to wait at most.
    """
    _resolve(address, min(seconds, NAME_SECONDS))
    deadline, said = time.monotonic() + seconds, False
    while True:
        try:
            left = deadline - time.monotonic()
            socket.create_connection(address, min(ATTEMPT, max(1.0, left))).close()
            return
        except (ConnectionRefusedError, ConnectionResetError, TimeoutError):  # process 0 has not started yet
            if time.monotonic() > deadline:
                raise _unusable(address, f"nothing listens there after {seconds:g} s") from None
            if not said:
                log.warning("process 0 does not answer at %s:%d; waiting %g s at most", *address, seconds)
            said = True
            time.sleep(RETRY)
        except OSError as error:
            raise _unusable(address, error.strerror or str(error)) from None


def _resolve(address: Address, seconds: float = 0.0) -> None:
    """Raise ParameterError unless the host has an address; Kubernetes names one that begins a little later.

    Args:
        address: host and port.
        seconds: to wait for the name.
    """
    deadline, said = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise _unusable(address, error.strerror or str(error)) from None
            if not said:
                log.warning("the host %s has no address yet; waiting %g s at most", address[0], seconds)
            said = True
            time.sleep(RETRY)


def _unusable(address: Address, reason: str) -> ParameterError:
    stated = f"{address[0]}:{address[1]}"
    message = f"coordinator_address must be reachable from every process; got {stated} ({reason})"
    return ParameterError(message, "coordinator_address")
