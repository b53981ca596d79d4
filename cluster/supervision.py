"""What to do when a process of the cluster becomes ready, dies or is told to stop. Pure.

Called by: the supervisor, which feeds events and carries out instructions. Knows no process, socket or clock.

    STARTING --all ready--> SERVING --stop--> DRAINING --front ends gone, or budget spent--> STOPPING --all gone--> DONE
        |                      |                  |                                             ^
        +- a child ended, stop, deadline          +--- nobody left to serve, second stop -------+
                               +- nobody left to serve -----------------------------------------+

A child that dies while the cluster serves is started again, under a new epoch, after a pause that doubles with each
death; the rest serves on meanwhile. One that dies more often than its budget allows is given up. Without any
replica, or without a front end, the cluster ends with ExitCode.FAILED. A child that never became ready while the
cluster starts is not started again: what is wrong then is the configuration, the model or the machine.
An operator may have a replica started anew, drained, added or removed meanwhile; a process that leaves by such a wish
has not died. Whatever the cause, every end goes through STOPPING, and STOPPING has a deadline after which everything
is killed.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..shm.exit_codes import ExitCode
from .supervision_events import (
    AddReplica,
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
    Recycle,
    RemoveReplica,
    ReplicaMode,
    Report,
    RestartPolicy,
    SetMode,
    Start,
    StopRequested,
    Terminate,
    Tick,
)


@dataclass(slots=True)
class _Child:
    kind: ChildKind
    state: ChildState = ChildState.STARTING
    mode: ReplicaMode = ReplicaMode.ACTIVE
    comes_back: bool = True
    """LEAVING: whether it is started anew then."""
    epoch: int = 0
    num_failures: int = 0
    last_problem: str | None = None
    died_at: deque[float] = field(default_factory=deque)
    due_at: float = float("inf")
    """PAUSED: when to start it. STARTING again: until when it must be ready. LEAVING: until when it must be gone."""


class Supervision:
    """The state of one cluster.

    children:        kind of each child by role
    start_timeout_s: from `started_at` until all are ready
    drain_timeout_s: for running requests to finish after a stop
    stop_timeout_s:  for everything to leave, before it is killed. Larger than what any child gives its own
    """

    def __init__(
        self,
        children: Mapping[str, ChildKind],
        *,
        started_at: float,
        start_timeout_s: float,
        drain_timeout_s: float,
        stop_timeout_s: float,
        restart: RestartPolicy,
    ) -> None:
        self.state = ClusterState.STARTING
        self.exit_code = ExitCode.OK
        self._children = {role: _Child(kind) for role, kind in children.items()}
        # Epochs are never used twice, not even after a replica was removed and added again.
        self._last_epochs: dict[str, int] = {}
        self._state_due_at = started_at + start_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._restart = restart

    @property
    def deadline(self) -> float | None:
        """When to send a Tick at the latest; None while only an event can change anything."""
        due_at = self._state_due_at
        if self.state is ClusterState.SERVING:
            due_at = min(child.due_at for child in self._children.values())
        return due_at if due_at != float("inf") else None

    @property
    def roles(self) -> tuple[str, ...]:
        """All children that there are, or shall be."""
        return tuple(self._children)

    def child_state(self, role: str) -> ChildState:
        """Where a child is in its life."""
        return self._children[role].state

    def mode(self, role: str) -> ReplicaMode:
        """What a replica is for."""
        return self._children[role].mode

    def epoch(self, role: str) -> int:
        """How often a child has been started again."""
        return self._children[role].epoch

    def num_failures(self, role: str) -> int:
        """How often a child has died by itself since the cluster serves."""
        return self._children[role].num_failures

    def last_problem(self, role: str) -> str | None:
        """Why it died last; None: it never did."""
        return self._children[role].last_problem

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; return what to do, in order."""
        match event:
            case ChildReady():
                return self._on_ready(event.role)
            case ChildExited():
                return self._on_exit(event)
            case StopRequested():
                return self._on_stop(event.at)
            case Tick():
                return self._on_tick(event.at)
            case SetMode():
                self._children[event.role].mode = event.mode
                return [PublishFleet()]
            case Recycle():
                return self._on_recycle(event.role, event.at)
            case AddReplica():
                return self._on_add(event.role, event.at)
            case RemoveReplica():
                return self._on_remove(event.role, event.at)

    def _on_ready(self, role: str) -> list[Instruction]:
        child = self._children[role]
        if child.state is ChildState.LEAVING:
            return []
        child.state = ChildState.READY
        child.due_at = float("inf")
        match self.state:
            case ClusterState.STARTING:
                if any(other.state is ChildState.STARTING for other in self._children.values()):
                    return [PublishFleet()]
                self.state = ClusterState.SERVING
                self._state_due_at = float("inf")
                return [PublishFleet(), Announce()]
            case ClusterState.SERVING:
                return [PublishFleet(), Report(sentence=f"{role} is back (start {child.epoch + 1})")]
            case ClusterState.DRAINING:
                # Requests may be waiting for it.
                return [PublishFleet()]
            case _:
                return []

    def _on_exit(self, event: ChildExited) -> list[Instruction]:
        child = self._children[event.role]
        if child.state is ChildState.LEAVING and self.state is ClusterState.SERVING:
            return self._on_left(event, child)
        child.state = ChildState.GIVEN_UP
        child.due_at = float("inf")
        instructions: list[Instruction] = []
        match self.state:
            case ClusterState.STARTING:
                code = ExitCode.BAD_CONFIG if event.is_config_error else ExitCode.FAILED
                instructions = [Report(sentence=event.problem), *self._stop_all(event.at, code)]
            case ClusterState.SERVING:
                instructions = self._on_death(event, child)
            case ClusterState.DRAINING:
                instructions = self._on_exit_while_draining(event, child)
            case _:
                pass
        if not self._alive():
            self.state = ClusterState.DONE
            self._state_due_at = float("inf")
            return [instruction for instruction in instructions if isinstance(instruction, Report)]
        return instructions

    def _on_death(self, event: ChildExited, child: _Child) -> list[Instruction]:
        """A child died while the cluster serves: start it again later, or give it up."""
        child.num_failures += 1
        child.last_problem = event.problem
        child.died_at.append(event.at)
        while child.died_at[0] <= event.at - self._restart.window_s:
            child.died_at.popleft()
        num_deaths = len(child.died_at)
        if num_deaths <= self._restart.max_restarts:
            pause_s = self._restart.pause_s(num_deaths)
            child.state = ChildState.PAUSED
            child.due_at = event.at + pause_s
            when = f"in {pause_s:g} s" if pause_s else "at once"
            return [Report(sentence=f"{event.problem}; starting it again {when}"), PublishFleet()]
        sentence = f"{event.problem}; given up after {num_deaths} deaths in {self._restart.window_s:g} s"
        instructions: list[Instruction] = [Report(sentence=sentence), PublishFleet()]
        if child.kind is not ChildKind.COORDINATOR and not self._is_coming(child.kind):
            instructions += self._stop_all(event.at, ExitCode.FAILED)
        return instructions

    def _on_left(self, event: ChildExited, child: _Child) -> list[Instruction]:
        """A child has left by an operator's wish."""
        if child.comes_back:
            return [*self._start(event.role, child, event.at), PublishFleet()]
        self._last_epochs[event.role] = child.epoch
        del self._children[event.role]
        return [PublishFleet()]

    def _start(self, role: str, child: _Child, at: float) -> list[Instruction]:
        child.state = ChildState.STARTING
        child.epoch += 1
        child.due_at = at + self._restart.start_timeout_s
        return [Start(role=role, epoch=child.epoch)]

    def _on_recycle(self, role: str, at: float) -> list[Instruction]:
        if self.state is not ClusterState.SERVING:
            return []
        child = self._children[role]
        child.died_at.clear()
        child.comes_back = True
        if child.state in (ChildState.PAUSED, ChildState.GIVEN_UP):
            return [*self._start(role, child, at), PublishFleet()]
        return self._leave(role, child, at)

    def _on_add(self, role: str, at: float) -> list[Instruction]:
        if self.state is not ClusterState.SERVING or role in self._children:
            return []
        child = _Child(ChildKind.ENGINE_CORE, epoch=self._last_epochs.get(role, -1))
        self._children[role] = child
        return [*self._start(role, child, at), PublishFleet()]

    def _on_remove(self, role: str, at: float) -> list[Instruction]:
        if self.state is not ClusterState.SERVING or role not in self._children:
            return []
        child = self._children[role]
        child.comes_back = False
        if child.state in (ChildState.PAUSED, ChildState.GIVEN_UP):
            self._last_epochs[role] = child.epoch
            del self._children[role]
            return [PublishFleet()]
        return self._leave(role, child, at)

    def _leave(self, role: str, child: _Child, at: float) -> list[Instruction]:
        child.state = ChildState.LEAVING
        child.due_at = at + self._stop_timeout_s
        # The front ends hear of it first, and move what it has.
        return [PublishFleet(), Terminate(roles=(role,))]

    def _on_exit_while_draining(self, event: ChildExited, child: _Child) -> list[Instruction]:
        """Nobody is started again now: the rest finishes what runs, as long as there is a rest."""
        if child.kind is ChildKind.API_SERVER and event.exitcode == ExitCode.OK:
            return [] if self._is_coming(child.kind) else self._stop_all(event.at, ExitCode.OK)
        instructions: list[Instruction] = [Report(sentence=event.problem), PublishFleet()]
        if child.kind is not ChildKind.COORDINATOR and not self._is_coming(child.kind):
            instructions += self._stop_all(event.at, ExitCode.FAILED)
        return instructions

    def _on_stop(self, at: float) -> list[Instruction]:
        match self.state:
            case ClusterState.STARTING:
                return self._stop_all(at, ExitCode.INTERRUPTED)
            case ClusterState.SERVING:
                self.state = ClusterState.DRAINING
                self._state_due_at = at + self._drain_timeout_s + self._stop_timeout_s
                for child in self._children.values():
                    if child.state is ChildState.PAUSED:
                        child.state = ChildState.GIVEN_UP
                if not self._is_coming(ChildKind.ENGINE_CORE):
                    return self._stop_all(at, ExitCode.OK)
                return [PublishFleet(), Terminate(roles=self._alive(ChildKind.API_SERVER))]
            case ClusterState.DRAINING:
                return self._stop_all(at, ExitCode.INTERRUPTED)
            case ClusterState.STOPPING:
                return [Kill(roles=self._alive())]
            case ClusterState.DONE:
                return []

    def _on_tick(self, at: float) -> list[Instruction]:
        match self.state:
            case ClusterState.SERVING:
                return self._on_due_children(at)
            case ClusterState.DONE:
                return []
        if at < self._state_due_at:
            return []
        match self.state:
            case ClusterState.STARTING:
                missing = [
                    role for role, child in self._children.items() if child.state is ChildState.STARTING
                ]
                sentence = f"not ready before the deadline: {', '.join(sorted(missing))}"
                return [Report(sentence=sentence), *self._stop_all(at, ExitCode.FAILED)]
            case ClusterState.DRAINING:
                return [Report(sentence="the drain budget is spent"), *self._stop_all(at, self.exit_code)]
            case _:
                self._state_due_at = float("inf")
                return [Kill(roles=self._alive())]

    def _on_due_children(self, at: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for role, child in self._children.items():
            if at < child.due_at:
                continue
            if child.state is ChildState.PAUSED:
                instructions += self._start(role, child, at)
                continue
            child.due_at = float("inf")
            # Its exit will be handled like any other.
            if child.state is ChildState.STARTING:
                instructions.append(Report(sentence=f"{role} did not become ready again"))
            instructions.append(Kill(roles=(role,)))
        return instructions

    def _stop_all(self, at: float, code: ExitCode) -> list[Instruction]:
        self.state = ClusterState.STOPPING
        self.exit_code = code
        self._state_due_at = at + self._stop_timeout_s
        for child in self._children.values():
            if child.state is ChildState.PAUSED:
                child.state = ChildState.GIVEN_UP
        # The front ends hear of it first, so that lost requests end with an error instead of silence.
        return [PublishFleet(), Terminate(roles=self._alive())]

    def _alive(self, kind: ChildKind | None = None) -> tuple[str, ...]:
        """Children that have a process."""
        return tuple(
            role
            for role, child in self._children.items()
            if child.state in (ChildState.STARTING, ChildState.READY, ChildState.LEAVING)
            and kind in (None, child.kind)
        )

    def _is_coming(self, kind: ChildKind) -> bool:
        """True when a child of this kind is alive or will be started again."""
        return any(
            child.kind is kind
            and child.state is not ChildState.GIVEN_UP
            and (child.state is not ChildState.LEAVING or child.comes_back)
            for child in self._children.values()
        )
