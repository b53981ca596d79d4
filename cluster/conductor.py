"""Conductor: carries out an operator's commands, one at a time, through the supervisor's hands.

Called by: the supervisor, in its main thread: commands come in, and everything that happens to replicas meanwhile. What
to do is decided by admin.py and operations.py; here it is done, and found out how it went.

When a replica dies in the middle: the stage that it breaks has failed, and the replica is started again as ever. When
the front end that brought the command dies: the operation goes on, and its end stands in the log.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from ..engine.core_control import ControlKind, CoreControl, CoreControlDone
from ..shm.errors import ConfigError
from ..workers.sleep import SleepLevel
from .admin import CommandRefusedError, OperationPlan, ReplicaView, plan_operation
from .messages import AdminCommand, AdminKind, AdminResult, AdminStatus, ReplicaResult
from .operations import Do, Operation, Stage, StageKind, Weights
from .supervision_events import (
    AddReplica,
    ChildState,
    Event,
    Recycle,
    RemoveReplica,
    ReplicaMode,
    SetMode,
)

log = logging.getLogger(__name__)


class Hands(Protocol):
    """What the conductor does through the supervisor."""

    def handle(self, event: Event) -> None:
        """Have Supervision decide, and carry it out."""
        ...

    def replicas(self) -> Mapping[int, ReplicaView]:
        """All replicas, by dp_rank."""
        ...

    def epoch(self, dp_rank: int) -> int:
        """Of the newest process of a replica."""
        ...

    def set_weights(self, dp_rank: int, weights: Weights) -> None:
        """From the next start on."""
        ...

    def check_weights(self, path: str) -> None:
        """Raise ConfigError when replicas could not serve them."""
        ...

    def call(self, dp_rank: int, control: CoreControl) -> bool:
        """Ask an engine core. False: it is gone."""
        ...

    def resize(self, num_replicas: int) -> None:
        """Plan for so many replicas. Raises ConfigError when there are no devices or no memory for them."""
        ...

    @property
    def num_published(self) -> int:
        """Number of the last update to the front ends."""
        ...

    @property
    def has_front_end(self) -> bool:
        """True when somebody will answer an update."""
        ...

    def publish(self) -> None:
        """Tell the front ends how things stand."""
        ...

    def answer(self, result: AdminResult) -> None:
        """Tell the front end that brought a command how it has ended."""
        ...


class _Current:
    """The operation under way."""

    def __init__(self, command: AdminCommand, operation: Operation) -> None:
        self.command = command
        self.operation = operation
        self.epochs: dict[int, int] = {}
        """Of the process that each replica had when its RESTART began."""
        self.sequences: dict[int, int] = {}
        """The update that the front ends must answer, for each SET_MODE."""
        self.call_ids: dict[int, int] = {}


class Conductor:
    """See above. clock: of deadlines; default_timeout_s: for one replica's part of a command."""

    def __init__(self, hands: Hands, *, default_timeout_s: float, clock: Callable[[], float]) -> None:
        self.is_paused = False
        """No replica begins a step. An engine core that is started meanwhile is told so."""
        self._hands = hands
        self._default_timeout_s = default_timeout_s
        self._clock = clock
        self._current: _Current | None = None
        self._sleep_levels: dict[int, SleepLevel] = {}
        self._num_calls = 0

    @property
    def operation(self) -> str | None:
        """What is being done; None: nothing."""
        return None if self._current is None else self._current.command.kind.value

    @property
    def deadline(self) -> float | None:
        """When to call `tick` at the latest."""
        return None if self._current is None else self._current.operation.deadline_at

    def take(self, command: AdminCommand) -> None:
        """Begin a command, or refuse it. Answered by `Hands.answer`, at once or later."""
        try:
            if self._current is not None:
                raise CommandRefusedError(AdminStatus.CONFLICT, f"{self.operation} is under way")
            plan = self._plan(command)
        except CommandRefusedError as error:
            self._hands.answer(
                AdminResult(
                    command_id=command.command_id,
                    status=error.status,
                    problem=error.problem,
                    field=error.field,
                )
            )
            return
        timeout_s = command.timeout_s or self._default_timeout_s * max(1, plan.num_turns)
        operation = Operation(
            plan.targets,
            started_at=self._clock(),
            timeout_s=timeout_s,
            is_rolling=plan.is_rolling,
            goes_all_back=plan.goes_all_back,
        )
        log.info("operation begins kind=%s replicas=%d", command.kind, len(plan.targets))
        self._current = _Current(command, operation)
        if command.kind is AdminKind.UNPAUSE:
            self.is_paused = False
        self._carry_out(operation.begin())

    def ready(self, dp_rank: int) -> None:
        """A replica serves. Call it when Supervision knows."""
        view = self._hands.replicas().get(dp_rank)
        # It was told at its start, which may have been before the last change of mind.
        self._call(dp_rank, ControlKind.PAUSE if self.is_paused else ControlKind.RESUME)
        if view is not None and view.mode is ReplicaMode.ASLEEP:
            # It died in its sleep, and shall sleep on.
            self._call(dp_rank, ControlKind.SLEEP, self._sleep_levels.get(dp_rank, SleepLevel.HOST))
        stage = self._stage(dp_rank)
        if stage is None or self._current is None:
            return
        has_new_process = self._hands.epoch(dp_rank) > self._current.epochs.get(dp_rank, -1)
        if stage.kind is StageKind.ADD or (stage.kind is StageKind.RESTART and has_new_process):
            self._done(dp_rank)

    def exited(self, dp_rank: int, epoch: int, problem: str) -> None:
        """The process of that epoch is gone. Call it when Supervision knows."""
        stage = self._stage(dp_rank)
        if stage is None or self._current is None:
            return
        match stage.kind:
            case StageKind.RESTART if epoch > self._current.epochs[dp_rank]:
                self._failed(dp_rank, problem)
            case StageKind.CALL | StageKind.ADD:
                self._failed(dp_rank, problem)
            case StageKind.REMOVE if dp_rank not in self._hands.replicas():
                self._done(dp_rank)
            case _:
                pass

    def applied(self, sequence: int | None) -> None:
        """All front ends have done what that update asks for; None: there is none, and nobody holds anything."""
        if self._current is None:
            return
        current = self._current
        for dp_rank, stage in list(current.operation.running.items()):
            is_due = stage.kind is StageKind.SET_MODE and current.operation.running.get(dp_rank) is stage
            if is_due and (sequence is None or sequence >= current.sequences[dp_rank]):
                self._done(dp_rank)

    def answered(self, dp_rank: int, answer: CoreControlDone) -> None:
        """An engine core has done what it was asked for."""
        stage = self._stage(dp_rank)
        is_awaited = (
            self._current is not None
            and stage is not None
            and stage.kind is StageKind.CALL
            and self._current.call_ids.get(dp_rank) == answer.call_id
        )
        if not is_awaited:
            if answer.error is not None:
                log.warning("call failed dp_rank=%d error=%s", dp_rank, answer.error)
            return
        if answer.error is None:
            self._done(dp_rank)
        else:
            self._failed(dp_rank, answer.error)

    def tick(self) -> None:
        """`deadline` has passed."""
        if self._current is not None:
            self._carry_out(self._current.operation.tick(self._clock()))

    def _plan(self, command: AdminCommand) -> OperationPlan:
        plan = plan_operation(command, self._hands.replicas(), is_paused=self.is_paused)
        try:
            if command.kind is AdminKind.RELOAD:
                assert command.path is not None
                self._hands.check_weights(command.path)
            if command.kind is AdminKind.SCALE:
                assert command.data_parallel_size is not None
                self._hands.resize(max(command.data_parallel_size, len(self._hands.replicas())))
        except ConfigError as error:
            # The error names a setting; the operator wrote this.
            field = "path" if command.kind is AdminKind.RELOAD else "dp"
            raise CommandRefusedError(AdminStatus.INVALID, str(error), field=field) from None
        return plan

    def _stage(self, dp_rank: int) -> Stage | None:
        return None if self._current is None else self._current.operation.running.get(dp_rank)

    def _done(self, dp_rank: int) -> None:
        assert self._current is not None
        self._carry_out(self._current.operation.done(dp_rank))

    def _failed(self, dp_rank: int, problem: str) -> None:
        assert self._current is not None
        self._carry_out(self._current.operation.failed(dp_rank, problem))

    def _carry_out(self, doings: list[Do]) -> None:
        for do in doings:
            # What was done before may have ended this one already.
            if self._stage(do.dp_rank) is do.stage:
                self._do(do.dp_rank, do.stage)
        self._finish()

    def _do(self, dp_rank: int, stage: Stage) -> None:
        current, hands = self._current, self._hands
        assert current is not None
        role = f"dp{dp_rank}"
        match stage.kind:
            case StageKind.SET_MODE:
                hands.handle(SetMode(role=role, mode=stage.mode))
                current.sequences[dp_rank] = hands.num_published
                if not hands.has_front_end:
                    self._done(dp_rank)
            case StageKind.RESTART:
                current.epochs[dp_rank] = hands.epoch(dp_rank)
                if stage.weights is not None:
                    hands.set_weights(dp_rank, stage.weights)
                hands.handle(Recycle(role=role, at=self._clock()))
            case StageKind.ADD:
                hands.handle(AddReplica(role=role, at=self._clock()))
            case StageKind.REMOVE:
                hands.handle(RemoveReplica(role=role, at=self._clock()))
                if dp_rank not in hands.replicas():
                    self._done(dp_rank)
            case StageKind.CALL:
                assert stage.control is not None
                if stage.control is ControlKind.SLEEP:
                    self._sleep_levels[dp_rank] = stage.level
                view = hands.replicas().get(dp_rank)
                call_id = self._call(dp_rank, stage.control, stage.level)
                if call_id is None or view is None or view.state is not ChildState.READY:
                    self._failed(dp_rank, "its engine core does not serve")
                else:
                    current.call_ids[dp_rank] = call_id

    def _call(self, dp_rank: int, kind: ControlKind, level: SleepLevel = SleepLevel.HOST) -> int | None:
        """Ask an engine core; return the number of the call, None when it is gone."""
        self._num_calls += 1
        control = CoreControl(
            call_id=self._num_calls, kind=kind, level=level, timeout_s=self._default_timeout_s
        )
        return self._num_calls if self._hands.call(dp_rank, control) else None

    def _pause_all(self) -> None:
        self.is_paused = True
        # Who died after its part of it and is back already was not told when it started.
        for dp_rank, view in self._hands.replicas().items():
            if view.state is ChildState.READY:
                self._call(dp_rank, ControlKind.PAUSE)

    def _finish(self) -> None:
        """Tell the result, once every replica has its outcome."""
        current = self._current
        if current is None or not current.operation.is_over:
            return
        self._current = None
        command = current.command
        outcomes = current.operation.outcomes()
        problems = [f"dp{outcome.dp_rank}: {outcome.problem}" for outcome in outcomes if outcome.problem]
        if command.kind is AdminKind.PAUSE and not problems:
            self._pause_all()
        if command.kind is AdminKind.SCALE:
            self._hands.resize(len(self._hands.replicas()))
        log.info("operation ends kind=%s problems=%s", command.kind, "; ".join(problems) or "none")
        self._hands.publish()
        self._hands.answer(
            AdminResult(
                command_id=command.command_id,
                status=AdminStatus.FAILED if problems else AdminStatus.DONE,
                problem="; ".join(problems) or None,
                replicas=[
                    ReplicaResult(dp_rank=outcome.dp_rank, problem=outcome.problem) for outcome in outcomes
                ],
            )
        )
