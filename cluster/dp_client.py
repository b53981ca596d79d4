"""DpClient: one CoreClient over all replicas of a cluster, with a balancer in front.

Lives in each front end; all methods run on its event loop. Learns who serves from the supervisor (`apply`, by
way of the lifeline) and how busy each is from the coordinator's snapshots. A lost replica's requests continue on
another one, or on the same one once it is back (see replay.py); above this class nobody notices. A coordinator that
dies costs nothing but fresh numbers.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping

import msgspec
import zmq
import zmq.asyncio

from ..engine.core_client import CoreSockets
from ..engine.errors import PoisonousRequestError, ReplicaLostError
from ..engine.messages import AbortRequests, EngineCoreOutput, EngineCoreRequest, EngineStats
from ..shm.sockets import connect_sub
from .load_balancer import LeastLoadedBalancer
from .messages import FleetUpdate, FrontEndConnection, LoadSnapshot, ReplicaInfo, ReplicaState
from .replay import ReplayLog, ReplayStats

log = logging.getLogger(__name__)


class DpClient:
    """Send each request to the replica that the balancer picks; collect the outputs of all.

    Implements `CoreClient`. replay_wait_s: how long a lost request may wait for a replica, by `clock`.
    """

    def __init__(
        self,
        connection: FrontEndConnection,
        *,
        replay_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._replay = ReplayLog(wait_s=replay_wait_s)
        self._balancer = LeastLoadedBalancer()
        self._replicas: dict[int, ReplicaInfo] = {}
        self._stats: dict[int, EngineStats] = {}
        self._last_group: tuple[str | None, int] = (None, 0)
        self._own_outputs: list[EngineCoreOutput] = []
        self._has_own_outputs = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
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

    @property
    def replay_stats(self) -> ReplayStats:
        """Counters of lost and continued requests."""
        return self._replay.stats()

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
        """Take the supervisor's word on who serves, and where. Requests have moved when it returns."""
        assert self._sockets is not None
        for dp_rank in self._replicas.keys() - {replica.dp_rank for replica in update.replicas}:
            if self._replicas.pop(dp_rank).state is ReplicaState.READY:
                self._lose(dp_rank)
        for replica in update.replicas:
            known = self._replicas.get(replica.dp_rank)
            if known == replica:
                continue
            self._replicas[replica.dp_rank] = replica
            # A replica may be lost and back, under a new epoch, between two updates.
            if known is not None and known.state is ReplicaState.READY:
                if replica.state is ReplicaState.WITHHELD and replica.epoch == known.epoch:
                    self._move_away(replica.dp_rank)
                    continue
                self._lose(replica.dp_rank)
            if replica.state is ReplicaState.READY:
                self._sockets.connect(replica.dp_rank, replica.input_address)
        self._send_lost_requests()

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Give the request to the least loaded replica.

        Raises NoReplicaError when none serves, PoisonousRequestError when an equal one has killed replicas.
        """
        if self._replay.is_blamed(request):
            raise PoisonousRequestError()
        # Samples of one prompt come one after the other, and share its blocks.
        group_id, dp_rank = self._last_group
        if request.group_id is None or request.group_id != group_id or dp_rank not in self._usable():
            dp_rank = self._choose()
        self._last_group = (request.group_id, dp_rank)
        self._replay.admit(request, dp_rank)
        self._send(dp_rank, request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Have the replicas forget these requests; unknown ones are ignored."""
        assert self._sockets is not None
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            dp_rank = self._replay.forget(request_id)
            if dp_rank is not None:
                by_replica.setdefault(dp_rank, []).append(request_id)
        for dp_rank, ids in by_replica.items():
            # A replica that is gone has forgotten them.
            with contextlib.suppress(ReplicaLostError):
                self._sockets.send(dp_rank, AbortRequests(request_ids=ids))
        self._send_lost_requests()

    async def get_outputs(self) -> list[EngineCoreOutput]:
        """Wait for the next outputs of any replica."""
        if self._receive_task is None:
            self._receive_task = asyncio.create_task(self._receive(), name="engine outputs")
        own = asyncio.create_task(self._has_own_outputs.wait())
        try:
            await asyncio.wait({self._receive_task, own}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            own.cancel()
        if self._own_outputs:
            outputs, self._own_outputs = self._own_outputs, []
            self._has_own_outputs.clear()
            return outputs
        task, self._receive_task = self._receive_task, None
        return await task

    async def reset_prefix_cache(self) -> bool:
        """Have every replica that serves forget its cached prefixes. False: in one of them requests hold blocks."""
        assert self._sockets is not None
        calls = [self._sockets.reset_prefix_cache(dp_rank) for dp_rank in self._ready()]
        return all(await asyncio.gather(*calls))

    async def close(self) -> None:
        """Let go of all sockets. Idempotent."""
        if self._expiry is not None:
            self._expiry.cancel()
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

    def _usable(self) -> list[int]:
        """Replicas that may get a request: not the one where a suspect is tried, unless there is no other."""
        ready = self._ready()
        return [rank for rank in ready if rank != self._replay.on_trial] or ready

    def _choose(self) -> int:
        inflight = {rank: self._replay.num_unfinished(rank) for rank in self._usable()}
        return self._balancer.choose(list(inflight), inflight, self._stats)

    def _send(self, dp_rank: int, request: EngineCoreRequest) -> None:
        assert self._sockets is not None
        # One that cannot be sent is lost with its replica, which the supervisor is about to announce.
        with contextlib.suppress(ReplicaLostError):
            self._sockets.send(dp_rank, request)

    async def _receive(self) -> list[EngineCoreOutput]:
        assert self._sockets is not None
        outputs = self._replay.accept((await self._sockets.recv()).outputs)
        # A suspect that made a token was cleared, and the next one may be tried.
        self._send_lost_requests()
        return outputs

    def _lose(self, dp_rank: int) -> None:
        assert self._sockets is not None
        self._sockets.disconnect(dp_rank)
        num_lost = self._replay.num_unfinished(dp_rank)
        self._tell(self._replay.lose(dp_rank, self._clock()))
        log.warning("replica lost dp_rank=%d requests=%d", dp_rank, num_lost)

    def _move_away(self, dp_rank: int) -> None:
        """A replica lives, and shall have none of our requests."""
        assert self._sockets is not None
        moved = self._replay.move_away(dp_rank, self._clock())
        with contextlib.suppress(ReplicaLostError):
            self._sockets.send(dp_rank, AbortRequests(request_ids=moved))
        log.info("replica withheld dp_rank=%d requests=%d", dp_rank, len(moved))

    def _send_lost_requests(self) -> None:
        """Give lost requests to the replicas that serve, and see to it that none waits for ever."""
        if self._ready():
            for request in self._replay.replayable():
                dp_rank = self._choose()
                self._replay.replayed(request.request_id, dp_rank)
                self._send(dp_rank, request)
                log.info(
                    "request continues dp_rank=%d attempt=%d output_tokens=%d request_id=%s",
                    dp_rank,
                    request.attempt,
                    len(request.output_token_ids),
                    request.request_id,
                )
        expiry_at = self._replay.next_expiry_at()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if expiry_at is not None:
            delay_s = max(0.0, expiry_at - self._clock())
            self._expiry = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._tell(self._replay.expire(self._clock()))
        self._send_lost_requests()

    def _tell(self, outputs: list[EngineCoreOutput]) -> None:
        if outputs:
            self._own_outputs += outputs
            self._has_own_outputs.set()

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
