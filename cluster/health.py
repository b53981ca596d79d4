"""Who stands still although nobody died: judged by what the ranks write on the status board. Pure.

Called by: the supervisor, which looks at the board about once a second, tells what it saw, and ends a replica that
hangs. Knows no process, board or clock.

A process writes its slot as its main thread goes on, never from a timer of another one, so a slot that does not
change is a thread that does not. How long that may last depends on the phase: a step may compute for minutes, a
decision of the scheduler may not; a rank without work sleeps as long as it likes, an engine core, an API server and
the coordinator look around every other second also then. A process that is stopped by a signal has no phase at all.
Silence is counted in looks, not in time: when the watcher itself stood still, or got no processor, nobody else is
blamed for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..shm.status_board import Phase, RankStatus

MAX_STEP_BETWEEN_LOOKS_S = 2.0
"""What one look counts at most, however long ago the one before was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangPolicy:
    """When silence is a hang.

    hang_timeout_s: in phases that compute nothing, and for a process that is stopped by a signal
    step_timeout_s: the executor's own, for one step; it is given the first word, since it can name the culprit
    """

    hang_timeout_s: float
    step_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen of one rank, or of another process that writes the board.

    epoch:      of its replica, or its own; with another one everything is counted anew
    status:     its slot. That of an engine core holds the number of unfinished requests in place of a call id
    is_worker:  it sleeps while nobody asks for anything; all others look around every other second
    is_stopped: by SIGSTOP or a debugger, as the kernel says
    """

    epoch: int
    status: RankStatus
    is_worker: bool
    is_stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A process that stands still for more than half of what it may.

    role:    "dp0", "dp0 tp1", "api0"; silent_s: how long; budget_s: how long it may
    problem: one sentence without the role
    """

    role: str
    phase: Phase
    silent_s: float
    budget_s: float
    problem: str

    @property
    def is_hung(self) -> bool:
        """True when the budget is spent."""
        return self.silent_s >= self.budget_s

    @property
    def child(self) -> str:
        """The role of the supervisor's child that it is, or belongs to."""
        return self.role.partition(" ")[0]


@dataclass(slots=True)
class _Watched:
    """One rank: its last slot, and for how long it has not changed, made no step, or been stopped."""

    epoch: int
    status: RankStatus
    silent_s: float = 0.0
    without_step_s: float = 0.0
    stopped_s: float = 0.0


class HangMonitor:
    """Counts how long each rank stands still. One thread."""

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._ranks: dict[str, _Watched] = {}
        self._looked_at: float | None = None

    def observe(self, now: float, looks: Mapping[str, Look]) -> list[Stuck]:
        """Take one look at all ranks that serve, by role; return those that are stuck, the longest first.

        A role that is absent is forgotten: it starts, or is gone.
        """
        elapsed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, MAX_STEP_BETWEEN_LOOKS_S)
        self._looked_at = now
        self._ranks = {role: watched for role, watched in self._ranks.items() if role in looks}
        stuck = []
        for role, look in looks.items():
            watched = self._ranks.get(role)
            if watched is None or watched.epoch != look.epoch:
                self._ranks[role] = _Watched(look.epoch, look.status)
                continue
            _count(watched, look, elapsed_s)
            found = self._judge(role, watched, look)
            if found is not None:
                stuck.append(found)
        return sorted(stuck, key=lambda entry: entry.silent_s - entry.budget_s, reverse=True)

    def _judge(self, role: str, watched: _Watched, look: Look) -> Stuck | None:
        policy, phase = self._policy, watched.status.phase
        long_s = policy.step_timeout_s + policy.hang_timeout_s
        where = f"in {phase}" if phase is Phase.SERVING else f"in {phase}, step {watched.status.step}"
        if look.is_stopped:
            where = f"stopped by a signal, {where}"
        candidates = [
            (watched.stopped_s, policy.hang_timeout_s, where),
            (watched.silent_s, self._budget_s(phase, is_worker=look.is_worker), where),
        ]
        if not look.is_worker:
            waiting = f"{watched.status.call_id} requests wait and no step is made, {where}"
            candidates.append((watched.without_step_s, long_s, waiting))
        silent_s, budget_s, problem = max(candidates, key=lambda entry: entry[0] / entry[1])
        if silent_s < budget_s / 2:
            return None
        return Stuck(
            role=role,
            phase=phase,
            silent_s=silent_s,
            budget_s=budget_s,
            problem=f"stands still for {silent_s:.0f} s: {problem}",
        )

    def _budget_s(self, phase: Phase, *, is_worker: bool) -> float:
        policy = self._policy
        if not is_worker:
            if phase in _LONG_PHASES_OF_CORES:
                return policy.step_timeout_s + policy.hang_timeout_s
            return float("inf") if phase in _UNWATCHED_PHASES else policy.hang_timeout_s
        if phase in _UNWATCHED_PHASES or phase in _PATIENT_PHASES_OF_WORKERS:
            return float("inf")
        return policy.step_timeout_s + policy.hang_timeout_s


def _count(watched: _Watched, look: Look, elapsed_s: float) -> None:
    before, status = watched.status, look.status
    watched.status = status
    watched.silent_s = watched.silent_s + elapsed_s if status.since_at == before.since_at else 0.0
    watched.stopped_s = watched.stopped_s + elapsed_s if look.is_stopped else 0.0
    is_waiting = status.call_id > 0 and status.step == before.step and status.phase is not Phase.PAUSED
    watched.without_step_s = watched.without_step_s + elapsed_s if is_waiting else 0.0


_LONG_PHASES_OF_CORES = frozenset({Phase.WAITING, Phase.HOOK})
"""It waits for its workers; the executor watches those."""
_PATIENT_PHASES_OF_WORKERS = frozenset({Phase.IDLE, Phase.MASKS})
"""Nobody has asked for anything, or the engine core owes something."""
_UNWATCHED_PHASES = frozenset(
    {
        Phase.NOT_STARTED,
        Phase.IMPORT,
        Phase.DEVICE,
        Phase.PROCESS_GROUP,
        Phase.WEIGHTS,
        Phase.PROFILE,
        Phase.KV_CACHE,
        Phase.STOPPING,
    }
)
"""Start and stop have deadlines of their own."""
