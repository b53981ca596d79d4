"""How a front end reaches engine cores.

    CoreClient         what `AsyncLLM` needs: requests in, outputs out, on an event loop
      ProcessCoreClient  one engine core, started and watched here (`AsyncLLM.launch`)
      DpClient           all replicas of a cluster (cluster/dp_client.py)
    CoreSockets        the ZMQ mechanics of both

An engine core in this very process needs none of it: inproc_client.py. It stands apart, for a front end of a cluster
has no use for schedulers and executors, and would import them at each start.

When an engine core dies, `ProcessCoreClient.get_outputs` raises ReplicaLostError; `CoreSockets` stays silent:
whoever watches the process disconnects it.
"""

import asyncio
import itertools
import logging
import time
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from ..shm.errors import ProcessDiedError
from ..shm.process import ChildMessage, ChildProcess, ChildSpec, Progress, Spawner, wait_all_ready
from ..shm.runtime_dir import RuntimeDir
from ..shm.sockets import UNBOUNDED, bind_pull, connect_push
from ..workers.messages import ExecutorReport
from .config import EngineConfig
from .core_args import EngineCoreArgs, EngineCoreReady
from .errors import ReplicaLostError
from .messages import (
    AbortRequests,
    ClientHello,
    ClientMessage,
    EngineCoreOutputs,
    EngineCoreRequest,
    ResetPrefixCache,
    StepOutputs,
)

log = logging.getLogger(__name__)

_REPORT_TIMEOUT_S = 10.0
"""Beyond the executor's own start timeout, for the engine core to say which of its workers was late."""


class CoreClient(Protocol):
    """A front end's way to engine cores. All methods run on one event loop."""

    async def start(self) -> None:
        """Connect. Call once, before anything else."""
        ...

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to an engine core. Raises RequestError when none can take it."""
        ...

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Have requests forgotten; unknown ids are ignored, nothing is answered."""
        ...

    async def get_outputs(self) -> StepOutputs:
        """Wait for the next outputs. Raises ReplicaLostError when none will come any more."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Have all cached prefixes forgotten. False: somewhere requests hold blocks, and nothing was forgotten there.

        Answered only while someone waits in `get_outputs`. Raises ReplicaLostError.
        """
        ...

    async def close(self) -> None:
        """Let go of everything. Idempotent."""
        ...


