"""The supervisor: starts the cluster's processes, watches them, and carries out what Supervision decides.

Runs in the main thread of `cluster-launch`. It waits in one place, for any of: a signal, a message of a child,
the end of a child, a deadline, the next look at the status board. It imports neither torch nor the HTTP server. When
it dies, by whatever signal, every child leaves by itself (see shm/child.py), and the folder of sockets goes (see
shm/runtime_dir.py).

A replica that hangs, its engine core or one of its workers (health.py), is killed as a whole; then it has died like any
other; so are an API server and the coordinator. What operators wish comes in from a front end (front_ends.py), and goes
to the conductor (conductor.py).
"""

import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping

import msgspec

from ..engine.config import EngineConfig
from ..engine.core_control import CoreControl, CoreControlDone
from ..shm.errors import QueueClosedError, StartupError
from ..shm.exit_codes import ExitCode
from ..shm.number_table import NumberTable
from ..shm.process import ChildProcess, ChildSpec, Note, Progress, Ready
from ..shm.runtime_dir import RuntimeDir
from ..shm.status_board import StatusBoard
from .admin import ReplicaView
from .children import Children
from .conductor import Conductor
from .config import ClusterConfig
from .fleet import COORDINATOR, Fleet, api_server_role, core_role, kind_of, num_board_slots, rank_of
from .fleet_view import FleetView
from .front_end_board import NUM_COLUMNS
from .front_ends import FrontEnds
from .hang_watch import HangWatch
from .health import HangPolicy
from .messages import (
    AdminCommand,
    AdminResult,
    BlamedRequests,
    FleetApplied,
    FleetUpdate,
    FromFrontEnd,
    FrontEndConnection,
)
from .observer import ClusterObserver, ClusterReport
from .operations import Weights
from .placement import Plan
from .supervision import Supervision
from .supervision_events import (
    Announce,
    ChildExited,
    ChildKind,
    ChildReady,
    ClusterState,
    Event,
    Instruction,
    Kill,
    PublishFleet,
    Report,
    RestartPolicy,
    Start,
    StopRequested,
    Terminate,
    Tick,
)

log = logging.getLogger(__name__)


