"""What the supervisor tells front ends, and the conductor, of the cluster as it stands.

Called by: the supervisor, whenever something has changed. Reads only.
"""

from collections.abc import Mapping

from ..shm.process import ChildProcess
from .admin import ReplicaView
from .fleet import Fleet, core_role, kind_of, rank_of
from .hang_watch import HangWatch
from .messages import FleetUpdate, ProcessInfo, ReplicaState
from .supervision import Supervision
from .supervision_events import ChildState, ReplicaMode

_REPLICA_STATES = {
    ChildState.STARTING: ReplicaState.STARTING,
    ChildState.READY: ReplicaState.READY,
    ChildState.PAUSED: ReplicaState.LOST,
    ChildState.GIVEN_UP: ReplicaState.LOST,
    ChildState.LEAVING: ReplicaState.LOST,
}
_WITH_PROCESS = (ChildState.STARTING, ChildState.READY, ChildState.LEAVING)


class FleetView:
    """Reads what the parts of the supervisor know. children: by role, kept up to date by their owner."""

    def __init__(
        self,
        fleet: Fleet,
        supervision: Supervision,
        children: Mapping[str, ChildProcess],
        watch: HangWatch,
    ) -> None:
        self._fleet = fleet
        self._supervision = supervision
        self._children = children
        self._watch = watch

    def dp_ranks(self) -> list[int]:
        """All replicas that there are, or shall be."""
        ranks = (rank_of(role) for role in self._supervision.roles)
        return sorted(rank for rank in ranks if rank is not None)

    def replicas(self) -> dict[int, ReplicaView]:
        """What the conductor must know of each replica."""
        return {
            dp_rank: ReplicaView(
                state=self._supervision.child_state(core_role(dp_rank)),
                mode=self._supervision.mode(core_role(dp_rank)),
                weights=self._fleet.weights_of(dp_rank),
            )
            for dp_rank in self.dp_ranks()
        }

    def update(self, sequence: int, *, is_paused: bool, operation: str | None) -> FleetUpdate:
        """What front ends must know."""
        return FleetUpdate(
            sequence=sequence,
            replicas=[
                self._fleet.replica_info(
                    dp_rank, self._supervision.epoch(core_role(dp_rank)), self._replica_state(dp_rank)
                )
                for dp_rank in self.dp_ranks()
            ],
            processes=[self._process_info(role) for role in self._supervision.roles],
            ranks=self._fleet.rank_infos(),
            stuck=self._watch.stuck,
            is_paused=is_paused,
            state=self._supervision.state,
            operation=operation,
        )

    def _replica_state(self, dp_rank: int) -> ReplicaState:
        role = core_role(dp_rank)
        state = self._supervision.child_state(role)
        if state is ChildState.READY and self._supervision.mode(role) is not ReplicaMode.ACTIVE:
            return ReplicaState.WITHHELD
        return _REPLICA_STATES[state]

    def _process_info(self, role: str) -> ProcessInfo:
        supervision, child = self._supervision, self._children.get(role)
        state, epoch = supervision.child_state(role), supervision.epoch(role)
        return ProcessInfo(
            role=role,
            kind=kind_of(role),
            state=state,
            mode=supervision.mode(role),
            pid=child.pid if child is not None and state in _WITH_PROCESS else None,
            epoch=epoch,
            num_restarts=epoch,
            num_failures=supervision.num_failures(role),
            num_hangs=self._watch.num_hangs(role),
            last_error=supervision.last_problem(role),
        )
