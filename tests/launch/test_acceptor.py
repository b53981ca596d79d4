"""Several servers on one listening socket: connections are shared out, and wait for nobody for long."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from phalanx.cluster.front_end_board import NUM_COLUMNS, FrontEndBoard
from phalanx.launch.config import ServerConfig
from phalanx.launch.listener import bind_listener
from phalanx.launch.server.acceptor import MAX_HOLD_BACK_S, Acceptor, hold_back_s
from phalanx.shm.number_table import NumberTable


class Connection(asyncio.Protocol):
    """Says which server it belongs to, and tells its end."""

    def __init__(self, server: "Server") -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._server.name)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.acceptor.lost()


class Server:
    """One acceptor, as each process has it: on its own descriptor of the same socket."""

    def __init__(self, listener: socket.socket, table: NumberTable, index: int) -> None:
        self.name = b"%d" % index
        self.board = FrontEndBoard(table, index)
        self.listener = listener.dup()
        self.listener.setblocking(False)
        self.acceptor = Acceptor(self.listener, lambda: Connection(self), self.board)
        self.acceptor.start()

    def stop(self) -> None:
        self.acceptor.stop()
        self.listener.close()


def run(num_servers: int, work: Callable[[list[Server], tuple[str, int]], Awaitable[None]]) -> None:
    async def scenario() -> None:
        listener = bind_listener(ServerConfig(port=0))
        table = NumberTable.private(num_servers, NUM_COLUMNS)
        servers = [Server(listener, table, index) for index in range(num_servers)]
        try:
            await work(servers, listener.getsockname())
        finally:
            for server in servers:
                server.stop()
            listener.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


async def open_connections(
    address: tuple[str, int], count: int
) -> tuple[list[asyncio.StreamWriter], list[int]]:
    pairs = await asyncio.gather(*(asyncio.open_connection(*address) for _ in range(count)))
    owners = [int(await reader.readexactly(1)) for reader, _ in pairs]
    return [writer for _, writer in pairs], owners


async def close_all(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers))


@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_a_burst_is_shared_out_evenly(num_servers: int) -> None:
    async def work(servers: list[Server], address: tuple[str, int]) -> None:
        writers, owners = await open_connections(address, 40)
        counts = [owners.count(index) for index in range(num_servers)]
        assert max(counts) - min(counts) <= 2, counts
        await close_all(writers)

    run(num_servers, work)


def test_a_server_that_has_lost_its_connections_gets_the_next_ones() -> None:
    async def work(servers: list[Server], address: tuple[str, int]) -> None:
        writers, owners = await open_connections(address, 12)
        leaving = [writer for writer, owner in zip(writers, owners, strict=True) if owner == 0]
        staying = [writer for writer, owner in zip(writers, owners, strict=True) if owner == 1]
        await close_all(leaving)
        while servers[1].board.num_with_fewer(len(staying)) == 0:
            await asyncio.sleep(0)

        later, owners = await open_connections(address, len(leaving) - 1)
        assert set(owners) == {0}
        await close_all(staying + later)

    run(2, work)


def test_a_server_that_hangs_holds_nobody_up() -> None:
    async def work(servers: list[Server], address: tuple[str, int]) -> None:
        # It says that it accepts and has nothing to do, and does not come.
        loop = asyncio.get_running_loop()
        loop.remove_reader(servers[0].listener.fileno())

        writers, owners = await open_connections(address, 10)

        assert set(owners) == {1}
        await close_all(writers)

    run(2, work)


def test_after_a_stop_the_others_have_all_and_nobody_waits_for_it() -> None:
    async def work(servers: list[Server], address: tuple[str, int]) -> None:
        servers[0].acceptor.stop()
        servers[0].acceptor.stop()
        assert servers[1].board.num_with_fewer(9) == 0

        writers, owners = await open_connections(address, 10)

        assert set(owners) == {1}
        await close_all(writers)

    run(2, work)


def test_what_comes_while_the_only_one_is_stopped_waits_for_it() -> None:
    async def work(servers: list[Server], address: tuple[str, int]) -> None:
        (server,) = servers
        server.acceptor.stop()
        opening = asyncio.create_task(open_connections(address, 3))
        reader, writer = await asyncio.open_connection(*address)
        assert not reader.at_eof()
        assert not opening.done()

        server.acceptor.start()
        server.acceptor.start()

        assert await reader.readexactly(1) == server.name
        writers, owners = await opening
        assert owners == [0, 0, 0]
        await close_all([writer, *writers])

    run(1, work)


def test_patience_has_an_end() -> None:
    assert hold_back_s(0) == 0
    assert 0 < hold_back_s(1) < hold_back_s(2) <= MAX_HOLD_BACK_S
    assert hold_back_s(1000) == MAX_HOLD_BACK_S
