"""The supervisor: starts the cluster's processes, watches them, and carries out what Supervision decides.

Runs in the main thread of `cluster-launch`. It waits in one place, for any of: a signal, a message of a child,
the end of a child, a deadline. It imports neither torch nor the HTTP server. When it dies, by whatever signal,
every child leaves by itself (see shm/child.py), and the folder of sockets goes (see shm/runtime_dir.py).
"""

import contextlib
import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from ..engine.config import EngineConfig
from ..engine.core_args import EngineCoreArgs, EngineCoreReady
from ..shm.errors import ProcessDiedError, QueueClosedError, StartupError
from ..shm.exit_codes import ExitCode
from ..shm.process import ChildProcess, ChildSpec, Note, Progress, Ready, Spawner
from ..shm.runtime_dir import RuntimeDir
from ..shm.status_board import StatusBoard
from ..workers.messages import ExecutorReport
from .config import ClusterConfig
from .coordinator import CoordinatorArgs
from .messages import FleetUpdate, FrontEndConnection, ReplicaInfo, ReplicaState
from .placement import Plan
from .supervision import (
    Announce,
    ChildExited,
    ChildKind,
    ChildReady,
    ChildState,
    ClusterState,
    Event,
    Instruction,
    Kill,
    PublishFleet,
    Report,
    RestartPolicy,
    Start,
    StopRequested,
    Supervision,
    Terminate,
    Tick,
)

log = logging.getLogger(__name__)

COORDINATOR = "coordinator"
API_SERVER = "api0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """One process that serves: its role, pid and seconds from its spawn until it was ready."""

    role: str
    pid: int
    ready_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """What the supervisor knows when everything serves. replicas: by dp_rank."""

    start_s: float
    processes: tuple[ProcessReport, ...]
    replicas: Mapping[int, ExecutorReport]


class ClusterObserver(Protocol):
    """Where the supervisor tells its story; the command line prints it. Called from the supervisor's thread."""

    def progress(self, role: str, phase: str) -> None:
        """A process, or a worker of one, begins a phase of its start."""

    def serving(self, report: ClusterReport) -> None:
        """Everything is ready."""

    def problem(self, sentence: str) -> None:
        """Something went wrong; what follows from it comes by itself."""

    def stopping(self, state: ClusterState) -> None:
        """The cluster drains or stops."""


