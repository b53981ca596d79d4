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
from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec
import zmq
import zmq.asyncio

from ..engine.core_client import CoreSockets
from ..engine.errors import PoisonousRequestError, ReplicaLostError
from ..engine.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineStats,
    FollowPrefixes,
    StepOutputs,
)
from ..shm.sockets import connect_sub
from .errors import NoReplicaError
from .front_end_board import FrontEndBoard
from .messages import FleetUpdate, FrontEndConnection, LoadSnapshot, ReplicaInfo, ReplicaState
from .replay import ReplayLog, ReplayStats
from .request_router import RequestRouter
from .routing import Decision, RoutingOptions, RoutingReason
from .supervision_events import ClusterState

log = logging.getLogger(__name__)

MAX_DECISIONS = 4096
"""The last ones, for those who ask why a request went where it went."""
_TRIAL_POLL_S = 0.05


class DpClient:
    """Send each request to the replica that the balancer picks; collect the outputs of all.

    Implements `CoreClient`. replay_wait_s: how long a lost request may wait for a replica, by `clock`.
    board:     what the front ends of the cluster tell each other; None: there is one
    on_blamed: told the fingerprints of requests that were found to kill replicas, for the other front ends
    """

    def __init__(
        self,
        connection: FrontEndConnection,
        *,
        replay_wait_s: float,
        routing: RoutingOptions | None = None,
        board: FrontEndBoard | None = None,
        on_blamed: Callable[[list[bytes]], None] = lambda fingerprints: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._board = board or FrontEndBoard.alone()
        self._on_blamed = on_blamed
        self._replay = ReplayLog(wait_s=replay_wait_s, board=self._board)
        self._router = RequestRouter(
            routing or RoutingOptions(),
            client_index=connection.client_index,
            incarnation=connection.incarnation,
            board=self._board,
        )
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._snapshot_at: float | None = None
        self._replicas: dict[int, ReplicaInfo] = {}
        self._stats: dict[int, EngineStats] = {}
        self._is_stopping = False
        self._own_outputs: list[EngineCoreOutput] = []
        self._has_own_outputs = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._sockets: CoreSockets | None = None
        self._context: zmq.asyncio.Context | None = None
        self._snapshot_task: asyncio.Task[None] | None = None
        self._receive_task: asyncio.Task[StepOutputs] | None = None

    @property
    def replicas(self) -> Mapping[int, ReplicaInfo]:
        """All replicas that the supervisor has named, by dp_rank."""
        return self._replicas

    @property
    def num_ready(self) -> int:
        """Replicas that serve."""
        return len(self._ready())

    @property
    def is_coming_back(self) -> bool:
        """True while a replica that was lost is to serve again. One that was given up counts: without any other the
        cluster ends.
        """
        return not self._is_stopping and any(
            replica.state is ReplicaState.LOST
            or (replica.state is ReplicaState.STARTING and replica.epoch > 0)
            for replica in self._replicas.values()
        )

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
    def block_size(self) -> int | None:
        """Tokens of a KV block of every replica; None while none is known to be ready."""
        known = (replica.block_size for replica in self._replicas.values())
        return next((block_size for block_size in known if block_size), None)

    @property
    def num_routed(self) -> Mapping[RoutingReason, int]:
        """Decisions of this front end, by reason."""
        return self._router.num_by_reason

    @property
    def snapshot_age_s(self) -> float | None:
        """How long ago the last snapshot of the loads was made, in seconds. None: there was none yet."""
        return None if self._snapshot_at is None else max(0.0, self._clock() - self._snapshot_at)

    def decision(self, request_id: str) -> Decision | None:
        """Say where one of the last requests went, and why; for samples of one prompt, where the last of them did."""
        return self._decisions.get(request_id)

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
                self._router.join(replica.dp_rank, block_size=replica.block_size or 1)
                if known is None or known.epoch != replica.epoch or known.state is not ReplicaState.WITHHELD:
                    self._replay.joined(replica.dp_rank, replica.epoch)
                self._follow_prefixes(replica.dp_rank)
        if update.state in (ClusterState.STOPPING, ClusterState.DONE) and not self._is_stopping:
            self._is_stopping = True
            self._tell(self._replay.stop())
        self._send_lost_requests()

    def learn_blamed(self, fingerprints: list[bytes]) -> None:
        """Take what other front ends found out of requests that kill replicas."""
        self._tell(self._replay.learn(fingerprints))

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Give the request to the replica that the balancer picks, or have it wait for one that is coming back.

        Raises NoReplicaError when none serves and none is coming back, QueueFullError when too many wait,
        InvalidRequestError when the replica that it asks for does not serve, PoisonousRequestError when an equal one
        has killed replicas.
        """
        if self._replay.is_blamed(request):
            raise PoisonousRequestError()
        if not self._ready():
            # One that wants a certain replica is told at once: it may not go to the first that is back.
            if not self.is_coming_back or request.routed_dp_rank is not None:
                raise NoReplicaError()
            self._router.check_room(self._replay.num_parked)
            self._replay.wait(request, self._clock())
            if self._expiry is None or request.deadline_at is not None:
                self._send_lost_requests()
            return
        request, decision = self._route(request)
        self._replay.admit(request, decision.dp_rank)
        self._send(decision.dp_rank, request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Have the replicas forget these requests; unknown ones are ignored."""
        assert self._sockets is not None
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            dp_rank = self._replay.forget(request_id)
            self._router.drop(request_id, self._clock())
            if dp_rank is not None:
                by_replica.setdefault(dp_rank, []).append(request_id)
        for dp_rank, ids in by_replica.items():
            # A replica that is gone has forgotten them.
            with contextlib.suppress(ReplicaLostError):
                self._sockets.send(dp_rank, AbortRequests(request_ids=ids))
        self._send_lost_requests()

    async def get_outputs(self) -> StepOutputs:
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
            return StepOutputs(others=outputs)
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
        """Replicas that may get a request: not those where a suspect is tried, unless there is no other."""
        ready = self._ready()
        trials = {self._replay.on_trial, *self._board.trials_elsewhere()}
        return [rank for rank in ready if rank not in trials] or ready

    def _route(
        self, request: EngineCoreRequest, *, is_replay: bool = False
    ) -> tuple[EngineCoreRequest, Decision]:
        request, decision = self._router.route(request, self._usable(), self._clock(), is_replay=is_replay)
        self._decisions[request.known_as] = decision
        if len(self._decisions) > MAX_DECISIONS:
            self._decisions.popitem(last=False)
        return request, decision

    def _follow_prefixes(self, dp_rank: int) -> None:
        assert self._sockets is not None
        if self._router.follows_prefixes:
            with contextlib.suppress(ReplicaLostError):
                self._sockets.send(dp_rank, FollowPrefixes(client_index=self._connection.client_index))

    def _send(self, dp_rank: int, request: EngineCoreRequest) -> None:
        assert self._sockets is not None
        # One that cannot be sent is lost with its replica, which the supervisor is about to announce.
        with contextlib.suppress(ReplicaLostError):
            self._sockets.send(dp_rank, request)

    async def _receive(self) -> StepOutputs:
        assert self._sockets is not None
        received = await self._sockets.recv()
        outputs = self._replay.accept(received.outputs)
        self._router.observe(outputs, self._clock())
        replica = self._replicas.get(received.dp_rank)
        if received.prefix_delta is not None and replica is not None and replica.epoch == received.epoch:
            try:
                is_whole = self._router.take_delta(received.dp_rank, received.prefix_delta)
            except ValueError as error:
                log.warning("malformed prefixes dropped dp_rank=%d error=%s", received.dp_rank, error)
                is_whole = False
            if not is_whole and replica.state is ReplicaState.READY:
                self._follow_prefixes(received.dp_rank)
        # A suspect that made a token was cleared, and the next one may be tried.
        self._send_lost_requests()
        return outputs

    def _lose(self, dp_rank: int) -> None:
        assert self._sockets is not None
        self._sockets.disconnect(dp_rank)
        self._router.leave(dp_rank)
        num_lost = self._replay.num_unfinished(dp_rank)
        self._tell(self._replay.lose(dp_rank, self._clock()))
        if blamed := self._replay.take_blamed():
            self._on_blamed(blamed)
        log.warning("replica lost dp_rank=%d requests=%d", dp_rank, num_lost)

    def _move_away(self, dp_rank: int) -> None:
        """A replica lives, and shall have none of our requests."""
        assert self._sockets is not None
        self._router.leave(dp_rank)
        moved = self._replay.move_away(dp_rank, self._clock())
        with contextlib.suppress(ReplicaLostError):
            self._sockets.send(dp_rank, AbortRequests(request_ids=moved))
        log.info("replica withheld dp_rank=%d requests=%d", dp_rank, len(moved))

    def _send_lost_requests(self) -> None:
        """Give lost requests to the replicas that serve, and see to it that none waits for ever."""
        if self._ready():
            for request in self._replay.replayable():
                sent, decision = self._route(request, is_replay=True)
                dp_rank = decision.dp_rank
                self._replay.replayed(request.request_id, dp_rank)
                self._send(dp_rank, sent)
                log.info(
                    "request continues dp_rank=%d attempt=%d output_tokens=%d request_id=%s",
                    dp_rank,
                    request.attempt,
                    len(request.output_token_ids),
                    request.known_as,
                )
        expiry_at = self._replay.next_expiry_at()
        if expiry_at is not None and self._replay.awaits_trial_elsewhere:
            # Nobody tells us of its end.
            expiry_at = min(expiry_at, self._clock() + _TRIAL_POLL_S)
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

    def take_snapshot(self, snapshot: LoadSnapshot) -> None:
        """Take the coordinator's word on how busy the replicas are."""
        self._stats = {stats.dp_rank: stats for stats in snapshot.stats}
        self._snapshot_at = snapshot.published_at
        for stats in snapshot.stats:
            replica = self._replicas.get(stats.dp_rank)
            # A replica that was lost may still be in the snapshot.
            if replica is not None and replica.epoch == stats.epoch:
                self._router.take_report(stats)

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
                self.take_snapshot(snapshot)
        finally:
            socket.close(linger=0)
