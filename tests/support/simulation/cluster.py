"""One simulated cluster from its start until nothing happens any more, and the search for the smallest failure."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from phalanx.cluster.messages import FleetUpdate, LoadSnapshot, ReplicaInfo, ReplicaState
from phalanx.cluster.supervision import (
    ChildExited,
    ChildKind,
    ChildReady,
    ChildState,
    ClusterState,
    Event,
    Kill,
    PublishFleet,
    RestartPolicy,
    Start,
    StopRequested,
    Supervision,
    Terminate,
    Tick,
)
from phalanx.engine.messages import EngineStats

from .ledger import Ledger, Violation
from .processes import (
    SimulatedCoordinator,
    SimulatedEngineCore,
    SimulatedFrontEnd,
    SimulatedProcess,
)
from .schedule import Happening, Kind, Schedule, make_schedule
from .world import Link, World

MAX_EVENTS = 20_000
MAX_VICTIMS = 5
"""Replicas that a poisonous request may kill between two of its tokens, while nothing else goes wrong: two before it is
tried alone, and three when others keep coming to where it is."""
_DRAIN_S = 20.0
_STOP_S = 2.0
_STATES = {ChildState.STARTING: ReplicaState.STARTING, ChildState.READY: ReplicaState.READY}
_ROLES = {
    ChildKind.COORDINATOR: SimulatedCoordinator,
    ChildKind.ENGINE_CORE: SimulatedEngineCore,
    ChildKind.API_SERVER: SimulatedFrontEnd,
}


class SimulatedSupervisor:
    """The driver of the real `Supervision`: starts and ends simulated processes."""

    def __init__(self, cluster: "SimulatedCluster") -> None:
        schedule = cluster.schedule
        self._cluster = cluster
        self._num_replicas = schedule.num_replicas
        self._kinds = {
            "coordinator": ChildKind.COORDINATOR,
            **{f"dp{rank}": ChildKind.ENGINE_CORE for rank in range(schedule.num_replicas)},
            "api0": ChildKind.API_SERVER,
        }
        self.state = Supervision(
            self._kinds,
            started_at=0.0,
            start_timeout_s=4 * schedule.start_s,
            drain_timeout_s=_DRAIN_S,
            stop_timeout_s=_STOP_S,
            restart=RestartPolicy(
                max_restarts=schedule.max_restarts,
                window_s=600.0,
                backoff_s=0.1,
                max_backoff_s=1.0,
                start_timeout_s=4 * schedule.start_s,
            ),
        )
        self.children: dict[str, SimulatedProcess] = {}
        self._lifeline: Link | None = None
        self._next_tick_at = float("inf")

    def start(self) -> None:
        for role in self._kinds:
            self._start(role, 0)
        self._await_deadline()

    def handle(self, event: Event) -> None:
        for instruction in self.state.handle(event):
            match instruction:
                case PublishFleet():
                    self._publish_fleet()
                case Start():
                    self._start(instruction.role, instruction.epoch)
                case Terminate():
                    for role in instruction.roles:
                        self._later(f"{role} term", self.children[role].terminate)
                case Kill():
                    for role in instruction.roles:
                        self.children[role].die(-9)
        if self.state.state not in (ClusterState.STARTING, ClusterState.SERVING):
            self._cluster.ledger.is_stopping = True
        self._await_deadline()

    def stop(self) -> None:
        self.handle(StopRequested(at=self._cluster.world.now))

    def child_ended(self, child: SimulatedProcess, exitcode: int) -> None:
        """A process is gone; its end is noticed a little later."""
        world, schedule = self._cluster.world, self._cluster.schedule
        noticed_at = world.now + schedule.notice_s * world.chance(sum(child.role.encode()), -child.epoch)
        world.at(noticed_at, self._notice_end, child, exitcode)

    def _notice_end(self, child: SimulatedProcess, exitcode: int) -> None:
        self.handle(
            ChildExited(
                role=child.role,
                problem=f"{child.role} is gone",
                exitcode=exitcode,
                is_config_error=False,
                at=self._cluster.world.now,
            )
        )
        if isinstance(child, SimulatedFrontEnd):
            self._tell_gone(child)

    def _tell_gone(self, front_end: SimulatedFrontEnd) -> None:
        """Tell the engine cores that a front end has ended; they may hear of it when its successor serves already."""
        world, start_s = self._cluster.world, self._cluster.schedule.start_s
        for core in self.children.values():
            if isinstance(core, SimulatedEngineCore) and core.is_alive and core.is_ready:
                late_s = 2 * start_s * world.chance(sum(core.address.encode()), ~front_end.epoch) ** 2
                world.at(world.now + late_s, core.lose, front_end.epoch)

    def _start(self, role: str, epoch: int) -> None:
        child = self.children[role] = _ROLES[self._kinds[role]](self._cluster, role, epoch)
        if isinstance(child, SimulatedFrontEnd):
            self._lifeline = Link(self._cluster.world, f"lifeline {epoch}", child.apply, repeats=0.05)
            self._lifeline.send(self._fleet_update())
        world = self._cluster.world
        name = sum(role.encode())
        ready_at = world.now + self._cluster.schedule.start_s * (0.5 + world.chance(name, epoch))
        world.at(ready_at, self._become_ready, child)

    def _become_ready(self, child: SimulatedProcess) -> None:
        if child.is_alive:
            child.become_ready()
            self.handle(ChildReady(role=child.role))

    def _later(self, name: str, action: Callable[[], object]) -> None:
        world = self._cluster.world
        world.at(world.now + world.max_delay_s * world.chance(sum(name.encode()), 1), action)

    def _await_deadline(self) -> None:
        deadline = self.state.deadline
        if deadline is not None and deadline < self._next_tick_at:
            self._next_tick_at = deadline
            self._cluster.world.at(deadline, self._tick)

    def _tick(self) -> None:
        self._next_tick_at = float("inf")
        deadline = self.state.deadline
        if deadline is not None and deadline <= self._cluster.world.now:
            self.handle(Tick(at=self._cluster.world.now))
        self._await_deadline()

    def _publish_fleet(self) -> None:
        if self.state.child_state("api0") in _STATES and self._lifeline is not None:
            self._lifeline.send(self._fleet_update())

    def _fleet_update(self) -> FleetUpdate:
        replicas = []
        for rank in range(self._num_replicas):
            epoch = self.state.epoch(f"dp{rank}")
            state = _STATES.get(self.state.child_state(f"dp{rank}"), ReplicaState.LOST)
            replicas.append(
                ReplicaInfo(dp_rank=rank, epoch=epoch, state=state, input_address=f"dp{rank}.{epoch}")
            )
        return FleetUpdate(replicas=replicas, state=self.state.state)


class SimulatedCluster:
    """All processes, clients and links of one run."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.world = World(schedule.seed, schedule.max_delay_s)
        self.ledger = Ledger(
            wait_s=schedule.wait_s,
            has_one_culprit=schedule.has_one_culprit,
        )
        self.backlog: list[Happening] = []
        self.num_poisoned = 0
        self.supervisor = SimulatedSupervisor(self)

    def run(self) -> None:
        """Let the schedule happen. Raises Violation, or whatever a real part raises."""
        self.supervisor.start()
        for event in self.schedule.happenings:
            self.world.at(event.at, self._happen, event)
        self.world.run(MAX_EVENTS)
        self._check_end()

    def receiver_of(self, address: str) -> Callable[[object], None]:
        """Where messages to an address arrive: at the process that has it, as long as it lives."""
        role, _, epoch = address.partition(".")
        return partial(self._receive, role, int(epoch))

    def report_load(self, stats: EngineStats) -> None:
        coordinator = self.supervisor.children["coordinator"]
        if coordinator.is_alive and coordinator.is_ready:
            assert isinstance(coordinator, SimulatedCoordinator)
            coordinator.report(stats)

    def take_snapshot(self, snapshot: LoadSnapshot) -> None:
        self._front_end().take_snapshot(snapshot)

    def expect_forgotten(self, request_id: str, front_end: SimulatedFrontEnd) -> None:
        """A request was aborted: when the message has arrived, no replica computes it."""
        self.world.at(
            self.world.now + self.schedule.max_delay_s, self._check_forgotten, request_id, front_end
        )

    def _receive(self, role: str, epoch: int, message: object) -> None:
        child = self.supervisor.children.get(role)
        if child is not None and child.epoch == epoch and child.is_alive:
            child.receive(message)  # type: ignore[attr-defined]

    def _front_end(self) -> SimulatedFrontEnd:
        child = self.supervisor.children["api0"]
        assert isinstance(child, SimulatedFrontEnd)
        return child

    def _happen(self, event: Happening) -> None:
        match event.kind:
            case Kind.ASK:
                front_end = self._front_end()
                if front_end.is_alive and front_end.is_ready:
                    front_end.ask(event)
                else:  # the connection waits in the backlog of the listening socket
                    self.backlog.append(event)
            case Kind.LEAVE:
                name = f"r{event.number}"
                record = self.ledger.records.get(name)
                if record is not None and record.ended is None:
                    self._front_end().leave(record, name)
            case Kind.CRASH:
                self.supervisor.children[event.role].die(-9)
            case Kind.TERMINATE:
                child = self.supervisor.children[event.role]
                if child.is_ready and child.is_alive:
                    child.terminate()
                else:
                    child.die(-15)
            case Kind.HALT:
                child = self.supervisor.children[event.role]
                assert isinstance(child, SimulatedEngineCore)
                child.halt()
            case Kind.STOP:
                self.supervisor.stop()

    def _check_forgotten(self, request_id: str, front_end: SimulatedFrontEnd) -> None:
        if not front_end.is_alive:  # the message may have died with it; its next incarnation says hello
            return
        for child in self.supervisor.children.values():
            if isinstance(child, SimulatedEngineCore) and child.is_alive and not child.is_halted:
                if request_id in child.core.request_ids:
                    raise Violation(f"{child.role} still computes {request_id}, whose client has left")

    def _check_end(self) -> None:
        self.ledger.check_all_ended()
        state = self.supervisor.state
        is_serving = state.state is ClusterState.SERVING
        if not is_serving and state.state is not ClusterState.DONE:
            raise Violation(f"the cluster never came out of {state.state}")
        for role, child in self.supervisor.children.items():
            if is_serving and state.child_state(role) not in (ChildState.READY, ChildState.GIVEN_UP):
                raise Violation(f"{role} is for ever {state.child_state(role)}")
            if child.is_alive != (state.child_state(role) is ChildState.READY and is_serving):
                raise Violation(
                    f"{role} is {state.child_state(role)} when all is over, alive: {child.is_alive}"
                )
            if child.is_alive and isinstance(child, SimulatedFrontEnd):
                child.check_nothing_left()
            if child.is_alive and isinstance(child, SimulatedEngineCore) and child.core.request_ids:
                raise Violation(f"{role} still computes {child.core.request_ids}")
        if self.schedule.is_undisturbed and self.num_poisoned > MAX_VICTIMS * self.schedule.num_deadly_tokens:
            raise Violation(f"poison killed {self.num_poisoned} replicas")


