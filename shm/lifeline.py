"""Lifeline: messages of any length over the one socket pair between a parent and its child.

Called by: process.py (the parent's end) and child_context.py (the child's). The kernel takes only so much in one
packet, so a longer message goes in several, which nobody else's come between: [0 or 1: more follows] + a piece.

When the peer dies: `send` raises OSError, and receiving says that the line has ended. When it lives and does not
read: `send` waits, for as long as its caller says.
"""

import select
import socket
import threading
import time

PIECE_BYTES = 64 << 10
"""Of one packet. A few of them fit into a socket's buffer at once."""
_LAST, _MORE = b"\0", b"\1"
_PACKET_BYTES = 1 + PIECE_BYTES


class Lifeline:
    """One end. Owns the socket (SOCK_SEQPACKET).

    has_ended: the other end is gone, and all that it had sent was received

    Thread: any may send; one receives.
    """

    def __init__(self, line: socket.socket) -> None:
        self.has_ended = False
        self._socket = line
        self._sending = threading.Lock()
        self._is_broken = False
        self._pieces: list[bytes] = []

    def fileno(self) -> int:
        """The descriptor: readable when there is something to receive, or the other end is gone."""
        return self._socket.fileno()

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        """Send one message; wait for room, at most `timeout_s`. None: as long as it takes.

        Raises TimeoutError, and at once from then on: half a message may be on its way. OSError when the other end is
        gone.
        """
        pieces = [message[start : start + PIECE_BYTES] for start in range(0, len(message), PIECE_BYTES)]
        deadline_at = None if timeout_s is None else time.monotonic() + timeout_s
        with self._sending:
            for piece in pieces[:-1]:
                self._send_packet(_MORE + piece, deadline_at)
            self._send_packet(_LAST + (pieces[-1] if pieces else b""), deadline_at)

    def receive(self) -> bytes | None:
        """Wait for the next message. None: the line has ended."""
        while not self.has_ended:
            message = self._take_packet(0)
            if message is not None:
                return message
        return None

    def receive_arrived(self) -> bytes | None:
        """Return the next message that is here as a whole; never waits. None: there is none."""
        while not self.has_ended:
            try:
                message = self._take_packet(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if message is not None:
                return message
        return None

    def close(self) -> None:
        """Let go of this end; the other one sees it. Idempotent."""
        self.has_ended = True
        self._socket.close()

    def _send_packet(self, packet: bytes, deadline_at: float | None) -> None:
        if self._is_broken:
            raise TimeoutError("the other end did not read in time")
        if deadline_at is None:
            self._socket.send(packet)
            return
        while True:
            try:
                self._socket.send(packet, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                remaining_s = deadline_at - time.monotonic()
                if remaining_s <= 0:
                    self._is_broken = True
                    raise TimeoutError("the other end does not read") from None
                poller = select.poll()
                poller.register(self._socket, select.POLLOUT)
                poller.poll(remaining_s * 1000)

    def _take_packet(self, flags: int) -> bytes | None:
        """Receive one packet; return the message that it completes, if it does."""
        try:
            packet = self._socket.recv(_PACKET_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError:
            packet = b""
        if not packet:
            self.has_ended = True
            return None
        self._pieces.append(packet[1:])
        if packet.startswith(_MORE):
            return None
        message, self._pieces = b"".join(self._pieces), []
        return message