class Supervisor:
    """One cluster, from its start to its end. `run` does it all.

    make_api_server: gives the spec of a front end's process; the cluster does not know what it serves
    """

    def __init__(
        self,
        *,
        plan: Plan,
        engine: EngineConfig,
        cluster: ClusterConfig,
        make_api_server: Callable[[FrontEndConnection], ChildSpec],
        observer: ClusterObserver,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._cluster = cluster
        self._make_api_server = make_api_server
        self._observer = observer
        self._children: dict[str, ChildProcess] = {}
        self._spawned_at: dict[str, float] = {}
        self._ready_after_s: dict[str, float] = {}
        self._reports: dict[int, ExecutorReport] = {}
        self._selector = selectors.DefaultSelector()
        self._spawner = Spawner("supervisor")
        self._kinds = {
            COORDINATOR: ChildKind.COORDINATOR,
            **{f"dp{dp_rank}": ChildKind.ENGINE_CORE for dp_rank in range(plan.data_parallel_size)},
            API_SERVER: ChildKind.API_SERVER,
        }
        self._started_at = 0.0

    def run(self) -> ExitCode:
        """Start everything, serve until a stop or a death, leave nothing behind. Main thread only.

        Returns OK after a stop that was carried out in order, INTERRUPTED after a second signal, FAILED when a
        process died or never became ready, BAD_CONFIG when one refused its configuration.
        """
        self._started_at = time.monotonic()
        self._board = StatusBoard.create(len(self._plan.ranks))
        self._runtime_dir = RuntimeDir.create()
        self._spawner.start()
        signal_in, signal_out = socket.socketpair()
        signal_in.setblocking(False)
        signal_out.setblocking(False)
        self._selector.register(signal_in, selectors.EVENT_READ)
        previous_handlers = {
            number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)
        }
        previous_fd = signal.set_wakeup_fd(signal_out.fileno(), warn_on_full_buffer=False)
        try:
            for role in self._kinds:
                self._spawn(role, epoch=0)
            return self._watch(signal_in)
        finally:
            for child in self._children.values():
                child.kill()
            for child in self._children.values():
                child.stop(reason="supervisor leaves", timeout_s=0)
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            signal_in.close()
            signal_out.close()
            self._selector.close()
            self._spawner.close()
            self._runtime_dir.close()
            self._board.close()

    def _spawn(self, role: str, epoch: int) -> None:
        """Start the process of a role: the first time, or again."""
        previous = self._children.get(role)
        if previous is not None:
            previous.close()
        child = self._spawner.spawn(self._spec(role, epoch))
        self._children[role] = child
        self._spawned_at[role] = time.monotonic()
        self._selector.register(child.lifeline_fd, selectors.EVENT_READ, child)

    def _spec(self, role: str, epoch: int) -> ChildSpec:
        match self._kinds[role]:
            case ChildKind.COORDINATOR:
                args = CoordinatorArgs(
                    stats_address=self._address("stats"), snapshot_address=self._address("loads")
                )
                return ChildSpec(
                    role=role, target="phalanx.cluster.coordinator:main", args=msgspec.msgpack.encode(args)
                )
            case ChildKind.ENGINE_CORE:
                return self._engine_core_spec(role, int(role.removeprefix("dp")), epoch)
            case ChildKind.API_SERVER:
                connection = FrontEndConnection(
                    client_index=0,
                    incarnation=epoch,
                    output_address=self._address(f"{role}.{epoch}"),
                    snapshot_address=self._address("loads"),
                )
                return self._make_api_server(connection)

    def _engine_core_spec(self, role: str, dp_rank: int, epoch: int) -> ChildSpec:
        ranks = self._plan.replica(dp_rank)
        parallel = replace(self._engine.parallel, num_threads=ranks[0].num_threads)
        args = EngineCoreArgs(
            config=replace(self._engine, parallel=parallel),
            dp_rank=dp_rank,
            epoch=epoch,
            input_address=self._address(f"{role}.{epoch}"),
            stats_address=self._address("stats"),
            device_indices=[rank.device_index for rank in ranks],
            board_fd=self._board.fd,
            num_board_slots=len(self._plan.ranks),
            first_board_slot=self._plan.ranks.index(ranks[0]),
        )
        return ChildSpec(
            role=role,
            target="phalanx.engine.core_proc:main",
            args=msgspec.msgpack.encode(args),
            rank=dp_rank,
            pass_fds=(self._board.fd,),
        )

    def _address(self, name: str) -> str:
        return self._runtime_dir.address(name)

    def _watch(self, signals: socket.socket) -> ExitCode:
        """The loop: wait, turn what happened into events, carry out the answers."""
        self._supervision = Supervision(
            self._kinds,
            started_at=self._started_at,
            start_timeout_s=self._cluster.start_timeout_s,
            drain_timeout_s=self._cluster.drain_timeout_s,
            # An engine core gives its workers executor.stop_timeout_s; its parent must wait longer than that.
            stop_timeout_s=self._cluster.stop_timeout_s + self._engine.executor.stop_timeout_s,
            restart=RestartPolicy(
                max_restarts=self._cluster.max_restarts,
                window_s=self._cluster.restart_window_s,
                backoff_s=self._cluster.restart_backoff_s,
                max_backoff_s=self._cluster.max_restart_backoff_s,
                start_timeout_s=self._cluster.start_timeout_s,
            ),
        )
        while self._supervision.state is not ClusterState.DONE:
            deadline = self._supervision.deadline
            timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            events: list[Event] = []
            for key, _ in self._selector.select(timeout_s):
                if key.data is None:
                    events += [StopRequested(at=time.monotonic()) for _ in signals.recv(64)]
                else:
                    events += self._receive(key.data)
            if deadline is not None and time.monotonic() >= deadline:
                events.append(Tick(at=time.monotonic()))
            for event in events:
                self._handle(event)
        return self._supervision.exit_code

    def _handle(self, event: Event) -> None:
        before = self._supervision.state
        instructions = self._supervision.handle(event)
        if self._supervision.state is not before and self._supervision.state in (
            ClusterState.DRAINING,
            ClusterState.STOPPING,
        ):
            self._observer.stopping(self._supervision.state)
        for instruction in instructions:
            self._carry_out(instruction)

    def _receive(self, child: ChildProcess) -> list[Event]:
        """Read what a child says; the end of its lifeline is the end of the child."""
        messages = child.receive()
        if not messages:
            self._selector.unregister(child.lifeline_fd)
            return [self._exited(child)]
        events: list[Event] = []
        for message in messages:
            match message:
                case Progress():
                    self._observer.progress(child.role, message.phase)
                case Note():
                    self._observer.progress(child.role, message.payload.decode())
                case Ready():
                    self._ready_after_s[child.role] = time.monotonic() - self._spawned_at[child.role]
                    if self._kinds[child.role] is ChildKind.ENGINE_CORE:
                        ready = msgspec.msgpack.decode(message.payload, type=EngineCoreReady)
                        assert child.rank is not None
                        self._reports[child.rank] = ready.report
                    events.append(ChildReady(role=child.role))
        return events

    def _exited(self, child: ChildProcess) -> ChildExited:
        # The lifeline ends when the process does; a process that closed it and lives on is no use to anyone.
        if child.wait(1.0) is None:
            child.kill()
            child.wait(self._cluster.stop_timeout_s)
        error_type = StartupError if child.ready is None else ProcessDiedError
        if child.failure is not None and child.failure.traceback:
            log.error("%s failed:\n%s", child.role, child.failure.traceback)
        config_field = child.failure.config_field if child.failure else None
        return ChildExited(
            role=child.role,
            problem=child.failure.error if child.failure and config_field else str(child.death(error_type)),
            exitcode=child.exitcode or 0,
            is_config_error=config_field is not None,
            at=time.monotonic(),
        )

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case PublishFleet():
                self._publish_fleet()
            case Announce():
                self._observer.serving(self._cluster_report())
            case Start():
                self._spawn(instruction.role, instruction.epoch)
            case Terminate():
                for role in instruction.roles:
                    self._children[role].terminate()
            case Kill():
                for role in instruction.roles:
                    self._children[role].kill()
            case Report():
                self._observer.problem(instruction.sentence)

    def _publish_fleet(self) -> None:
        replicas = []
        for dp_rank in range(self._plan.data_parallel_size):
            role = f"dp{dp_rank}"
            epoch = self._supervision.epoch(role)
            report = self._reports.get(dp_rank)
            replicas.append(
                ReplicaInfo(
                    dp_rank=dp_rank,
                    epoch=epoch,
                    state=_REPLICA_STATES[self._supervision.child_state(role)],
                    input_address=self._address(f"{role}.{epoch}"),
                    max_model_len=report.max_model_len if report is not None else None,
                    block_size=report.block_size if report is not None else None,
                )
            )
        payload = msgspec.msgpack.encode(FleetUpdate(replicas=replicas))
        if self._supervision.child_state(API_SERVER) in (ChildState.STARTING, ChildState.READY):
            # One that has just died is told apart by its exit, which is on its way.
            with contextlib.suppress(QueueClosedError):
                self._children[API_SERVER].send(payload)

    def _cluster_report(self) -> ClusterReport:
        return ClusterReport(
            start_s=time.monotonic() - self._started_at,
            processes=tuple(
                ProcessReport(role=role, pid=child.pid, ready_after_s=self._ready_after_s[role])
                for role, child in self._children.items()
            ),
            replicas=dict(self._reports),
        )


_REPLICA_STATES = {
    ChildState.STARTING: ReplicaState.STARTING,
    ChildState.READY: ReplicaState.READY,
    ChildState.PAUSED: ReplicaState.LOST,
    ChildState.GIVEN_UP: ReplicaState.LOST,
}


def _ignore(signum: int, frame: object) -> None:
    """Do nothing here: the signal's number arrives on the wake-up descriptor, where the loop reads it."""
