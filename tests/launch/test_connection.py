"""Connections as hostile or odd clients use them: bytes on a real socket, a small engine behind."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from phalanx.launch.server.connection import MAX_HEAD_BYTES, MAX_PIPELINED
from support.server import ANSWER, FakeEngine, make_service, running

BODY = {"model": "tiny", "prompt": "a", "max_tokens": 20}
KIND = b"Host: test\r\nContent-Type: application/json\r\n"


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


@asynccontextmanager
async def connected(engine: FakeEngine | None = None) -> AsyncIterator[tuple[Any, Any]]:
    """A server, and one connection to it."""
    async with running(make_service(engine)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        try:
            yield reader, writer
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def request(body: dict[str, Any] = BODY, lines: bytes = b"") -> bytes:
    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\n%sContent-Length: %d\r\n%s\r\n%s" % (
        KIND,
        len(content),
        lines,
        content,
    )


async def send_for_ever(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()


CLOSE = b"Connection: close\r\n"


async def ask(raw: bytes, *, piece: int = 1 << 30, engine: FakeEngine | None = None) -> tuple[int, bytes]:
    """Send bytes, in pieces; the status and the body of what comes until the server closes."""
    async with connected(engine) as (reader, writer):
        try:
            for start in range(0, len(raw), piece):
                writer.write(raw[start : start + piece])
                await writer.drain()
        except ConnectionError:
            pass  # refused before all of it was sent
        answer = bytearray()
        try:
            while data := await reader.read(1 << 16):
                answer += data
        except ConnectionError:
            pass
        head, _, body = bytes(answer).partition(b"\r\n\r\n")
        return int(head.split()[1]), body


def assert_refused(status: int, body: bytes, expected: int) -> None:
    error = json.loads(body)["error"]
    assert status == expected
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET /caf\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"CONNECT / HTTP/1.1\r\nHost: a\r\n\r\n",
        request(lines=b"Content-Length: 1\r\n"),
        request(lines=b"Transfer-Encoding: chunked\r\n"),
        request(lines=b"X-A: a\x00b\r\n"),
        request(lines=b"X-A : b\r\n"),
        b"POST /v1/completions HTTP/1.1\r\n" + KIND + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_of_the_usual_shape(raw: bytes) -> None:
    async def work() -> None:
        status, body = await ask(raw)

        assert_refused(status, body, 400)

    run(work)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 2 * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * MAX_HEAD_BYTES + b"\r\n",
        b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 8 * MAX_HEAD_BYTES,
        b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nX-A: " + b"a" * 10_000 + b"\r\n\r\n",
    ],
    ids=["a line", "many lines", "a line without end", "path and line"],
)
def test_header_lines_have_a_largest_size(raw: bytes) -> None:
    async def work() -> None:
        status, body = await ask(raw, piece=8192)

        assert_refused(status, body, 431)

    run(work)


def test_header_lines_up_to_that_size_are_read_in_any_pieces() -> None:
    async def work() -> None:
        raw = request(lines=CLOSE + b"X-A: " + b"a" * (MAX_HEAD_BYTES - 1024) + b"\r\n")

        for piece in (1 << 30, 999):
            status, body = await ask(raw, piece=piece)
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, ANSWER)

    run(work)


@pytest.mark.parametrize("trailers", [b"X-A: b\r\n" * MAX_HEAD_BYTES, b"X-A: " + b"a" * 8 * MAX_HEAD_BYTES])
def test_trailers_have_a_largest_size_too(trailers: bytes) -> None:
    async def work() -> None:
        head = b"POST /v1/completions HTTP/1.1\r\n" + KIND + b"Transfer-Encoding: chunked\r\n\r\n"
        async with connected() as (_, writer):
            writer.write(head + b"0\r\n")
            with pytest.raises(ConnectionError):
                await send_for_ever(writer, trailers)

    run(work)


def test_trailers_are_no_header_lines() -> None:
    async def work() -> None:
        engine = FakeEngine()
        content = json.dumps(BODY).encode()
        head = b"POST /v1/completions HTTP/1.1\r\n" + KIND + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n"
        raw = head + b"%x\r\n%s\r\n0\r\nX-Session-Id: mine\r\n\r\n" % (len(content), content)

        status, _ = await ask(raw, engine=engine)

        assert status == 200
        assert engine.options[0].session_id is None

    run(work)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX-", b"\r\n"])
def test_a_head_must_arrive_in_time(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr("phalanx.launch.server.connection.HEAD_S", 0.05)

    async def work() -> None:
        async with connected() as (reader, writer):
            writer.write(sent)

            answer = await reader.read()

            if sent.strip():
                assert_refused(408, answer.partition(b"\r\n\r\n")[2], 408)
            else:
                assert answer == b""

    run(work)


def test_a_body_must_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.server.routes.BODY_S", 0.05)

    async def work() -> None:
        status, body = await ask(request()[:-5])

        assert_refused(status, body, 408)

    run(work)


def test_a_stop_does_not_wait_for_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.server.service.LATE_BODY_S", 0.05)

    async def work() -> None:
        service = make_service()
        async with running(service) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(request()[:-5])
            while not service.gate.num_inside:
                await asyncio.sleep(0)

            assert await service.gate.drain(20.0)

            text = (await reader.readuntil(b"}}")).decode()
            assert "503 Service Unavailable" in text
            assert '"code":"server_stopping"' in text
            writer.close()
            await writer.wait_closed()

    run(work)


def test_an_answer_that_takes_long_is_no_late_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.server.connection.HEAD_S", 0.02)

    async def work() -> None:
        engine = FakeEngine(is_blocked=True)
        async with connected(engine) as (reader, writer):
            writer.write(request() + request(lines=CLOSE)[:50])
            await engine.entered.wait()
            await asyncio.sleep(0.1)
            engine.release.set()

            assert (await reader.readuntil(b"fingerprint")).count(b"200 OK") == 1

    run(work)


def test_an_offer_to_upgrade_is_ignored_and_its_body_read() -> None:
    """Java's HTTP client makes one with each request, until it knows the server."""

    async def work() -> None:
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
        async with connected() as (reader, writer):
            writer.write(request(lines=offer) * 2 + request(lines=CLOSE))
            text = await reader.read()

        assert text.count(b"200 OK") == 3
        assert text.count(json.dumps(ANSWER).encode()) == 3
        for piece in (1, 100):
            websocket = b"Connection: close, Upgrade\r\nUpgrade: websocket\r\n"
            status, body = await ask(request(lines=websocket), piece=piece)
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, ANSWER)

    run(work)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_behind", [1, MAX_PIPELINED])
