"""Server-sent events, and the watch for a client that leaves.

Called by: routes.py. A client's leaving is noticed at once, not at the next write: the work for it is
cancelled, which closes the engine's iterators, which aborts the request in the engine.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...engine.errors import RequestAbortedError
from .errors import CLIENT_GONE, ClientGoneError, to_api_error
from .service import Gate

T = TypeVar("T")

STATUS_KEY = "phalanx.status"
"""Where the scope holds the status that metrics count, when it is not the one that was sent."""
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
QUIET_S = 5.0
"""A stream that has been silent for so long gets a comment line, which clients skip and proxies count as life."""
HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
"""No cache and no proxy may hold events back."""


def event(value: Any) -> bytes:
    """Encode one value as one event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def run_watched(receive: Receive, gate: Gate, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` until it is done, the client leaves, or the gate aborts what is inside.

    In the last two cases, and when the caller is cancelled, the work was cancelled and has ended.
    Raises ClientGoneError, RequestAbortedError, and what the work raises. The body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_gone(receive))
    aborted = asyncio.create_task(gate.aborted.wait())
    tasks: set[asyncio.Task[Any]] = {task, gone, aborted}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # What is done counts, even when the client left in the same moment.
        if task.done():
            return task.result()
        if aborted.done():
            raise RequestAbortedError("the server stopped before the answer was complete")
        raise ClientGoneError
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """An answer that is a stream of events. Owns `events` and closes it, whatever happens.

    An error after the first event cannot change the status any more; it is sent as an event of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], gate: Gate) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._gate = gate
        self._sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events. Ends quietly when the client leaves."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        comments = asyncio.create_task(self._comment_when_quiet(send))
        try:
            await run_watched(receive, self._gate, self._pump(send))
        except (ClientGoneError, OSError):
            scope[STATUS_KEY] = CLIENT_GONE
            return
        # The per-request boundary of a stream: whatever went wrong ends this stream only.
        except Exception as error:
            api_error = to_api_error(error)
            scope[STATUS_KEY] = api_error.status
            await _send(send, event(api_error.body()))
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)
            await self._events.aclose()
        await _send(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        async for data in self._events:
            self._sent_at = time.monotonic()
            await _send(send, data)

    async def _comment_when_quiet(self, send: Send) -> None:
        """Beside the pump, not around it: a timeout per event would cost every token a task."""
        with contextlib.suppress(OSError):  # the client is gone, which the pump is about to learn
            while True:
                quiet_s = time.monotonic() - self._sent_at
                if quiet_s >= QUIET_S:
                    self._sent_at = time.monotonic()
                    await _send(send, COMMENT)
                else:
                    await asyncio.sleep(QUIET_S - quiet_s)


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
