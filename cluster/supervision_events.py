"""What happens to the processes of a cluster, and what is to be done about it: events and instructions of Supervision.

Called by: the supervisor makes the one and carries out the other; supervision.py is what lies between. Plain values.
"""

from dataclasses import dataclass
from enum import StrEnum


class ChildKind(StrEnum):
    """What a child of the supervisor is."""

    API_SERVER = "api server"
    COORDINATOR = "coordinator"
    ENGINE_CORE = "engine core"


class ChildState(StrEnum):
    """Where a child is in its life."""

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    """Dead, and to be started again after a pause."""
    LEAVING = "leaving"
    """Told to leave by an operator's wish: to be started anew, or to be gone."""
    GIVEN_UP = "given up"
    """Dead, and not to be started again."""


class ReplicaMode(StrEnum):
    """What a replica is for while it lives, by an operator's wish. It survives the replica's restarts."""

    ACTIVE = "active"
    DRAINED = "drained"
    """Takes no requests; those that it had continue elsewhere."""
    ASLEEP = "asleep"
    """Likewise, and has given its memory back."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMode:
    """A replica shall serve, or shall not."""

    role: str
    mode: ReplicaMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Recycle:
    """Start a replica anew, whatever state it is in. It leaves in order; that is no death, and costs no budget."""

    role: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AddReplica:
    """There shall be one replica more."""

    role: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveReplica:
    """There shall be one replica less."""

    role: str
    at: float


Event = ChildReady | ChildExited | StopRequested | Tick | SetMode | Recycle | AddReplica | RemoveReplica


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFleet:
    """Tell the front ends which replicas serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Everything is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start this child, under an epoch that it never had."""

    role: str
    epoch: int


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


Instruction = PublishFleet | Announce | Start | Terminate | Kill | Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a child that died is started again.

    max_restarts:    within `window_s`; one death more and the child is given up
    backoff_s:       pause after the second death in the window; doubled with each further one. A first one is repaired
                     at once: clients wait, and a death that comes alone says nothing against another try
    max_backoff_s:   longest pause
    start_timeout_s: for the new process to be ready
    """

    max_restarts: int
    window_s: float
    backoff_s: float
    max_backoff_s: float
    start_timeout_s: float

    def pause_s(self, num_deaths: int) -> float:
        """Return how long to wait after so many deaths within the window, at least one."""
        return 0.0 if num_deaths == 1 else min(self.max_backoff_s, self.backoff_s * 2 ** (num_deaths - 2))
