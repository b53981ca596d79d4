"""The HTTP server as the API-server process runs it: a real socket, real connections, a small engine."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable

import httpx
import pytest

from phalanx.launch.config import ServerConfig
from phalanx.launch.listener import bind_listener, listener_url
from phalanx.shm.errors import ConfigError
from support.server import ANSWER, FakeEngine, make_service, running

BODY = {"model": "tiny", "prompt": "a", "max_tokens": 20}


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_stream_arrives_over_a_real_connection() -> None:
    async def work() -> None:
        async with running(make_service()) as url, httpx.AsyncClient(base_url=url) as client:
            response = await client.post("/v1/completions", json={**BODY, "stream": True})

            events = response.text.split("\n\n")[:-2]
            assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events) == ANSWER
            assert response.headers["cache-control"].startswith("no-cache")
            assert "content-length" not in response.headers

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_breaks_aborts_its_request(stream: bool) -> None:
    async def work() -> None:
        engine = FakeEngine(is_blocked=True)
        service = make_service(engine)
        async with running(service) as url:
            async with httpx.AsyncClient(base_url=url) as client:
                asking = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": stream}))
                await engine.entered.wait()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

            await engine.aborted.wait()
            assert engine.num_running == 0

    run(work)


def test_a_stop_finishes_the_stream_that_runs() -> None:
    async def work() -> None:
        engine = FakeEngine(is_blocked=True)
        service = make_service(engine)
        async with httpx.AsyncClient() as client:
            async with running(service) as url:
                asking = asyncio.create_task(
                    client.post(f"{url}/v1/completions", json={**BODY, "stream": True})
                )
                await engine.entered.wait()
                drained = asyncio.create_task(service.gate.drain(20.0))
                engine.release.set()
                assert await drained

            assert (await asking).text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{url}/health")

    run(work)


@pytest.mark.parametrize(
    "raw", [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" * 20]
)
def test_a_connection_that_speaks_no_http_does_no_harm(raw: bytes) -> None:
    async def work() -> None:
        async with running(make_service()) as url, httpx.AsyncClient(base_url=url) as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(raw)
            writer.write_eof()
            await reader.read()
            writer.close()
            await writer.wait_closed()

            assert (await client.get("/health")).status_code == 200

    run(work)


def test_a_port_on_which_another_listens_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            bind_listener(ServerConfig(port=port))


def test_the_url_of_a_listener_can_be_used_on_this_host() -> None:
    with bind_listener(ServerConfig(host="0.0.0.0", port=0)) as listener:
        assert listener_url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_the_server_process_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, phalanx.launch.server.process\n"
        "assert not {'torch', 'transformers', 'gguf', 'huggingface_hub'} & sys.modules.keys()"
    )

    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_supervisor_imports_no_server() -> None:
    script = (
        "import sys, phalanx.launch.runtime\n"
        "assert not {'torch', 'transformers', 'fastapi', 'starlette', 'uvicorn', 'tokenizers'} & sys.modules.keys(), "
        "sorted({'torch', 'transformers', 'fastapi', 'starlette', 'uvicorn', 'tokenizers'} & sys.modules.keys())"
    )

    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
