"""ZMQ sockets with this project's defaults. One place for limits, so that no queue is endless.

Called by: everything that talks over ZMQ, on a context of its own (`zmq.Context` or `zmq.asyncio.Context`: the
socket is of the context's kind). A socket belongs to one thread or event loop.
Invariants: closing never waits for unsent messages (linger 0); every queue has a bound, of ours or, where it is said,
of what was asked for; only ipc:// addresses that fit the kernel's 107 bytes, or tcp:// ones, are taken.

When the peer dies: a PUSH keeps up to its bound and then blocks or refuses; a PUB drops; a PULL and a SUB are
silent. Who must know watches the peer's process instead.
"""

from typing import TypeVar

import zmq
import zmq.asyncio

from .errors import TransportError

S = TypeVar("S", zmq.Socket[bytes], zmq.asyncio.Socket)

MAX_QUEUED_MESSAGES = 16384
"""Bound of every queue, in messages, unless its maker names another."""
UNBOUNDED = 0
MAX_IPC_PATH_BYTES = 107


def check_address(address: str) -> None:
    """Raise TransportError unless `address` is a ZMQ address that can work."""
    scheme, separator, path = address.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not path:
        raise TransportError(f"{address!r} is not an ipc:// or tcp:// address")
    num_bytes = len(path.encode())
    if scheme == "ipc" and num_bytes > MAX_IPC_PATH_BYTES:
        raise TransportError(
            f"the socket path {path!r} has {num_bytes} bytes; the kernel takes {MAX_IPC_PATH_BYTES}. "
            "Choose a shorter folder"
        )


def bind_pull(context: "zmq.Context[S]", address: str) -> S:
    """Make a PULL socket that many `connect_push` write to."""
    return _bind(_make(context, zmq.PULL), address)


def connect_push(
    context: "zmq.Context[S]", address: str, *, max_queued_messages: int = MAX_QUEUED_MESSAGES
) -> S:
    """Make a PUSH socket; sending blocks when the queue is full, or raises zmq.Again with zmq.NOBLOCK.

    max_queued_messages: UNBOUNDED: never full. For messages that must not be lost, and of which a peer that does not
    read causes only so many
    """
    socket = _make(context, zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, max_queued_messages)
    return _connect(socket, address)


def bind_pub(context: "zmq.Context[S]", address: str) -> S:
    """Make a PUB socket: slow or absent subscribers lose messages, so each message must stand alone."""
    return _bind(_make(context, zmq.PUB), address)


def bind_router(context: "zmq.Context[S]", address: str) -> S:
    """Make a ROUTER socket, which answers many REQ or DEALER sockets; what goes to one that left is dropped."""
    return _bind(_make(context, zmq.ROUTER), address)


def connect_sub(context: "zmq.Context[S]", address: str, topic: bytes = b"") -> S:
    """Make a SUB socket that hears all messages that begin with `topic`."""
    socket = _make(context, zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    return _connect(socket, address)


def _make(context: "zmq.Context[S]", kind: int) -> S:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    return socket


def _bind(socket: S, address: str) -> S:
    try:
        check_address(address)
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise TransportError(f"cannot bind {address}: {error}") from error
    except TransportError:
        socket.close()
        raise
    return socket


def _connect(socket: S, address: str) -> S:
    try:
        check_address(address)
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise TransportError(f"cannot connect to {address}: {error}") from error
    except TransportError:
        socket.close()
        raise
    return socket
