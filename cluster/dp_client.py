"""DpClient: one CoreClient over all replicas of a cluster, with a balancer in front.

Lives in each front end; all methods run on its event loop. Learns who serves from the supervisor (`apply`, by
way of the lifeline) and how busy each is from the coordinator's snapshots. A lost replica's requests end with an
error output each; a coordinator that dies costs nothing but fresh numbers.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

import msgspec
import zmq
import zmq.asyncio

from ..engine.core_client import CoreSockets
from ..engine.messages import AbortRequests, EngineCoreOutput, EngineCoreRequest, EngineStats, FinishReason
from ..shm.sockets import connect_sub
from .load_balancer import LeastLoadedBalancer
from .messages import FleetUpdate, FrontEndConnection, LoadSnapshot, ReplicaInfo, ReplicaState

log = logging.getLogger(__name__)


class DpClient:
    """Send each request to the replica that the balancer picks; collect the outputs of all.

    Implements `CoreClient`. Idempotent `close`.
    """

    def __init__(self, connection: FrontEndConnection) -> None:
        self._connection = connection
        self._balancer = LeastLoadedBalancer()
        self._replicas: dict[int, ReplicaInfo] = {}
        self._stats: dict[int, EngineStats] = {}
        self._owners: dict[str, int] = {}
        self._inflight: Counter[int] = Counter()
        self._lost_outputs: list[EngineCoreOutput] = []
        self._has_lost_outputs = asyncio.Event()
        self._sockets: CoreSockets | None = None
        self._context: zmq.asyncio.Context | None = None
        self._snapshot_task: asyncio.Task[None] | None = None
        self._receive_task: asyncio.Task[list[EngineCoreOutput]] | None = None

    @property
    def replicas(self) -> Mapping[int, ReplicaInfo]:
        """All replicas that the supervisor has named, by dp_rank."""
        return self._replicas

    @property
    def num_ready(self) -> int:
        """Replicas that serve."""
        return len(self._ready())

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus output that every replica takes, in tokens; None while none is known to be ready."""
        known = [replica.max_model_len for replica in self._replicas.values() if replica.max_model_len]
        return min(known, default=None)

    @property
    def stats(self) -> Mapping[int, EngineStats]:
        """The newest published load of each replica, by dp_rank; a replica that is absent is unknown."""
        return self._stats

    async def start(self) -> None:
        """Bind and connect. Call once, on the event loop."""
        self._context = zmq.asyncio.Context()
        self._sockets = CoreSockets(
            client_index=self._connection.client_index,
            incarnation=self._connection.incarnation,
            output_address=self._connection.output_address,
        )
        self._snapshot_task = asyncio.create_task(self._follow_snapshots(), name="load snapshots")

    def apply(self, update: FleetUpdate) -> None:
        """Take the supervisor's word on who serves, and where."""
        assert self._sockets is not None
        for replica in update.replicas:
            known = self._replicas.get(replica.dp_rank)
            if known == replica:
                continue
            self._replicas[replica.dp_rank] = replica
            if replica.state is ReplicaState.READY:
                self._sockets.connect(replica.dp_rank, replica.input_address)
            elif known is not None and known.state is ReplicaState.READY:
                self._lose(replica.dp_rank)

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Give the request to the least loaded replica. Raises NoReplicaError when none serves."""
        assert self._sockets is not None
        dp_rank = self._balancer.choose(self._ready(), self._inflight, self._stats)
        self._owners[request.request_id] = dp_rank
        self._inflight[dp_rank] += 1
        await self._sockets.send(dp_rank, request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Have the replicas forget these requests; unknown ones are ignored."""
        assert self._sockets is not None
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            dp_rank = self._forget(request_id)
            if dp_rank is not None:
                by_replica.setdefault(dp_rank, []).append(request_id)
        for dp_rank, ids in by_replica.items():
            if self._replicas[dp_rank].state is ReplicaState.READY:
                await self._sockets.send(dp_rank, AbortRequests(request_ids=ids))

    async def get_outputs(self) -> list[EngineCoreOutput]:
        """Wait for the next outputs of any replica."""
        if self._receive_task is None:
            self._receive_task = asyncio.create_task(self._receive(), name="engine outputs")
        lost = asyncio.create_task(self._has_lost_outputs.wait())
        try:
            await asyncio.wait({self._receive_task, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if self._lost_outputs:
            outputs, self._lost_outputs = self._lost_outputs, []
            self._has_lost_outputs.clear()
            return outputs
        task, self._receive_task = self._receive_task, None
        return await task

    async def close(self) -> None:
        """Let go of all sockets. Idempotent."""
        for task in (self._snapshot_task, self._receive_task):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._snapshot_task = self._receive_task = None
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _ready(self) -> list[int]:
        return [rank for rank, replica in self._replicas.items() if replica.state is ReplicaState.READY]

    async def _receive(self) -> list[EngineCoreOutput]:
        assert self._sockets is not None
        outputs = (await self._sockets.recv()).outputs
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)
        return outputs

    def _forget(self, request_id: str) -> int | None:
        dp_rank = self._owners.pop(request_id, None)
        if dp_rank is not None:
            self._inflight[dp_rank] -= 1
        return dp_rank

    def _lose(self, dp_rank: int) -> None:
        assert self._sockets is not None
        self._sockets.disconnect(dp_rank)
        lost = [request_id for request_id, owner in self._owners.items() if owner == dp_rank]
        for request_id in lost:
            self._forget(request_id)
            self._lost_outputs.append(
                EngineCoreOutput(
                    request_id=request_id,
                    finish_reason=FinishReason.ERROR,
                    error=f"replica {dp_rank} was lost while it computed this request",
                )
            )
        if lost:
            self._has_lost_outputs.set()
        log.warning("replica lost dp_rank=%d requests=%d", dp_rank, len(lost))

    async def _follow_snapshots(self) -> None:
        assert self._context is not None
        decoder = msgspec.msgpack.Decoder(LoadSnapshot)
        socket = connect_sub(self._context, self._connection.snapshot_address)
        try:
            while True:
                try:
                    snapshot = decoder.decode(await socket.recv())
                except msgspec.DecodeError as error:
                    log.warning("malformed snapshot dropped error=%s", error)
                    continue
                self._stats = {stats.dp_rank: stats for stats in snapshot.stats}
        finally:
            socket.close(linger=0)
