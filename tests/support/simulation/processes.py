"""The processes of a simulated cluster: real decisions, and around them a world without sockets, processes and time.

Real are `DpClient` with its replay log and balancer, `EngineCoreLoop`, `LoadTable` and `Supervision`. Simulated are
the sockets, the processes, the steps of an engine core, and the supervisor's driver.
"""

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from phalanx.cluster.dp_client import DpClient
from phalanx.cluster.errors import NoReplicaError
from phalanx.cluster.load_table import LoadTable
from phalanx.cluster.messages import FleetUpdate, FrontEndConnection, LoadSnapshot, ReplicaState
from phalanx.engine.core_control import FrontEndGone
from phalanx.engine.core_io import ClientOutputs
from phalanx.engine.core_loop import EngineCoreLoop
from phalanx.engine.errors import PoisonousRequestError, ReplicaLostError
from phalanx.engine.messages import (
    AbortRequests,
    ClientHello,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    FinishReason,
    StepOutputs,
)
from phalanx.engine.prefix_log import PrefixDelta, PrefixLog
from phalanx.workers.sampling_params import SamplingParams

from ..step_outputs import write_out
from .ledger import Record, Violation, token_of
from .schedule import Happening
from .world import Link

if TYPE_CHECKING:
    from .cluster import SimulatedCluster

CLIENT_INDEX = 0


@lru_cache(maxsize=64)
def params_of(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens)