def test_a_client_that_leaves_behind_further_requests_aborts_the_one_that_runs(
    stream: bool, num_behind: int
) -> None:
    async def work() -> None:
        engine = FakeEngine(is_blocked=True)
        async with connected(engine) as (_, writer):
            writer.write(request({**BODY, "stream": stream}))
            await engine.entered.wait()
            writer.write(request() * num_behind)
            await writer.drain()
            writer.close()

            await engine.aborted.wait()
            assert engine.num_running == 0
            assert len(engine.asked) == 1

    run(work)


def test_requests_behind_each_other_are_answered_in_order() -> None:
    async def work() -> None:
        prompts = ["a" * index for index in range(1, 3 * MAX_PIPELINED)]
        async with connected() as (reader, writer):
            writer.write(
                b"".join(request({**BODY, "prompt": prompt, "max_tokens": 13}) for prompt in prompts)
            )
            writer.write(request(lines=CLOSE))

            text = (await reader.read()).decode()

        counts = [int(count) for count in re.findall(r'"prompt_tokens":(\d+)', text)]
        assert counts == [*map(len, prompts), 1]

    run(work)


def test_a_path_with_a_slash_behind_it_is_no_redirect_to_where_the_client_says() -> None:
    async def work() -> None:
        raw = request(lines=CLOSE).replace(b"/v1/completions", b"/v1/completions/")

        status, body = await ask(raw.replace(b"Host: test", b"Host: [evil"))

        assert_refused(status, body, 404)

    run(work)
