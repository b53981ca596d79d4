"""An operator's wish on replicas, one stage after the other: drain, restart, call, add, remove. Pure.

Called by: conductor.py, which carries out what an `Operation` asks for and tells it how that went; admin.py makes
one out of a command. Knows no process, message or clock.

    target = one replica: stage, stage, ... -> done
                            |
                            +- failed, or late -> way back: stage, ... -> failed

Every replica ends up with a result of its own: done, failed with the reason, or not tried. In a rolling operation one
replica is worked on at a time, and none after the first that failed. Where the cluster must not stay half way, a
failure sends all replicas back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ..engine.core_control import ControlKind
from ..workers.sleep import SleepLevel
from .supervision_events import ReplicaMode


class StageKind(StrEnum):
    """What is done to one replica."""

    SET_MODE = "set mode"
    """Over when the front ends have heard of it, and moved the requests that it must not keep."""
    RESTART = "restart"
    """Over when the new process serves."""
    CALL = "call"
    """Over when its engine core has answered."""
    ADD = "add"
    """Over when the new replica serves."""
    REMOVE = "remove"
    """Over when the replica is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Which weights a replica serves. path: as `model.path`; version: what clients are told."""

    path: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One thing to do to one replica.

    mode:    of SET_MODE; weights: to RESTART with, None: those that it has
    control: of CALL, with the level of a sleep
    """

    kind: StageKind
    mode: ReplicaMode = ReplicaMode.ACTIVE
    weights: Weights | None = None
    control: ControlKind | None = None
    level: SleepLevel = SleepLevel.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What shall become of one replica, and what to do when that fails on the way."""

    dp_rank: int
    stages: tuple[Stage, ...]
    way_back: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Do:
    """Carry out a stage, and tell `done` or `failed`."""

    dp_rank: int
    stage: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one replica. problem: None when it was done; else one sentence."""

    dp_rank: int
    problem: str | None


@dataclass(slots=True)
class _Run:
    """One target under way. left: stages after the one that is running."""

    target: Target
    left: list[Stage] = field(default_factory=list)
    running: Stage | None = None
    has_begun: bool = False
    is_going_back: bool = False
    problem: str | None = None

    @property
    def is_over(self) -> bool:
        return self.has_begun and self.running is None


class Operation:
    """One wish, until every replica has its outcome. One thread.

    is_rolling:   one replica after the other, none after a failure; otherwise all at once
    goes_all_back: a failure of one sends all on their way back
    timeout_s:    for all of it; the way back has as long again
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        started_at: float,
        timeout_s: float,
        is_rolling: bool = False,
        goes_all_back: bool = False,
    ) -> None:
        self._runs = {target.dp_rank: _Run(target) for target in targets}
        self._is_rolling = is_rolling
        self._goes_all_back = goes_all_back
        self._timeout_s = timeout_s
        self.deadline_at = started_at + timeout_s
        """When to `tick` at the latest."""

    @property
    def running(self) -> Mapping[int, Stage]:
        """The stage that each replica is in, by dp_rank; those with nothing to do are absent."""
        return {rank: run.running for rank, run in self._runs.items() if run.running is not None}

    @property
    def is_over(self) -> bool:
        """True when every replica has its outcome."""
        return all(run.is_over for run in self._runs.values())

    def outcomes(self) -> list[Outcome]:
        """What became of each replica, by dp_rank."""
        return [Outcome(dp_rank=rank, problem=run.problem) for rank, run in sorted(self._runs.items())]

    def begin(self) -> list[Do]:
        """Return the first things to do."""
        waiting = [run for run in self._runs.values() if not run.has_begun]
        doings = []
        for run in waiting[:1] if self._is_rolling else waiting:
            run.has_begun = True
            run.left = list(run.target.stages)
            doings += self._next(run)
        return doings

    def done(self, dp_rank: int) -> list[Do]:
        """A replica's stage is over; return what to do next."""
        return self._next(self._runs[dp_rank])

    def failed(self, dp_rank: int, problem: str) -> list[Do]:
        """A replica's stage has failed; return what to do next."""
        run = self._runs[dp_rank]
        if run.is_going_back:
            run.problem = f"{run.problem}; on the way back: {problem}"
            return self._next(run)
        run.problem = problem
        doings = self._go_back(run)
        if self._goes_all_back:
            for other in self._runs.values():
                if other is not run and not other.is_going_back:
                    other.problem = f"taken back: dp{dp_rank} failed"
                    doings += self._go_back(other)
        return doings

    def tick(self, now: float) -> list[Do]:
        """The time may be up; return what to do then."""
        if now < self.deadline_at or self.is_over:
            return []
        self.deadline_at = now + self._timeout_s
        doings: list[Do] = []
        for rank, stage in list(self.running.items()):
            if self._runs[rank].running is stage:
                doings += self.failed(rank, f"{stage.kind}: not done in time")
        return doings

    def _go_back(self, run: _Run) -> list[Do]:
        run.has_begun = True
        run.is_going_back = True
        run.left = list(run.target.way_back)
        return self._next(run)

    def _next(self, run: _Run) -> list[Do]:
        if run.left:
            run.running = run.left.pop(0)
            return [Do(dp_rank=run.target.dp_rank, stage=run.running)]
        run.running = None
        if not self._is_rolling:
            return []
        if run.problem is None:
            return self.begin()
        for other in self._runs.values():
            if not other.has_begun:
                other.has_begun = True
                other.problem = f"not tried: dp{run.target.dp_rank} failed"
        return []