def finish(coroutine: Any) -> Any:
    """Run a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


class Poisoned(Exception):
    """A worker died of what it was to compute."""


class TinyCore:
    """What `EngineCoreLoop` needs of an engine core: each step makes one token of each request."""

    next_deadline_at = None

    def __init__(self, dp_rank: int, epoch: int, cluster: "SimulatedCluster") -> None:
        self._dp_rank = dp_rank
        self._epoch = epoch
        self._world = cluster.world
        self._requests: dict[str, tuple[EngineCoreRequest, int]] = {}
        self._prefixes = PrefixLog(epoch=epoch)
        self._num_reports = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def request_ids(self) -> set[str]:
        return set(self._requests)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def add_request(self, request: EngineCoreRequest) -> None:
        known = self._requests.get(request.request_id)
        if known is None or known[0].attempt < request.attempt:
            self._requests[request.request_id] = request, len(request.output_token_ids)

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def abort_client(self, client_index: int) -> int:
        num_aborted = len(self._requests)
        self._requests.clear()
        return num_aborted

    def abort_all(self) -> dict[int, StepOutputs]:
        outputs = [
            EngineCoreOutput(request_id=name, attempt=request.attempt, finish_reason=FinishReason.ABORT)
            for name, (request, _) in self._requests.items()
        ]
        self._requests.clear()
        return {CLIENT_INDEX: StepOutputs(others=outputs)} if outputs else {}

    def step(self) -> dict[int, StepOutputs]:
        outputs = StepOutputs()
        for name, (request, position) in list(self._requests.items()):
            content, poison_at = request.prompt_token_ids
            if position == poison_at:
                raise Poisoned
            is_last = position + 1 >= request.sampling_params.max_tokens  # type: ignore[operator]
            token_id = token_of(content, position)
            if request.attempt == 0 and position > 0 and not is_last:
                outputs.request_ids.append(name)
                outputs.token_ids.append(token_id)
            else:
                output = EngineCoreOutput(
                    request_id=name,
                    attempt=request.attempt,
                    new_token_ids=[token_id],
                    finish_reason=FinishReason.LENGTH if is_last else None,
                )
                outputs.others.append(output)
            if is_last:
                del self._requests[name]
            else:
                self._requests[name] = request, position + 1
        return {CLIENT_INDEX: outputs} if outputs.request_ids or outputs.others else {}

    def take_kv_events(self) -> list[Any]:
        return []

    def take_prefix_delta(self) -> PrefixDelta | None:
        return self._prefixes.take_delta()

    def follow_prefixes(self) -> PrefixDelta:
        return self._prefixes.follow([])

    def stats(self) -> EngineStats:
        self._num_reports += 1
        return EngineStats(
            dp_rank=self._dp_rank,
            epoch=self._epoch,
            sequence=self._num_reports,
            reported_at=self._world.now,
            num_waiting=0,
            num_running=len(self._requests),
            num_prefill_tokens=0,
            kv_usage=0.0,
            num_free_blocks=1,
            num_free_tokens=16,
            num_blocks=1,
        )


class SimulatedProcess:
    """A child of the supervisor."""

    def __init__(self, cluster: "SimulatedCluster", role: str, epoch: int) -> None:
        self.cluster = cluster
        self.role = role
        self.epoch = epoch
        self.is_alive = True
        self.is_ready = False

    def become_ready(self) -> None:
        self.is_ready = True

    def die(self, exitcode: int) -> None:
        """End at once. A process that has ended stays so."""
        if self.is_alive:
            self.is_alive = False
            self.cut_links()
            self.cluster.supervisor.child_ended(self, exitcode)

    def cut_links(self) -> None:
        """What is on its way from here arrives in part, and nothing more comes in."""

    def terminate(self) -> None:
        self.die(0)


class SimulatedEngineCore(SimulatedProcess):
    """A replica. It takes the place of `CoreOutput`, too: what it puts there travels."""

    def __init__(self, cluster: "SimulatedCluster", role: str, epoch: int) -> None:
        super().__init__(cluster, role, epoch)
        self.dp_rank = int(role.removeprefix("dp"))
        self.address = f"{role}.{epoch}"
        self.core = TinyCore(self.dp_rank, epoch, cluster)
        self.loop = EngineCoreLoop(
            self.core,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            dp_rank=self.dp_rank,
            epoch=epoch,
            clock=cluster.world.clock,
        )
        self.is_halted = False
        self._incarnation = 0
        self._is_stepping = False
        self._num_steps = 0
        self._outputs: Link | None = None
        self._stats = Link(
            cluster.world,
            f"{self.address}>stats",
            cluster.report_load,
            repeats=0.1,
            drops=0.05,
            reorders=True,
        )

    def become_ready(self) -> None:
        super().become_ready()
        self.loop._report_stats()

    def receive(self, message: ClientHello | EngineCoreRequest | AbortRequests) -> None:
        """From a front end."""
        if self.is_alive:
            if isinstance(message, ClientHello):
                self._incarnation = max(self._incarnation, message.incarnation)
            elif isinstance(message, EngineCoreRequest):
                record = self.cluster.ledger.records[message.request_id]
                record.is_late = record.is_late or record.incarnation < self._incarnation
            self.loop._handle(message)
            self._wake()

    def put(self, item: ClientHello | ClientOutputs | EngineStats) -> None:
        """From the loop: what `CoreOutput` sends."""
        match item:
            case ClientHello():
                if self._outputs is not None:
                    self._outputs.cut()
                self._outputs = Link(
                    self.cluster.world,
                    f"{self.address}>{item.output_address}",
                    self.cluster.receiver_of(item.output_address),
                )
            case ClientOutputs():
                if self._outputs is not None:
                    self._outputs.send(item.outputs)
            case EngineStats():
                self._stats.send(item)

    def lose(self, incarnation: int) -> None:
        """From the supervisor: a front end has ended."""
        if self.is_alive:
            self.loop._handle(FrontEndGone(client_index=CLIENT_INDEX, incarnation=incarnation))

    def halt(self) -> None:
        """A worker died: no step comes to its end, and in a moment the engine core will know."""
        if self.is_alive and self.is_ready and not self.is_halted:
            self.is_halted = True
            world = self.cluster.world
            world.at(world.now + self.cluster.schedule.notice_s, self.die, 3)

    def cut_links(self) -> None:
        for link in (self._outputs, self._stats):
            if link is not None:
                link.cut()

    def terminate(self) -> None:
        self.loop._hand_over(self.core.abort_all())
        super().terminate()

    def _wake(self) -> None:
        if self.core.has_work and not self._is_stepping and not self.is_halted:
            self._is_stepping = True
            self._num_steps += 1
            world, step_s = self.cluster.world, self.cluster.schedule.step_s
            world.at(
                world.now + step_s * (0.5 + world.chance(self.dp_rank + 77, self._num_steps)), self._step
            )

    def _step(self) -> None:
        self._is_stepping = False
        if not self.is_alive or self.is_halted:
            return
        try:
            outputs = self.core.step()
        except Poisoned:
            self.cluster.num_poisoned += 1
            self.halt()
            return
        self.loop._hand_over(outputs)
        self.loop._report_stats()
        self._wake()


class SimulatedSockets:
    """Takes the place of `CoreSockets` in a front end."""

    def __init__(self, front_end: "SimulatedFrontEnd") -> None:
        self.arrived: deque[EngineCoreOutputs] = deque()
        self._front_end = front_end
        self._cluster = front_end.cluster
        self._links: dict[int, Link] = {}

    def connect(self, dp_rank: int, input_address: str) -> None:
        self.disconnect(dp_rank)
        self._links[dp_rank] = Link(
            self._cluster.world,
            f"{self._front_end.address}>{input_address}",
            self._cluster.receiver_of(input_address),
            repeats=0.05,
        )
        hello = ClientHello(
            client_index=CLIENT_INDEX,
            incarnation=self._front_end.epoch,
            output_address=self._front_end.address,
        )
        self.send(dp_rank, hello)

    def disconnect(self, dp_rank: int) -> None:
        link = self._links.pop(dp_rank, None)
        if link is not None:
            link.cut()

    def send(self, dp_rank: int, message: ClientHello | EngineCoreRequest | AbortRequests) -> None:
        if isinstance(message, EngineCoreRequest):
            self._cluster.ledger.sent(message, self._cluster.world.now)
        link = self._links.get(dp_rank)
        if link is None:
            raise ReplicaLostError(f"replica {dp_rank} is not connected")
        link.send(message)

    async def recv(self) -> EngineCoreOutputs:
        return self.arrived.popleft()

    def cut_all(self) -> None:
        for link in self._links.values():
            link.cut()


class SimulatedFrontEnd(SimulatedProcess):
    """An API server: the real `DpClient`, and the clients whose connections it holds."""

    def __init__(self, cluster: "SimulatedCluster", role: str, epoch: int) -> None:
        super().__init__(cluster, role, epoch)
        self.address = f"{role}.{epoch}"
        self.client = DpClient(
            FrontEndConnection(
                client_index=CLIENT_INDEX,
                incarnation=epoch,
                output_address=self.address,
                snapshot_address="loads",
            ),
            replay_wait_s=cluster.schedule.wait_s,
            clock=cluster.world.clock,
        )
        self._sockets = SimulatedSockets(self)
        self.client._sockets = self._sockets  # type: ignore[assignment]
        self.client._tell = self._deliver  # type: ignore[method-assign]
        self._open: set[str] = set()
        self._none_ready_at = 0.0
        self._is_draining = False

    def become_ready(self) -> None:
        super().become_ready()
        backlog, self.cluster.backlog = self.cluster.backlog, []
        for asked in backlog:
            self.ask(asked)

    def apply(self, update: FleetUpdate) -> None:
        """From the supervisor."""
        if self.is_alive:
            if not self.client.num_ready:
                self._none_ready_at = self.cluster.world.now
            self.client.apply(update)
            self._settle()

    def receive(self, message: EngineCoreOutputs) -> None:
        """From an engine core."""
        if self.is_alive:
            self._sockets.arrived.append(message)
            outputs = message.outputs
            for request_id in (*outputs.request_ids, *(output.request_id for output in outputs.others)):
                record = self.cluster.ledger.records[request_id]
                if record.incarnation != self.epoch and not record.is_late:
                    raise Violation(
                        f"{self.address} gets outputs of request {record.asked.number}, not its own"
                    )
            self._deliver(write_out(finish(self.client._receive())))
            self._settle()

    def take_snapshot(self, snapshot: LoadSnapshot) -> None:
        """From the coordinator."""
        if self.is_alive:
            self.client.take_snapshot(snapshot)

    def ask(self, asked: Happening) -> None:
        """A client asks."""
        record = self.cluster.ledger.ask(asked)
        record.incarnation = self.epoch
        record.sent_at = self.cluster.world.now
        if self._is_draining:
            record.end("refused")
            return
        request_id = f"r{asked.number}"
        request = EngineCoreRequest(
            request_id=request_id,
            client_index=CLIENT_INDEX,
            prompt_token_ids=[asked.content, asked.poison_at],
            sampling_params=params_of(asked.num_tokens),
            eos_token_ids=(),
            seed=asked.number,
            arrived_at=self.cluster.world.now,
        )
        try:
            finish(self.client.add_request(request))
        except PoisonousRequestError:
            self.cluster.ledger.refused_as_poison(record)
        except NoReplicaError:
            states = [(replica.state, replica.epoch) for replica in self.client.replicas.values()]
            num_useful = sum(
                state in (ReplicaState.READY, ReplicaState.LOST) or epoch > 0 for state, epoch in states
            )
            self.cluster.ledger.refused(record, num_useful=num_useful)
        else:
            self._open.add(request_id)
        self._settle()

    def leave(self, record: Record, request_id: str) -> None:
        """A client goes away."""
        if request_id in self._open:
            self._open.discard(request_id)
            self.cluster.ledger.leave(request_id)
            finish(self.client.abort_requests([request_id]))
            self.cluster.expect_forgotten(request_id, self)
            self._settle()

    def terminate(self) -> None:
        self._is_draining = True
        self._settle()

    def cut_links(self) -> None:
        self._sockets.cut_all()
        if self.client._expiry is not None:
            self.client._expiry.cancel()
        self.cluster.ledger.front_end_died(self.epoch)

    def check_nothing_left(self) -> None:
        if self._open or self.client._replay._entries or self.client._replay._parked:
            raise Violation(f"{self.address} still holds requests")

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        if not outputs:
            return
        world = self.cluster.world
        if not self.client.num_ready:
            self._none_ready_at = world.now
        for output in outputs:
            self.cluster.ledger.got(output, world.now, self._none_ready_at)
            if output.finish_reason is not None:
                self._open.discard(output.request_id)

    def _settle(self) -> None:
        """After each event: nobody is forgotten among those that wait."""
        replay = self.client._replay
        replay.check_invariants()
        if replay._parked:
            waited_s = self.cluster.world.now - min(entry.parked_at for entry in replay._parked.values())
            if waited_s > self.cluster.schedule.wait_s + 1e-6:
                raise Violation(f"a lost request waits since {waited_s:.3f} s")
            if self.client.num_ready and replay._suspects._trial is None:
                raise Violation("lost requests wait, with a replica ready and nobody on trial")
        if self._is_draining and not self._open and self.is_alive:
            self.die(0)


class SimulatedCoordinator(SimulatedProcess):
    """The coordinator: the real `LoadTable`."""

    def __init__(self, cluster: "SimulatedCluster", role: str, epoch: int) -> None:
        super().__init__(cluster, role, epoch)
        self._table = LoadTable()
        self._is_due = False
        self._newest: dict[int, tuple[int, int]] = {}
        self._snapshots = Link(cluster.world, f"loads.{epoch}", cluster.take_snapshot, drops=0.1)

    def report(self, stats: EngineStats) -> None:
        """From an engine core."""
        self._table.report(stats)
        if not self._is_due:
            self._is_due = True
            world = self.cluster.world
            world.at(max(world.now, self._table.due_at()), self._publish)

    def _publish(self) -> None:
        self._is_due = False
        if not self.is_alive:
            return
        snapshot = self._table.publish(self.cluster.world.now)
        if snapshot is None:
            return
        for stats in snapshot.stats:
            version = stats.epoch, stats.sequence
            if version < self._newest.get(stats.dp_rank, version):
                raise Violation(f"the load of replica {stats.dp_rank} goes back in time")
            self._newest[stats.dp_rank] = version
        self._snapshots.send(snapshot)

    def cut_links(self) -> None:
        self._snapshots.cut()