class CoreSockets:
    """The sockets of one front end: one for all outputs, one towards each engine core.

    client_index, incarnation: of this front end, as every engine core is told first
    output_address:            where this front end binds for outputs
    Must be made on the event loop's thread. Raises TransportError when the address cannot be bound.
    """

    def __init__(self, *, client_index: int, incarnation: int, output_address: str) -> None:
        self._hello = ClientHello(
            client_index=client_index, incarnation=incarnation, output_address=output_address
        )
        self._context = zmq.asyncio.Context()
        # Requests go out through plain sockets: sending never waits, and so needs no event loop.
        self._send_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outputs = bind_pull(self._context, output_address)
        self._replicas: dict[int, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._call_ids = itertools.count()
        # Calls without an answer, by replica and call_id.
        self._resets: dict[tuple[int, int], asyncio.Future[bool]] = {}

    def connect(self, dp_rank: int, input_address: str) -> None:
        """Reach a replica, and say hello. Again for the same rank: forget the old address first."""
        self.disconnect(dp_rank)
        # What could not be sent would never be answered; a replica that takes nothing is watched, and lost.
        self._replicas[dp_rank] = connect_push(
            self._send_context, input_address, max_queued_messages=UNBOUNDED
        )
        self.send(dp_rank, self._hello)

    def disconnect(self, dp_rank: int) -> None:
        """Forget a replica, with everything that was not sent yet. One that is unknown is no error."""
        socket = self._replicas.pop(dp_rank, None)
        if socket is not None:
            socket.close(linger=0)
        for key, future in self._resets.items():
            if key[0] == dp_rank and not future.done():
                future.set_exception(ReplicaLostError(f"replica {dp_rank} was lost"))

    def send(self, dp_rank: int, message: ClientMessage) -> None:
        """Send to a replica; never waits. Raises ReplicaLostError when it is not connected."""
        socket = self._replicas.get(dp_rank)
        if socket is None:
            raise ReplicaLostError(f"replica {dp_rank} is not connected")
        socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def recv(self) -> EngineCoreOutputs:
        """Wait for the next outputs of any replica. A message that does not decode is dropped."""
        while True:
            data = await self._outputs.recv()
            try:
                received = self._decoder.decode(data)
            except msgspec.DecodeError as error:
                log.warning("malformed outputs dropped bytes=%d error=%s", len(data), error)
                continue
            if received.reset is None:
                return received
            future = self._resets.get((received.dp_rank, received.reset.call_id))
            if future is not None and not future.done():
                future.set_result(received.reset.is_reset)

    async def reset_prefix_cache(self, dp_rank: int) -> bool:
        """Have a replica forget its cached prefixes; the answer comes in while someone waits in `recv`.

        Raises ReplicaLostError when it is not connected, or is lost meanwhile.
        """
        call_id = next(self._call_ids)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets[dp_rank, call_id] = future
        try:
            self.send(dp_rank, ResetPrefixCache(client_index=self._hello.client_index, call_id=call_id))
            return await future
        finally:
            del self._resets[dp_rank, call_id]

    def close(self) -> None:
        """Close all sockets. A `recv` in progress must be cancelled before. Idempotent."""
        for dp_rank in list(self._replicas):
            self.disconnect(dp_rank)
        if not self._outputs.closed:
            self._outputs.close(linger=0)
            self._context.term()
            self._send_context.term()


class ProcessCoreClient:
    """One engine core in a process of its own, started, watched and stopped here.

    `launch` starts it and blocks until it is ready; the rest runs on an event loop. Implements `CoreClient`.
    """

    def __init__(
        self,
        *,
        child: ChildProcess,
        spawner: Spawner,
        runtime_dir: RuntimeDir,
        stop_timeout_s: float,
    ) -> None:
        self._child = child
        self._spawner = spawner
        self._runtime_dir = runtime_dir
        self._stop_timeout_s = stop_timeout_s
        self._sockets: CoreSockets | None = None
        self._lost: asyncio.Future[ReplicaLostError] | None = None
        assert child.ready is not None
        self.report: ExecutorReport = msgspec.msgpack.decode(child.ready.payload, type=EngineCoreReady).report
        """What the engine core said when it was ready."""

    @classmethod
    def launch(
        cls, config: EngineConfig, *, target: str = "phalanx.engine.core_proc:main"
    ) -> "ProcessCoreClient":
        """Start an engine core and its workers. Blocks at most the executor's start timeout.

        Raises StartupError or ConfigError; nothing is left running then.
        """
        runtime_dir = RuntimeDir.create()
        spawner = Spawner("engine")
        args = EngineCoreArgs(
            config=config,
            dp_rank=0,
            epoch=0,
            input_address=runtime_dir.address("core"),
            stats_address=None,
            device_indices=list(range(config.parallel.tensor_parallel_size)),
        )
        spec = ChildSpec(role="dp0", target=target, args=msgspec.msgpack.encode(args), rank=0)
        child: ChildProcess | None = None
        try:
            spawner.start()
            child = spawner.spawn(spec)
            deadline = time.monotonic() + config.executor.start_timeout_s + _REPORT_TIMEOUT_S
            wait_all_ready([child], deadline, _log_phase)
            return cls(
                child=child,
                spawner=spawner,
                runtime_dir=runtime_dir,
                stop_timeout_s=config.executor.stop_timeout_s,
            )
        except BaseException:
            if child is not None:
                child.stop(reason="start failed", timeout_s=config.executor.stop_timeout_s)
            spawner.close()
            runtime_dir.close()
            raise

    async def start(self) -> None:
        """Connect to the engine core, and watch it."""
        loop = asyncio.get_running_loop()
        self._lost = loop.create_future()
        self._sockets = CoreSockets(
            client_index=0, incarnation=0, output_address=self._runtime_dir.address("outputs")
        )
        self._sockets.connect(0, self._runtime_dir.address("core"))
        loop.add_reader(self._child.lifeline_fd, self._read_lifeline)

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request. Raises ReplicaLostError when the engine core is gone."""
        assert self._sockets is not None
        assert self._lost is not None
        if self._lost.done():
            raise self._lost.result()
        self._sockets.send(0, request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Have requests forgotten. An engine core that is gone has forgotten them."""
        assert self._sockets is not None
        assert self._lost is not None
        if not self._lost.done():
            self._sockets.send(0, AbortRequests(request_ids=request_ids))

    async def reset_prefix_cache(self) -> bool:
        """Have all cached prefixes forgotten. Raises ReplicaLostError."""
        assert self._sockets is not None
        return await self._sockets.reset_prefix_cache(0)

    async def get_outputs(self) -> StepOutputs:
        """Wait for the next outputs. Raises ReplicaLostError when the engine core is gone."""
        assert self._sockets is not None
        assert self._lost is not None
        receive = asyncio.ensure_future(self._sockets.recv())
        try:
            waited: list[asyncio.Future[Any]] = [receive, self._lost]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if receive.done():
                return receive.result().outputs
            raise self._lost.result()
        finally:
            if not receive.done():
                receive.cancel()
                await asyncio.wait({receive})

    async def close(self) -> None:
        """Stop the engine core and its workers: at most the stop timeout and a few seconds. Idempotent."""
        if self._sockets is not None:
            asyncio.get_running_loop().remove_reader(self._child.lifeline_fd)
            self._sockets.close()
            self._sockets = None
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Stop the process, without an event loop. Idempotent."""
        # The engine core stops its workers within the same budget before it leaves itself.
        self._child.stop(reason="closed", timeout_s=2 * self._stop_timeout_s)
        self._spawner.close()
        self._runtime_dir.close()

    def _read_lifeline(self) -> None:
        """Called by the loop: a message, or the end of the process."""
        assert self._lost is not None
        self._child.receive()
        if not self._child.has_hung_up or self._lost.done():
            return
        asyncio.get_running_loop().remove_reader(self._child.lifeline_fd)
        # The lifeline ends a moment before the process can be reaped.
        self._child.wait(1.0)
        error = self._child.death(ProcessDiedError)
        log.error("engine core lost: %s", error)
        self._lost.set_result(ReplicaLostError(f"the replica was lost: {error}"))
        if self._sockets is not None:
            self._sockets.disconnect(0)


def _log_phase(child: ChildProcess, message: ChildMessage) -> None:
    if isinstance(message, Progress):
        log.info("engine core starts phase=%s", message.phase)