class Supervisor:
    """One cluster, from its start to its end. `run` does it all; main thread only.

    make_api_server: gives the spec of a front end's process; the cluster does not know what it serves
    make_plan:       plans for another number of replicas. Raises ConfigError when they do not fit
    check_weights:   raises ConfigError when replicas could not serve the weights at a path
    """

    def __init__(
        self,
        *,
        plan: Plan,
        engine: EngineConfig,
        cluster: ClusterConfig,
        make_api_server: Callable[[FrontEndConnection], ChildSpec],
        make_plan: Callable[[int], Plan],
        check_weights: Callable[[str], None],
        weights: Weights,
        observer: ClusterObserver,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._cluster = cluster
        self._make_api_server = make_api_server
        self._make_plan = make_plan
        self._check_weights = check_weights
        self._first_weights = weights
        self._observer = observer
        self._selector = selectors.DefaultSelector()
        self._children = Children(self._selector, kill_wait_s=cluster.stop_timeout_s)
        self._failed_starts: list[ChildExited] = []
        self._watch_board = HangWatch(
            HangPolicy(hang_timeout_s=cluster.hang_timeout_s, step_timeout_s=engine.executor.step_timeout_s)
        )
        self._num_published = 0
        self._started_at = 0.0

    def run(self) -> ExitCode:
        """Start everything, serve until a stop or a death, leave nothing behind. Main thread only.

        Returns OK after a stop that was carried out in order, INTERRUPTED after a second signal, FAILED when a
        process died or never became ready, BAD_CONFIG when one refused its configuration.
        """
        self._started_at = time.monotonic()
        num_slots = num_board_slots(self._plan.tensor_parallel_size, self._cluster.num_api_servers)
        self._board = StatusBoard.create(num_slots)
        self._table = NumberTable.create("front-ends", self._cluster.num_api_servers, NUM_COLUMNS)
        self._runtime_dir = RuntimeDir.create()
        self._fleet = Fleet(
            plan=self._plan,
            engine=self._engine,
            make_api_server=self._make_api_server,
            weights=self._first_weights,
            board=self._board,
            front_ends=self._table,
            runtime_dir=self._runtime_dir,
        )
        self._conductor = Conductor(
            self, default_timeout_s=self._cluster.admin_timeout_s, clock=time.monotonic
        )
        self._children.start()
        signal_in, signal_out = socket.socketpair()
        signal_in.setblocking(False)
        signal_out.setblocking(False)
        self._selector.register(signal_in, selectors.EVENT_READ)
        previous_handlers = {
            number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)
        }
        previous_fd = signal.set_wakeup_fd(signal_out.fileno(), warn_on_full_buffer=False)
        try:
            roles = [
                COORDINATOR,
                *map(core_role, range(self._plan.data_parallel_size)),
                *map(api_server_role, range(self._cluster.num_api_servers)),
            ]
            self._supervision = self._make_supervision(roles)
            self._front_ends = FrontEnds(self._supervision, self._children, self._table)
            self._view = FleetView(self._fleet, self._supervision, self._children, self._watch_board)
            for role in roles:
                self._spawn(role, epoch=0)
            return self._watch(signal_in)
        finally:
            self._children.end_all()
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            signal_in.close()
            signal_out.close()
            self._selector.close()
            self._runtime_dir.close()
            self._board.close()
            self._table.close()

    def _spawn(self, role: str, epoch: int) -> None:
        """Start the process of a role: the first time, or again. One that cannot be started has died at once."""
        try:
            self._children.spawn(role, self._fleet.spec(role, epoch, is_paused=self._conductor.is_paused))
        except StartupError as error:
            self._failed_starts.append(
                ChildExited(
                    role=role,
                    problem=str(error),
                    exitcode=ExitCode.BOOT_FAILED,
                    is_config_error=False,
                    at=time.monotonic(),
                )
            )
            return
        if kind_of(role) is ChildKind.API_SERVER:
            self._front_ends.started(role, self._update())

    def _make_supervision(self, roles: list[str]) -> Supervision:
        return Supervision(
            {role: kind_of(role) for role in roles},
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

    def _watch(self, signals: socket.socket) -> ExitCode:
        """The loop: wait, turn what happened into events, carry out the answers."""
        while True:
            while self._failed_starts:
                # Only now: whoever started it is done with what else there was to do.
                self._on_end(self._failed_starts.pop(0))
            if self._supervision.state is ClusterState.DONE:
                return self._supervision.exit_code
            deadlines = (self._supervision.deadline, self._conductor.deadline, self._watch_board.next_look_at)
            wake_at = min(deadline for deadline in deadlines if deadline is not None)
            for key, _ in self._selector.select(max(0.0, wake_at - time.monotonic())):
                if key.data is None:
                    for _ in signals.recv(64):
                        self.handle(StopRequested(at=time.monotonic()))
                else:
                    self._receive(key.data)
            now = time.monotonic()
            if self._supervision.deadline is not None and now >= self._supervision.deadline:
                self.handle(Tick(at=now))
            if self._conductor.deadline is not None and now >= self._conductor.deadline:
                self._conductor.tick()
            if now >= self._watch_board.next_look_at:
                self._look(now)

    def handle(self, event: Event) -> None:
        """Have Supervision decide, and carry it out."""
        before = self._supervision.state
        instructions = self._supervision.handle(event)
        if self._supervision.state is not before and self._supervision.state in (
            ClusterState.DRAINING,
            ClusterState.STOPPING,
        ):
            self._observer.stopping(self._supervision.state)
        for instruction in instructions:
            self._carry_out(instruction)

    def _receive(self, child: ChildProcess) -> None:
        """Read what a child says; the end of its lifeline is the end of the child."""
        for message in child.receive():
            match message:
                case Progress():
                    self._observer.progress(child.role, message.phase)
                case Note():
                    self._take_note(child, message.payload)
                case Ready():
                    self._on_ready(child, message.payload)
        if child.has_hung_up:
            self._children.unwatch(child)
            self._on_end(self._children.exited(child, self._watch_board.take_problem(child.role)))

    def _on_ready(self, child: ChildProcess, payload: bytes) -> None:
        self._children.is_ready(child.role)
        dp_rank = rank_of(child.role)
        if dp_rank is not None:
            self._fleet.is_ready(dp_rank, payload)
        self.handle(ChildReady(role=child.role))
        if dp_rank is not None:
            self._conductor.ready(dp_rank)

    def _on_end(self, event: ChildExited) -> None:
        epoch = self._supervision.epoch(event.role)
        dp_rank = rank_of(event.role)
        self.handle(event)
        if dp_rank is None:
            if kind_of(event.role) is ChildKind.API_SERVER:
                self._front_ends.gone(event.role, epoch)
                self._conductor.applied(self._front_ends.applied_by_all)
            return
        if event.role not in self._supervision.roles:
            self._children.drop(event.role)
            self._fleet.forget(dp_rank)
        self._conductor.exited(dp_rank, epoch, event.problem)

    def _take_note(self, child: ChildProcess, payload: bytes) -> None:
        if child.rank is not None and kind_of(child.role) is ChildKind.ENGINE_CORE:
            self._conductor.answered(child.rank, msgspec.msgpack.decode(payload, type=CoreControlDone))
            return
        match msgspec.msgpack.decode(payload, type=FromFrontEnd):
            case FleetApplied() as applied:
                self._front_ends.applied(child.role, applied.sequence)
                self._conductor.applied(self._front_ends.applied_by_all)
            case AdminCommand() as command:
                self._conductor.take(self._front_ends.take(child.role, command))
            case BlamedRequests() as blamed:
                self._front_ends.blame(child.role, blamed.fingerprints)

    def _look(self, now: float) -> None:
        """Look at the status board, and end the processes that hang."""
        hung, has_changed = self._watch_board.look(now, self._fleet, self._supervision, self._children)
        # An engine core's workers are killed with it, by the kernel; one that is stopped as well.
        self._children.kill(hung)
        if has_changed:
            self.publish()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case PublishFleet():
                self.publish()
            case Announce():
                self._observer.serving(self._cluster_report())
            case Start():
                self._spawn(instruction.role, instruction.epoch)
            case Terminate():
                self._children.terminate(instruction.roles)
            case Kill():
                self._children.kill(instruction.roles)
            case Report():
                self._observer.problem(instruction.sentence)

    def publish(self) -> None:
        """Tell the front ends how things stand."""
        self._num_published += 1
        self._front_ends.tell_all(self._update())

    def _update(self) -> FleetUpdate:
        return self._view.update(
            self._num_published,
            is_paused=self._conductor.is_paused,
            operation=self._conductor.operation,
        )

    # What follows are the conductor's hands; see conductor.Hands.

    @property
    def num_published(self) -> int:
        """Number of the last update to the front ends."""
        return self._num_published

    @property
    def has_front_end(self) -> bool:
        """True when somebody will answer an update."""
        return self._front_ends.has_any

    def replicas(self) -> Mapping[int, ReplicaView]:
        """All replicas, by dp_rank."""
        return self._view.replicas()

    def epoch(self, dp_rank: int) -> int:
        """Of the newest process of a replica."""
        return self._supervision.epoch(core_role(dp_rank))

    def set_weights(self, dp_rank: int, weights: Weights) -> None:
        """From the next start on."""
        self._fleet.set_weights(dp_rank, weights)

    def check_weights(self, path: str) -> None:
        """Raise ConfigError when replicas could not serve them."""
        self._check_weights(path)

    def call(self, dp_rank: int, control: CoreControl) -> bool:
        """Ask an engine core. False: it is gone."""
        try:
            self._children[core_role(dp_rank)].send(msgspec.msgpack.encode(control))
        except QueueClosedError:
            return False
        return True

    def resize(self, num_replicas: int) -> None:
        """Plan for so many replicas. Raises ConfigError when there are no devices or no memory for them."""
        self._fleet.plan = self._make_plan(num_replicas)

    def answer(self, result: AdminResult) -> None:
        """Tell the front end that brought a command how it has ended."""
        self._front_ends.answer(result)

    def _cluster_report(self) -> ClusterReport:
        return ClusterReport(
            start_s=time.monotonic() - self._started_at,
            processes=self._children.reports(),
            replicas=dict(self._fleet.reports),
        )


def _ignore(signum: int, frame: object) -> None:
    """Do nothing here: the signal's number arrives on the wake-up descriptor, where the loop reads it."""
