"""ZMQ sockets with our defaults."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from phalanx.shm.errors import TransportError
from phalanx.shm.sockets import bind_pub, bind_pull, check_address, connect_push, connect_sub


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_many_push_to_one_pull(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/in"
    with bind_pull(context, address) as pull:
        with connect_push(context, address) as first, connect_push(context, address) as second:
            first.send(b"a")
            second.send(b"b")
            received = set()
            for _ in range(2):
                assert pull.poll(20_000)
                received.add(pull.recv())

        assert received == {b"a", b"b"}
        assert pull.getsockopt(zmq.LINGER) == 0


def test_a_subscriber_hears_its_topic(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/out"
    with bind_pub(context, address) as pub, connect_sub(context, address, b"yes") as sub:
        while not sub.poll(10):
            pub.send(b"no")
            pub.send(b"yes")

        assert sub.recv() == b"yes"


def test_sockets_of_an_asyncio_context_are_awaited(tmp_path: Path) -> None:
    async def talk(context: zmq.asyncio.Context) -> bytes:
        address = f"ipc://{tmp_path}/in"
        with bind_pull(context, address) as pull, connect_push(context, address) as push:
            await push.send(b"hello")
            return bytes(await asyncio.wait_for(pull.recv(), 20))

    with zmq.asyncio.Context() as context:
        assert asyncio.run(talk(context)) == b"hello"


@pytest.mark.parametrize("address", ["", "ipc://", "inproc://x", "/tmp/x", "ipc://" + "x" * 108])
def test_an_address_that_cannot_work_is_refused(address: str) -> None:
    with pytest.raises(TransportError):
        check_address(address)


def test_a_bind_that_fails_names_the_address(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    with pytest.raises(TransportError, match="ipc:///nowhere/at/all"):
        bind_pull(context, "ipc:///nowhere/at/all")
