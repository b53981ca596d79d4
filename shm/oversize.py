"""Oversize: what a ring does not take goes over ZMQ, one PUSH and PULL for each reader; the ring carries a ticket.

Called by: channel.py, in the process of either end, by the thread of that end. The ticket stands in the ring where the
payload would, so order is the ring's, and so are waiting, deadlines and the death of the other side.

  sender    wait until few enough tickets and bytes are unread; wait for room in the ring; push the payload to every
            reader; publish the ticket
  receiver  read the ticket; wait for the payload; use it; release the ticket

A ticket is unread until its reader has released it, which the sender sees by the ring's cursors: no word is shared
beyond those. ZMQ itself never refuses and never blocks, since its bounds are wider than the bound on tickets.

Nothing exists before the first such payload: no socket, no thread, no folder. The ticket says where to go, in a folder
that only this user may enter.

Invariants: the payload with a ticket's serial number is in the reader's socket, or on its way, when the ticket can be
read; serial numbers rise. A payload whose ticket was never published (its sender failed in between) is passed over.

When the peer dies: the sender learns it as of any full ring. The receiver looks every 0.25 s while it waits for a
payload, and raises QueueClosedError.
"""

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from .errors import (
    MessageTooLargeError,
    ProtocolError,
    QueueClosedError,
    QueueEmptyError,
    QueueTimeoutError,
    TransportError,
)
from .ring_buffer import WAIT_SLICE_S, RingReader, RingWriter
from .runtime_dir import RuntimeDir
from .sockets import MAX_QUEUED_MESSAGES, bind_pull, connect_push

_SERIAL_BYTES = 8
_FLUSH_S = 0.5
"""For the readers to take what is on its way, when the sender closes."""
_ON_ITS_WAY_S = 10.0
"""For the payload of a ticket to arrive, when the caller did not want to wait: it was sent before the ticket was."""
_RECONNECT_MS = 5
"""A PUSH connects before its PULL, which is bound at the first ticket, and tries again until then."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Stands in the ring for a payload.

    serial:  counts the payloads of a sender, from 1
    address: where reader i binds its PULL socket, without the i
    """

    serial: int
    num_bytes: int
    address: str


class OversizeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What may be unread at any time. A reader's memory may hold that much, beside the ring.

    max_unread_bytes:   of all payloads together; also the largest payload
    max_unread_tickets: at most 4096
    """

    max_unread_bytes: int = 1 << 30
    max_unread_tickets: int = 64

    def __post_init__(self) -> None:
        if self.max_unread_bytes < 1 or not 1 <= self.max_unread_tickets <= MAX_QUEUED_MESSAGES // 4:
            raise ValueError(f"{self} leaves no room, or more than a socket's queue takes")


class OversizeSender:
    """The sending half, beside `ring`.

    folder: where the sockets stand, private to this user; None: a folder of its own, made when it is needed
    """

    def __init__(self, ring: RingWriter, limits: OversizeLimits, folder: Path | None = None) -> None:
        self.limits = limits
        self.num_sent = 0
        self._ring = ring
        self._folder = folder
        self._own_folder: RuntimeDir | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        self._address = ""
        self._unread: deque[tuple[int, int]] = deque()
        self._unread_bytes = 0

    def wait_room(self, num_bytes: int, deadline_at: float | None) -> Ticket:
        """Wait until a payload of `num_bytes` may be sent; return its ticket.

        Raises MessageTooLargeError, else as `RingWriter.write`.
        """
        if num_bytes > self.limits.max_unread_bytes:
            raise MessageTooLargeError(num_bytes, self.limits.max_unread_bytes)
        self._forget_read()
        while len(self._unread) >= self.limits.max_unread_tickets or (
            self._unread_bytes + num_bytes > self.limits.max_unread_bytes
        ):
            self._ring.wait_read(self._unread[0][0], deadline_at=deadline_at)
            self._forget_read()
        if self._context is None:
            self._open()
        # Counted before it is used: a number is never used twice, whatever fails later.
        self.num_sent += 1
        return Ticket(self.num_sent, num_bytes, self._address)

    def send(
        self,
        ticket: Ticket,
        ticket_record: bytes,
        pieces: Sequence[bytes | memoryview],
        deadline_at: float | None,
    ) -> None:
        """Send `pieces` to every reader and publish their ticket. Raises as `RingWriter.write`."""
        with self._ring.reserve(len(ticket_record), deadline_at=deadline_at) as view:
            view[:] = ticket_record
            # One copy into memory of ZMQ's own, which all sockets share.
            payload = zmq.Frame(b"".join(pieces), copy=True)
            serial = ticket.serial.to_bytes(_SERIAL_BYTES, "little")
            try:
                for socket in self._sockets:
                    socket.send(serial, zmq.SNDMORE | zmq.NOBLOCK)
                    socket.send(payload, zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:
                raise TransportError(
                    f"a payload of {ticket.num_bytes} bytes was not sent: {error}"
                ) from error
        self._unread.append((self._ring.position, ticket.num_bytes))
        self._unread_bytes += ticket.num_bytes

    def close(self) -> None:
        """Wait shortly for what is on its way, then free everything. Before the ring is closed. Idempotent."""
        if self._context is None:
            return
        self._forget_read()
        if self._unread:
            with contextlib.suppress(TransportError):
                self._ring.wait_read(self._unread[-1][0], deadline_at=time.monotonic() + _FLUSH_S)
        for socket in self._sockets:
            socket.close()
        self._context.term()
        self._context = None
        self._sockets.clear()
        if self._own_folder is not None:
            self._own_folder.close()

    def _open(self) -> None:
        if self._folder is None:
            self._own_folder = RuntimeDir.create()
            self._folder = self._own_folder.path
        self._address = f"ipc://{self._folder}/oversize-"
        self._context = zmq.Context()
        for reader in range(self._ring.num_readers):
            socket = connect_push(self._context, f"{self._address}{reader}")
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            self._sockets.append(socket)

    def _forget_read(self) -> None:
        if not self._unread:
            return
        position = self._ring.read_position()
        while self._unread and self._unread[0][0] <= position:
            self._unread_bytes -= self._unread.popleft()[1]


class OversizeReceiver:
    """The receiving half, beside `ring`."""

    def __init__(self, ring: RingReader) -> None:
        self.num_passed_over = 0
        self._ring = ring
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    def receive(self, ticket: Ticket, deadline_at: float | None) -> zmq.Frame:
        """Wait for the payload of `ticket`, and return it in memory of its own.

        deadline_at: None: as long as something that was sent already may take.
        Raises QueueEmptyError (None) or QueueTimeoutError (deadline), and may be called again then; QueueClosedError;
        ProtocolError.
        """
        socket = self._socket or self._open(ticket)
        until = time.monotonic() + _ON_ITS_WAY_S if deadline_at is None else deadline_at
        is_writer_gone = False
        while True:
            remaining_s = max(0.0, until - time.monotonic())
            if socket.poll(round(min(remaining_s, WAIT_SLICE_S) * 1000)):
                serial, payload = socket.recv_multipart(copy=False)
                number = int.from_bytes(serial.bytes, "little")
                if number < ticket.serial:
                    self.num_passed_over += 1
                    continue
                if number > ticket.serial or len(payload) != ticket.num_bytes:
                    raise ProtocolError(f"payload {number} of {len(payload)} bytes came for {ticket}")
                return payload
            if is_writer_gone:
                raise QueueClosedError(f"the writer is gone, and payload {ticket.serial} with it")
            if remaining_s <= 0:
                error_type = QueueEmptyError if deadline_at is None else QueueTimeoutError
                raise error_type(f"payload {ticket.serial} of {ticket.num_bytes} bytes did not come in time")
            # Looked at once more after that: it may have been sent before its writer went.
            is_writer_gone = not self._ring.has_writer()

    def close(self) -> None:
        """Free everything. Idempotent."""
        if self._context is None:
            return
        if self._socket is not None:
            self._socket.close()
        self._context.term()
        self._context = self._socket = None

    def _open(self, ticket: Ticket) -> "zmq.Socket[bytes]":
        self._context = self._context or zmq.Context()
        self._socket = bind_pull(self._context, f"{ticket.address}{self._ring.index}")
        return self._socket
