"""A server that speaks as much of the OpenAI API as a load generator hears, and misbehaves on request."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MODEL = "fake"


class FakeOpenAI:
    """Answers generation requests by the order of their arrival.

    behaviours: for the first requests; the last one goes for all that follow
        ok          one piece for each token, usage at the end
        two_a_piece as ok, but two tokens a piece
        no_usage    as ok, without usage
        bytewise    as ok, every byte a write of its own, lines ended by CR LF
        silent      tokens without any text
        busy        status 429
        error_event an error in the middle of the stream
        early_end   the response ends without saying why
        broken      the connection ends in the middle
        garbage     a chunk that is no JSON
    """

    def __init__(self, *behaviours: str) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.paths: list[str] = []
        self.num_connections = 0
        self.port = 0
        self._behaviours = behaviours or ("ok",)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")
        )
        content = await reader.readexactly(length)
        self.headers.append(head)
        path = head.split()[1]
        self.paths.append(path)
        if path == "/v1/models":
            _write_response(writer, 200, json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode())
            return True
        body = json.loads(content)
        behaviour = self._behaviours[min(len(self.bodies), len(self._behaviours) - 1)]
        self.bodies.append(body)
        if behaviour == "busy":
            _write_response(writer, 429, b'{"error": {"message": "later"}}')
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        stream = _stream(body, behaviour, is_chat=path.endswith("chat/completions"))
        for part in [bytes([byte]) for byte in stream] if behaviour == "bytewise" else [stream]:
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        if behaviour == "broken":
            return False
        writer.write(b"0\r\n\r\n")
        return True


def _write_response(writer: asyncio.StreamWriter, status: int, content: bytes) -> None:
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content))


def _stream(body: dict[str, Any], behaviour: str, *, is_chat: bool) -> bytes:
    num_tokens = body["max_tokens"]
    size = 2 if behaviour == "two_a_piece" else 1
    events: list[dict[str, Any] | str] = []
    if is_chat:
        events.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for _ in range(num_tokens // size):
        text = "" if behaviour == "silent" else "é " * size
        events.append(
            {"choices": [{"index": 0, **({"delta": {"content": text}} if is_chat else {"text": text})}]}
        )
    if behaviour in ("early_end", "broken"):
        return _lines(events)
    if behaviour == "error_event":
        return _lines([*events, {"error": {"type": "replica_lost", "message": "gone"}}, "[DONE]"])
    if behaviour == "garbage":
        return _lines([*events, "{"])
    last = {"index": 0, "finish_reason": "length", **({"delta": {}} if is_chat else {"text": ""})}
    events.append({"choices": [last]})
    if behaviour != "no_usage":
        prompt = body.get("prompt", [])
        events.append(
            {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}}
        )
    return _lines([*events, "[DONE]"], end="\r\n" if behaviour == "bytewise" else "\n")


def _lines(events: list[dict[str, Any] | str], end: str = "\n") -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events]
    return "".join(f": a remark{end}data: {text}{end}{end}" for text in texts).encode()


@contextmanager
def fake_openai(*behaviours: str) -> Iterator[FakeOpenAI]:
    """Serve from a thread of its own until the end of the block."""
    server = FakeOpenAI(*behaviours)
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(server.serve(started, stop)), name="fake-openai"
    )
    thread.start()
    try:
        assert started.wait(10.0)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10.0)
        loop.close()
