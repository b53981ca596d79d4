"""What to do when a process of the cluster becomes ready, dies or is told to stop. Pure.

Called by: the supervisor, which feeds events and carries out instructions. Knows no process, socket or clock.

    STARTING --all ready--> SERVING --stop--> DRAINING --front ends gone, or budget spent--> STOPPING --all gone--> DONE
        |                      |                  |                                             ^
        +--- a child ended, stop or deadline -----+--- a child ended, second stop --------------+

Whatever the cause, every way ends in STOPPING, and STOPPING has a deadline after which everything is killed.
A death while serving ends the cluster with ExitCode.FAILED: the rest cannot take over its requests yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ..shm.exit_codes import ExitCode


class ChildKind(StrEnum):
    """What a child of the supervisor is."""

    API_SERVER = "api server"
    COORDINATOR = "coordinator"
    ENGINE_CORE = "engine core"


class ClusterState(StrEnum):
    """Where the cluster is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildReady:
    """A child serves."""

    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExited:
    """A child is gone. problem: one sentence; is_config_error: it refused its configuration."""

    role: str
    problem: str
    exitcode: int
    is_config_error: bool
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """SIGINT or SIGTERM."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """`Supervision.deadline` has passed."""

    at: float


Event = ChildReady | ChildExited | StopRequested | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFleet:
    """Tell the front ends which replicas serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Everything is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Ask these children to leave."""

    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Kill these children."""

    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tell the operator."""

    sentence: str


Instruction = PublishFleet | Announce | Terminate | Kill | Report


class Supervision:
    """The state of one cluster.

    children:        kind of each child by role
    start_timeout_s: from `started_at` until all are ready
    drain_timeout_s: for running requests to finish after a stop; None of it is spent when there are none
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
    ) -> None:
        self.state = ClusterState.STARTING
        self.exit_code = ExitCode.OK
        self.deadline: float | None = started_at + start_timeout_s
        self._alive = dict(children)
        self._not_ready = set(children)
        self._drain_timeout_s = drain_timeout_s
        self._stop_timeout_s = stop_timeout_s

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
                return self._on_deadline(event.at)

    def is_alive(self, role: str) -> bool:
        """True until the child's exit was handled."""
        return role in self._alive

    def _on_ready(self, role: str) -> list[Instruction]:
        self._not_ready.discard(role)
        if self.state is not ClusterState.STARTING:
            return []
        if self._not_ready:
            return [PublishFleet()]
        self.state = ClusterState.SERVING
        self.deadline = None
        return [PublishFleet(), Announce()]

    def _on_exit(self, event: ChildExited) -> list[Instruction]:
        kind = self._alive.pop(event.role)
        self._not_ready.discard(event.role)
        instructions: list[Instruction] = []
        if self.state in (ClusterState.STARTING, ClusterState.SERVING):
            is_config_error = event.is_config_error and self.state is ClusterState.STARTING
            code = ExitCode.BAD_CONFIG if is_config_error else ExitCode.FAILED
            # The front ends hear of it first, so that the lost requests end with an error instead of silence.
            instructions = [Report(sentence=event.problem), PublishFleet(), *self._stop_all(event.at, code)]
        elif self.state is ClusterState.DRAINING:
            if kind is not ChildKind.API_SERVER or event.exitcode != ExitCode.OK:
                instructions = [
                    Report(sentence=event.problem),
                    PublishFleet(),
                    *self._stop_all(event.at, ExitCode.FAILED),
                ]
            elif ChildKind.API_SERVER not in self._alive.values():
                instructions = self._stop_all(event.at, ExitCode.OK)
        if not self._alive:
            self.state = ClusterState.DONE
            self.deadline = None
            return [instruction for instruction in instructions if isinstance(instruction, Report)]
        return instructions

    def _on_stop(self, at: float) -> list[Instruction]:
        match self.state:
            case ClusterState.STARTING:
                return self._stop_all(at, ExitCode.INTERRUPTED)
            case ClusterState.SERVING:
                self.state = ClusterState.DRAINING
                self.deadline = at + self._drain_timeout_s + self._stop_timeout_s
                return [Terminate(roles=self._roles(ChildKind.API_SERVER))]
            case ClusterState.DRAINING:
                return self._stop_all(at, ExitCode.INTERRUPTED)
            case ClusterState.STOPPING:
                return [Kill(roles=tuple(self._alive))]
            case ClusterState.DONE:
                return []

    def _on_deadline(self, at: float) -> list[Instruction]:
        if self.deadline is None or at < self.deadline:
            return []
        match self.state:
            case ClusterState.STARTING:
                missing = ", ".join(sorted(self._not_ready))
                report = Report(sentence=f"not ready before the deadline: {missing}")
                return [report, *self._stop_all(at, ExitCode.FAILED)]
            case ClusterState.DRAINING:
                return [Report(sentence="the drain budget is spent"), *self._stop_all(at, self.exit_code)]
            case _:
                self.deadline = None
                return [Kill(roles=tuple(self._alive))]

    def _stop_all(self, at: float, code: ExitCode) -> list[Instruction]:
        self.state = ClusterState.STOPPING
        self.exit_code = code
        self.deadline = at + self._stop_timeout_s
        return [Terminate(roles=tuple(self._alive))]

    def _roles(self, kind: ChildKind) -> tuple[str, ...]:
        return tuple(role for role, its_kind in self._alive.items() if its_kind is kind)
