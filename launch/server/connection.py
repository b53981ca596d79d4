"""Connection: one client's HTTP/1.1 connection. uvicorn's protocol, with bounds, and answers in OpenAI's shape.

Called by: http_server.py, on the event loop. What it adds to uvicorn's:

- header lines, and the trailers of a body in chunks, have a largest size and must arrive in time
- what is no HTTP is answered as every other error is
- an offer to upgrade the connection (Java's HTTP client makes one with every request) is ignored, as HTTP allows,
  and the body behind it is read
- a client that leaves is noticed also when it has sent further requests behind the one that is being answered
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import ApiError

MAX_HEAD_BYTES = 1 << 16
"""Of a request line with all header lines; of trailers as well."""
HEAD_S = 30.0
"""For a request's head to be complete, from the connection's begin or the head's first byte."""
MAX_PIPELINED = 16
"""Requests behind the one that is answered; with more of them nothing is read until there is one less."""

_OFFER = frozenset({b"upgrade", b"http2-settings"})


class Connection(HttpToolsProtocol):
    """See above. on_lost: called once, when there is no connection any more."""

    def __init__(self, *, on_lost: Callable[[], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._on_lost = on_lost
        self._running: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        # Whether header lines or trailers are being read, which ones, and how much of them came: in whole lines, and
        # in pieces, since the parser tells of a line when it is whole.
        self._is_in_fields = False
        self._num_fields = 0
        self._num_line_bytes = 0
        self._num_piece_bytes = 0
        self._is_trailer = False
        self._has_offer = False

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    # The transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        running = self._running
        if running is not None and running is not self.cycle and not running.response_complete:
            # uvicorn tells the newest request only.
            running.disconnected = True
            running.message_event.set()
        self._stop_head_timer()
        super().connection_lost(exc)
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        was_in_fields, fields = self._is_in_fields, self._num_fields
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or ApiError(400, "this is no HTTP/1.1 request", code="bad_http"))
            return
        if was_in_fields and self._is_in_fields and fields == self._num_fields:
            self._num_piece_bytes += len(data)
            if self._num_piece_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())
                return
        if not self._is_answering and self._head_timer is None:
            self._expect_head()

    # The parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_fields(is_trailer=False)
        self._has_offer = False

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        # A trailer comes when the request is already being answered, and nothing here reads one.
        if not self._is_trailer:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_fields = False
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        if self.parser.should_upgrade():
            # The parser takes what follows for another protocol; `_feed` goes on behind the head.
            self._has_offer = True
            return
        self._stop_head_timer()
        before = self.cycle
        super().on_headers_complete()
        if before is None or before.response_complete:
            self._running = self.cycle
        elif len(self.pipeline) <= MAX_PIPELINED:
            # uvicorn reads no more, and then does not see that the client leaves.
            self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        """Behind the last chunk come trailers, behind all others a body."""
        self._begin_fields(is_trailer=True)

    def on_body(self, body: bytes) -> None:
        self._is_in_fields = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_fields = False
        if not self._has_offer:
            super().on_message_complete()

    # The answer's call

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                version = self.parser.get_http_version().encode()
                head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
                head += [name + b": " + value for name, value in self.headers if name not in _OFFER]
                data = b"\r\n".join([*head, b"", b""]) + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                # As uvicorn has it: what follows "Connection: close" is no error.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _begin_fields(self, *, is_trailer: bool) -> None:
        self._is_in_fields, self._is_trailer = True, is_trailer
        self._num_fields += 1
        self._num_line_bytes = self._num_piece_bytes = 0

    def _count(self, num_bytes: int) -> None:
        self._num_line_bytes += num_bytes
        if self._num_line_bytes > MAX_HEAD_BYTES:
            self._refusal = _too_large()
            raise ValueError("the head is too large")

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._on_head_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_late(self) -> None:
        self._head_timer = None
        if self._is_answering:
            return  # what comes behind has time
        if self._is_in_fields and not self._is_trailer:
            self._refuse(ApiError(408, "the request did not arrive in time", code="timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request, unless another answer is under way, and end the connection."""
        cycle = self._running
        # Free is it also while the very request that is at fault is read.
        is_free = not self._is_answering or (
            cycle is not None and cycle is self.cycle and cycle.more_body and not cycle.response_started
        )
        if is_free and not self.transport.is_closing():
            response = error.response()
            lines = [b"HTTP/1.1 %d" % error.status, *(b"%s: %s" % pair for pair in response.raw_headers)]
            self.transport.write(
                b"\r\n".join([*lines, b"connection: close", b"", b""]) + bytes(response.body)
            )
        self.transport.close()


def _too_large() -> ApiError:
    return ApiError(431, f"the header lines are larger than {MAX_HEAD_BYTES} bytes", code="headers_too_large")
