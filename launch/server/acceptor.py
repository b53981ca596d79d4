"""Acceptor: takes connections from the one listening socket that all API servers share.

Called by: http_server.py, on the event loop. The kernel wakes every server for each connection, and the quickest has
it; a client that keeps its connections would then keep one server busy and leave the others idle. So a server takes
one connection at a time, and while others have fewer than it has, it holds back for a moment in which one of them may
come first. After that it takes the connection itself: a server that hangs, or is too busy to come, costs a new
connection some milliseconds, and no more.

When this process dies, what it has not taken stays in the socket's queue for the others, and for the next one.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from ...cluster.front_end_board import FrontEndBoard

log = logging.getLogger(__name__)

HOLD_BACK_S = 0.002
"""For each server that has fewer connections."""
MAX_HOLD_BACK_S = 0.01
_PAUSE_S = 1.0
"""After the process has run out of descriptors or memory."""
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def hold_back_s(num_with_fewer: int) -> float:
    """How long to leave a connection to others. num_with_fewer: servers that have fewer connections."""
    return min(MAX_HOLD_BACK_S, num_with_fewer * HOLD_BACK_S)


class Acceptor:
    """See above. Owner: the event loop.

    listener:      listening, non-blocking; closed by its owner, after `stop`
    make_protocol: for one connection; `lost` must be called when that connection is lost
    """

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], board: FrontEndBoard
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._board = board
        self._loop = asyncio.get_running_loop()
        self._num_open = 0
        self._is_stopped = True
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to take connections, or go on after `stop`. Idempotent."""
        if not self._is_stopped:
            return
        self._is_stopped = False
        self._tell()
        self._loop.add_reader(self._listener.fileno(), self._on_readable)

    def stop(self) -> None:
        """Take no more; what comes is the other servers', or the next one's. Idempotent."""
        if not self._is_stopped:
            self._is_stopped = True
            self._loop.remove_reader(self._listener.fileno())
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._tell()

    def lost(self) -> None:
        """One connection is no more."""
        self._num_open -= 1
        self._tell()

    def _on_readable(self) -> None:
        delay_s = hold_back_s(self._board.num_with_fewer(self._num_open))
        if delay_s > 0:
            self._wait(delay_s)
        else:
            self._accept()

    def _wait(self, delay_s: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._timer = self._loop.call_later(delay_s, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener.fileno(), self._on_readable)
        self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another server was quicker, or the client has gone
        except OSError as error:
            if error.errno not in _OUT_OF_RESOURCES:
                raise
            log.error("no connection can be accepted error=%s", error)
            self._wait(_PAUSE_S)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._num_open += 1
        self._tell()
        task = self._loop.create_task(self._open(connection), name="open connection")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:
            # It broke before it was handed over, so nobody will say that it is lost.
            log.debug("connection broke at once error=%s", error)
            connection.close()
            self.lost()

    def _tell(self) -> None:
        self._board.set_connections(self._num_open, accepts=not self._is_stopped)
