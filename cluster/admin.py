"""From an operator's command to the operation that carries it out, or to the reason why not. Pure.

Called by: conductor.py, with the command and what the supervisor knows of the replicas.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..engine.core_control import ControlKind
from .messages import AdminCommand, AdminKind, AdminStatus
from .operations import Stage, StageKind, Target, Weights
from .supervision_events import ChildState, ReplicaMode

MAX_REPLICAS = 64
"""Of one cluster: what the status board has room for."""

_ACTIVATE = Stage(kind=StageKind.SET_MODE, mode=ReplicaMode.ACTIVE)
_DRAIN = Stage(kind=StageKind.SET_MODE, mode=ReplicaMode.DRAINED)
_ASLEEP = Stage(kind=StageKind.SET_MODE, mode=ReplicaMode.ASLEEP)
_RESTART = Stage(kind=StageKind.RESTART)
_WAKE = Stage(kind=StageKind.CALL, control=ControlKind.WAKE)


class CommandRefusedError(Exception):
    """Nothing was done. status: what kind of refusal it is; field: of the operator's, that is at fault."""

    def __init__(self, status: AdminStatus, problem: str, *, field: str | None = None) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """What matters of one replica here."""

    state: ChildState
    mode: ReplicaMode
    weights: Weights

    @property
    def serves(self) -> bool:
        """True when it takes requests."""
        return self.state is ChildState.READY and self.mode is ReplicaMode.ACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationPlan:
    """What an `Operation` is made of. num_turns: how many replicas it works on one after the other."""

    targets: tuple[Target, ...]
    is_rolling: bool = False
    goes_all_back: bool = False

    @property
    def num_turns(self) -> int:
        """Replicas that are worked on one after the other."""
        return len(self.targets) if self.is_rolling else 1


def plan_operation(
    command: AdminCommand, replicas: Mapping[int, ReplicaView], *, is_paused: bool
) -> OperationPlan:
    """Say what to do to which replica. replicas: by dp_rank. Raises CommandRefusedError."""
    ranks = _chosen(command, replicas)
    match command.kind:
        case AdminKind.DRAIN:
            _keep_one(ranks, replicas)
            return _plan(ranks, (_DRAIN,), way_back=(_ACTIVATE,))
        case AdminKind.RESUME:
            return OperationPlan(targets=tuple(_resume(rank, replicas[rank]) for rank in ranks))
        case AdminKind.RESTART:
            return _plan(ranks, (_DRAIN, _RESTART, _ACTIVATE), way_back=(_ACTIVATE,), is_rolling=True)
        case AdminKind.RELOAD:
            return _reload(command, ranks, replicas)
        case AdminKind.PAUSE:
            _check_ready(ranks, replicas)
            stages = (Stage(kind=StageKind.CALL, control=ControlKind.PAUSE),)
            back = () if is_paused else (Stage(kind=StageKind.CALL, control=ControlKind.RESUME),)
            return _plan(ranks, stages, way_back=back, goes_all_back=True)
        case AdminKind.UNPAUSE:
            return _plan(
                _with_process(ranks, replicas), (Stage(kind=StageKind.CALL, control=ControlKind.RESUME),)
            )
        case AdminKind.SLEEP:
            _check_ready(ranks, replicas)
            if command.dp_rank is not None:
                _keep_one(ranks, replicas)
            go = Stage(kind=StageKind.CALL, control=ControlKind.SLEEP, level=command.level)
            return _plan(ranks, (_DRAIN, go, _ASLEEP), way_back=(_WAKE, _ACTIVATE))
        case AdminKind.WAKE:
            sleeping = [rank for rank in ranks if replicas[rank].mode is ReplicaMode.ASLEEP]
            _check_ready(sleeping, replicas)
            return _plan(sleeping, (_WAKE, _ACTIVATE))
        case AdminKind.RESET_PREFIX_CACHE:
            _check_ready(ranks, replicas)
            return _plan(ranks, (Stage(kind=StageKind.CALL, control=ControlKind.RESET_PREFIX_CACHE),))
        case AdminKind.SCALE:
            return _scale(command, replicas)


