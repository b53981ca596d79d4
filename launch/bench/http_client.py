"""An HTTP/1.1 client as small as a load generator can use: keep-alive, bodies in pieces with the instant of each.

Called by: openai_client.py, in the event loop of the benchmark. The instant of a piece is taken when the loop hands
it over, before any task runs, so that a busy client does not look like a slow server. Parsing is httptools', the C
parser of the server side.

When the server closes or breaks a connection: who reads the response gets ConnectionError.
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from .errors import BenchError


class Piece(NamedTuple):
    """Part of a response's body, and when it came (`time.perf_counter()`)."""

    at: float
    data: bytes


class HttpClient:
    """Connections to one server, used again when they are free. One event loop.

    url: "http://host:port" or "https://..."; a path in front of the API's is kept
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"{url} is no address of an HTTP server")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        lines = {"Host": parts.netloc, "Accept": "*/*", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def send(self, method: str, path: str, body: bytes = b"") -> "Response":
        """Send a request; returns when the head of the response is here. Raises OSError."""
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                break
        else:
            connection = await self._connect()
        response = Response(self, connection)
        try:
            connection.begin(response, head.encode("latin-1") + body)
            await response.wait_head()
        except BaseException:
            self.discard(connection)
            raise
        return response

    def give_back(self, connection: "_Connection") -> None:
        """A response was read to its end."""
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            self.discard(connection)

    def discard(self, connection: "_Connection") -> None:
        """A response was left unread; nobody may use its connection."""
        connection.close()
        self._all.discard(connection)

    async def close(self) -> None:
        """Close all connections, and wait until they are."""
        connections, self._all = list(self._all), set()
        self._idle.clear()
        for connection in connections:
            connection.close()
        await asyncio.gather(*(connection.closed.wait() for connection in connections))

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        self._all.add(connection)
        return connection


class Response:
    """One response. Read it to its end, or `close` it."""

    def __init__(self, client: HttpClient, connection: "_Connection") -> None:
        self.status = 0
        self.is_complete = False
        self._client = client
        self._connection = connection
        self._pieces: deque[Piece] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def wait_head(self) -> None:
        """Wait for the status. Raises OSError."""
        while not self.status:
            await self._wait_news()

    async def next_piece(self) -> Piece | None:
        """Wait for the next part of the body; None: it is complete. Raises OSError."""
        while not self._pieces:
            if self.is_complete:
                return None
            await self._wait_news()
        return self._pieces.popleft()

    async def read(self) -> bytes:
        """Wait for the whole body. Raises OSError."""
        parts = []
        while (piece := await self.next_piece()) is not None:
            parts.append(piece.data)
        return b"".join(parts)

    def close(self) -> None:
        """Give the connection back, or drop it when the body was not read to its end. Once."""
        if self.is_complete:
            self._client.give_back(self._connection)
        else:
            self._client.discard(self._connection)

    def add_piece(self, data: bytes) -> None:
        """A part of the body came. From the connection."""
        self._pieces.append(Piece(time.perf_counter(), data))
        self._news.set()

    def tell(self, *, status: int = 0, is_complete: bool = False, error: Exception | None = None) -> None:
        """The head came, the end, or an error. From the connection."""
        self.status = status or self.status
        self.is_complete = self.is_complete or is_complete
        self._error = error or self._error
        self._news.set()

    async def _wait_news(self) -> None:
        if self._error is not None:
            raise self._error
        self._news.clear()
        await self._news.wait()


class _Connection(asyncio.Protocol):
    """One connection: bytes to the parser, events of the parser to the response that is being read."""

    def __init__(self) -> None:
        self.is_lost = False
        self.is_reusable = False
        self.closed = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._parser = httptools.HttpResponseParser(self)

    def begin(self, response: Response, request: bytes) -> None:
        self._response = response
        self.is_reusable = False
        self._parser = httptools.HttpResponseParser(self)
        assert self._transport is not None
        self._transport.write(request)

    def close(self) -> None:
        self.is_lost = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.is_reusable = False
        self.closed.set()
        self._end(
            exc if isinstance(exc, OSError) else ConnectionResetError("the server closed the connection")
        )

    def on_headers_complete(self) -> None:
        if self._response is not None:
            self._response.tell(status=self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._response is not None:
            self._response.add_piece(data)

    def on_message_complete(self) -> None:
        response, self._response = self._response, None
        self.is_reusable = self._parser.should_keep_alive()
        if response is not None:
            response.tell(is_complete=True)

    def _end(self, error: Exception) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.tell(error=error)
