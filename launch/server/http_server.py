"""The HTTP server of one API-server process: uvicorn behind our own `Acceptor`, with our own `Connection`s.

Called by: process.py, with the inherited listening socket; signals are the supervisor's business.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from ...cluster.front_end_board import FrontEndBoard
from .acceptor import Acceptor
from .connection import Connection

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than the pools of usual proxies keep theirs."""
LAST_WRITES_S = 2
"""For answers that are complete to leave the process, once it stops."""


class InheritedServer(uvicorn.Server):
    """uvicorn without its signal handlers and its way to accept. Tells when it accepts."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None], board: FrontEndBoard) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._board = board
        self._acceptor: Acceptor | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave all signals as they are."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, then say so."""
        assert sockets is not None
        (listener,) = sockets
        await super().startup([])
        self._acceptor = acceptor = Acceptor(listener, self._make_connection, self._board)
        acceptor.start()
        self._on_started()

    def hold_connections(self) -> None:
        """Leave new connections to the other servers, or in the socket's queue. Idempotent."""
        if self._acceptor is not None:
            self._acceptor.stop()

    def take_connections(self) -> None:
        """Take new connections again, unless the server ends. Idempotent."""
        if self._acceptor is not None and not self.should_exit:
            self._acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end the connections."""
        self.hold_connections()
        await super().shutdown(sockets)

    def _make_connection(self) -> asyncio.Protocol:
        assert self._acceptor is not None
        return Connection(
            on_lost=self._acceptor.lost,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


def make_server(
    app: ASGIApp, access_log: bool, on_started: Callable[[], None], board: FrontEndBoard | None = None
) -> InheritedServer:
    """Make the HTTP server. It serves when `serve([listening socket])` is awaited, until `should_exit` is set.

    board: where the API servers say how many connections each has; None: there is no other
    """
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=access_log,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WRITES_S,
    )
    return InheritedServer(config, on_started, board or FrontEndBoard.alone())