def _plan(
    ranks: Iterable[int],
    stages: tuple[Stage, ...],
    *,
    way_back: tuple[Stage, ...] = (),
    is_rolling: bool = False,
    goes_all_back: bool = False,
) -> OperationPlan:
    return OperationPlan(
        targets=tuple(Target(dp_rank=rank, stages=stages, way_back=way_back) for rank in ranks),
        is_rolling=is_rolling,
        goes_all_back=goes_all_back,
    )


def _chosen(command: AdminCommand, replicas: Mapping[int, ReplicaView]) -> list[int]:
    if command.dp_rank is None:
        return sorted(replicas)
    if command.dp_rank not in replicas:
        raise CommandRefusedError(AdminStatus.UNKNOWN, f"there is no replica {command.dp_rank}")
    return [command.dp_rank]


def _check_ready(ranks: Iterable[int], replicas: Mapping[int, ReplicaView]) -> None:
    absent = [
        f"dp{rank} is {replicas[rank].state}"
        for rank in ranks
        if replicas[rank].state is not ChildState.READY
    ]
    if absent:
        raise CommandRefusedError(AdminStatus.CONFLICT, "; ".join(absent))


def _with_process(ranks: Iterable[int], replicas: Mapping[int, ReplicaView]) -> list[int]:
    """Those that can be called; the others learn of it when they are started."""
    return [rank for rank in ranks if replicas[rank].state is ChildState.READY]


def _keep_one(leaving: list[int], replicas: Mapping[int, ReplicaView]) -> None:
    if not any(view.serves for rank, view in replicas.items() if rank not in leaving):
        problem = f"dp{leaving[0]} is the last replica that serves"
        raise CommandRefusedError(AdminStatus.CONFLICT, problem)


def _resume(rank: int, view: ReplicaView) -> Target:
    """Have one replica serve again, whatever it is that keeps it from it."""
    stages: tuple[Stage, ...] = (_ACTIVATE,)
    if view.state is ChildState.GIVEN_UP:
        stages = (_RESTART, _ACTIVATE)
    elif view.mode is ReplicaMode.ASLEEP and view.state is ChildState.READY:
        stages = (_WAKE, _ACTIVATE)
    return Target(dp_rank=rank, stages=stages)


def _reload(command: AdminCommand, ranks: list[int], replicas: Mapping[int, ReplicaView]) -> OperationPlan:
    if not command.path:
        raise CommandRefusedError(
            AdminStatus.INVALID, "path: a folder, or a GGUF file, is needed", field="path"
        )
    weights = Weights(
        path=command.path, version=command.version or command.path.rstrip("/").rpartition("/")[2]
    )
    targets = [
        Target(
            dp_rank=rank,
            stages=(_DRAIN, Stage(kind=StageKind.RESTART, weights=weights), _ACTIVATE),
            way_back=(Stage(kind=StageKind.RESTART, weights=replicas[rank].weights), _ACTIVATE),
        )
        for rank in ranks
    ]
    return OperationPlan(targets=tuple(targets), is_rolling=True)


def _scale(command: AdminCommand, replicas: Mapping[int, ReplicaView]) -> OperationPlan:
    wanted = command.data_parallel_size
    if wanted is None or not 1 <= wanted <= MAX_REPLICAS:
        raise CommandRefusedError(
            AdminStatus.INVALID, f"dp: must be 1 to {MAX_REPLICAS}, not {wanted}", field="dp"
        )
    remove = Stage(kind=StageKind.REMOVE)
    if wanted >= len(replicas):
        added = range(len(replicas), wanted)
        return _plan(added, (Stage(kind=StageKind.ADD),), way_back=(remove,), goes_all_back=True)
    leaving = list(range(wanted, len(replicas)))
    _keep_one(leaving, replicas)
    return _plan(leaving, (_DRAIN, remove), way_back=(_ACTIVATE,), goes_all_back=True)