@contextmanager
def simulation() -> Iterator[None]:
    """Quiet logs, while runs follow each other."""
    disabled_before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled_before)
        asyncio._set_running_loop(None)


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule that goes wrong, as small as it could be made."""

    schedule: Schedule
    error: str

    def __str__(self) -> str:
        lines = [f"{self.error}", f"seed {self.schedule.seed}: {replace(self.schedule, happenings=())}"]
        return "\n".join(lines + [f"  {event}" for event in self.schedule.happenings])


def run_schedule(schedule: Schedule) -> tuple[str | None, Counter[str]]:
    """Run one schedule: what went wrong, if anything, and how requests ended. Inside `simulation`."""
    cluster = SimulatedCluster(schedule)
    # `DpClient` asks for the running loop to set its timer; the world is one.
    asyncio._set_running_loop(cluster.world)  # type: ignore[arg-type]
    try:
        cluster.run()
    # Whatever a real part raises is a finding.
    except Exception as error:
        return f"{type(error).__name__}: {error}", Counter()
    return None, Counter(record.ended or "" for record in cluster.ledger.records.values())


def shrink(schedule: Schedule) -> Schedule:
    """Take out one event after the other, as long as it still goes wrong."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for index in range(len(schedule.happenings)):
            rest = schedule.happenings[:index] + schedule.happenings[index + 1 :]
            smaller = replace(schedule, happenings=rest)
            if run_schedule(smaller)[0] is not None:
                schedule, is_smaller = smaller, True
                break
    return schedule


def search(seeds: range) -> tuple[Failure | None, Counter[str]]:
    """Run the schedules of these seeds until one fails; shrink it. Also returns how requests ended."""
    endings: Counter[str] = Counter()
    with simulation():
        for seed in seeds:
            schedule = make_schedule(seed)
            error, ended = run_schedule(schedule)
            if error is not None:
                smallest = shrink(schedule)
                return Failure(smallest, run_schedule(smallest)[0] or error), endings
            endings += ended
    return None, endings
