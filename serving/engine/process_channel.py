"""Channel between two processes of an engine: authenticated messages of JSON and NumPy arrays over TCP.

Nothing that arrives is executed or unpickled. A connection is accepted only from a process that knows the
secret token, and once from each process. Both sides prove that they know the token without sending it.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

NONCE, SIGNATURE = 32, 32  # bytes
HANDSHAKE_SECONDS = 10.0
LONGEST_HEADER, LONGEST_BODY = 1 << 20, 1 << 31  # bytes
SIZES = struct.Struct("!IQ")  # bytes of the header and of the arrays
IDENTITY = struct.Struct("!I")


class Message(NamedTuple):
    """A message: its kind, values that JSON can hold, and arrays."""

    kind: str
    values: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()


class Connection:
    """One end of a channel; `send` may be called from any thread, `receive` from a single one."""

    def __init__(self, stream: socket.socket, process_id: int) -> None:
        """An end of a channel whose peer has authenticated itself.

        Args:
            stream: connected.
            process_id: the number of the process at the other end.
        """
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream, self.process_id = stream, process_id
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError where the other end has gone."""
        arrays = [np.asarray(array) for array in message.arrays]
        if any(array.dtype.kind not in "biuf" for array in arrays):
            raise ValueError(f"arrays must hold numbers; got {[array.dtype.name for array in arrays]}")
        described = [(array.dtype.str, array.shape) for array in arrays]
        header = json.dumps([message.kind, message.values, described]).encode()
        body = b"".join(array.tobytes() for array in arrays)
        with self._sending:
            self._stream.sendall(SIZES.pack(len(header), len(body)) + header + body)

    def receive(self) -> Message | None:
        """The next message; None at the end. Raises ValueError for what is not a message."""
        sizes = _received(self._stream, SIZES.size)
        if sizes is None:
            return None
        header_size, body_size = SIZES.unpack(sizes)
        if header_size > LONGEST_HEADER or body_size > LONGEST_BODY:
            raise ValueError(
                f"a message must have at most {LONGEST_HEADER} bytes of header and {LONGEST_BODY} of arrays; "
                f"got {header_size} and {body_size}"
            )
        header, body = _received(self._stream, header_size), _received(self._stream, body_size)
        if header is None or body is None:
            return None
        kind, values, described = json.loads(header)
        arrays, begin = [], 0
        for code, shape in described:
            dtype = np.dtype(code)
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(body[begin : begin + size], dtype).reshape(shape))
            begin += size
        return Message(kind, values, arrays)

    def close(self) -> None:
        """Close both directions; the peer then reads the end of the stream."""
        with contextlib.suppress(OSError):  # it has gone already
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


def listen(host: str) -> socket.socket:
    """A listening socket on a free port, of the address if it is this machine's, else of all addresses."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
    except OSError:
        listener.bind(("", 0))
    listener.listen()
    return listener


def accept(listener: socket.socket, token: bytes, num_processes: int, seconds: float) -> list[Connection]:
    """Connections to all other processes, in the order of their ids.

    Args:
        listener: from `listen`; closed at the end.
        token: the secret of the processes.
        num_processes: how many there are, this one included.
        seconds: to wait for all of them.

    Raises:
        TimeoutError: Not all have connected in time.
    """
    accepted: dict[int, Connection] = {}
    changed = threading.Condition()

    def identify(stream: socket.socket) -> None:
        """Identifies a connection in a thread, so that one that stays silent does not block others."""
        stream.settimeout(HANDSHAKE_SECONDS)
        process_id = _identified(stream, token)
        with changed:
            if process_id is None or not 0 < process_id < num_processes or process_id in accepted:
                stream.close()
                return
            accepted[process_id] = Connection(stream, process_id)
            changed.notify_all()

    deadline = time.monotonic() + seconds
    with listener, changed:
        threading.Thread(target=_accept_all, args=(listener, identify), daemon=True).start()
        complete = changed.wait_for(lambda: len(accepted) == num_processes - 1, deadline - time.monotonic())
        with contextlib.suppress(OSError):  # where no thread waits in `accept`
            listener.shutdown(socket.SHUT_RDWR)
    if not complete:
        raise TimeoutError(f"{len(accepted)} of {num_processes - 1} processes have connected")
    return [accepted[number] for number in sorted(accepted)]


def _accept_all(listener: socket.socket, identify: Callable[[socket.socket], None]) -> None:
    """Accept connections until the listener is closed, and identify each in a thread of its own."""
    while True:
        try:
            stream, _ = listener.accept()
        except OSError:  # it has been closed
            return
        threading.Thread(target=identify, args=(stream,), daemon=True).start()


def _identified(stream: socket.socket, token: bytes) -> int | None:
    """The id of the process that has connected; None unless it knows the token."""
    challenge = secrets.token_bytes(NONCE)
    try:
        stream.sendall(challenge)
        answer = _received(stream, IDENTITY.size + NONCE + SIGNATURE)
        if answer is None:
            return None
        claimed, nonce, signature = answer[:4], answer[4 : 4 + NONCE], answer[4 + NONCE :]
        if not hmac.compare_digest(signature, _signature(token, b"other", claimed, challenge, nonce)):
            return None
        stream.sendall(_signature(token, b"first", claimed, challenge, nonce))
    except OSError:
        return None
    return IDENTITY.unpack(claimed)[0]


def connect(address: tuple[str, int], token: bytes, process_id: int) -> Connection:
    """A connection to process 0.

    Args:
        address: where it listens.
        token: the secret of the processes.
        process_id: the number of this process.

    Raises:
        OSError: It cannot be reached, or does not know the token.
    """
    stream = socket.create_connection(address, HANDSHAKE_SECONDS)
    claimed, nonce = IDENTITY.pack(process_id), secrets.token_bytes(NONCE)
    challenge = _received(stream, NONCE) or b""
    stream.sendall(claimed + nonce + _signature(token, b"other", claimed, challenge, nonce))
    proof = _received(stream, SIGNATURE) or b""
    if not hmac.compare_digest(proof, _signature(token, b"first", claimed, challenge, nonce)):
        stream.close()
        raise ConnectionError(f"{address[0]}:{address[1]} is not process 0, or has refused this process")
    return Connection(stream, 0)


def _signature(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"\0".join(parts), "sha256")


def _received(stream: socket.socket, size: int) -> bytes | None:
    """Receives so many bytes; None if the stream ends before them."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = stream.recv_into(view[done:])
        if not count:
            return None
        done += count
    return bytes(data)
