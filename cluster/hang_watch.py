"""HangWatch: looks at the status board about once a second, and says who hangs.

Called by: the supervisor, in its main thread, which kills those. What counts as a hang is decided by health.py.
"""

import logging
from collections.abc import Mapping

from ..shm.process import ChildProcess
from ..shm.stack_dump import is_stopped
from .fleet import Fleet
from .health import HangMonitor, HangPolicy, Stuck
from .messages import StuckRank
from .supervision import Supervision
from .supervision_events import ChildState

log = logging.getLogger(__name__)

MAX_INTERVAL_S = 1.0
"""Between two looks, at most."""


class HangWatch:
    """See above. One thread."""

    def __init__(self, policy: HangPolicy) -> None:
        self.next_look_at = 0.0
        """When to `look` next."""
        self.stuck: list[StuckRank] = []
        """Who stands still, hung or not yet."""
        self._monitor = HangMonitor(policy)
        self._interval_s = min(MAX_INTERVAL_S, policy.hang_timeout_s / 10)
        self._problems: dict[str, str] = {}
        self._num_hangs: dict[str, int] = {}

    def num_hangs(self, role: str) -> int:
        """How often a child, or a worker of it, was found to hang."""
        return self._num_hangs.get(role, 0)

    def take_problem(self, role: str) -> str | None:
        """Return why a child had to be killed, once; None: it had not."""
        return self._problems.pop(role, None)

    def look(
        self, now: float, fleet: Fleet, supervision: Supervision, children: Mapping[str, ChildProcess]
    ) -> tuple[list[str], bool]:
        """Look at all children that serve, and at the workers of replicas.

        Returns the roles of the children to kill, each once, and whether `stuck` has changed. Blocks up to a
        second for the stacks of each that hangs.
        """
        self.next_look_at = now + self._interval_s
        looks = {}
        for role in supervision.roles:
            if supervision.child_state(role) is ChildState.READY:
                looks.update(fleet.looks(role, supervision.epoch(role), children[role].pid, is_stopped))
        found = self._monitor.observe(now, looks)
        hung: dict[str, Stuck] = {}
        for stuck in found:
            if stuck.is_hung and stuck.child not in self._problems:
                hung.setdefault(stuck.child, stuck)
        for role, stuck in hung.items():
            self._problems[role] = f"{stuck.role} {stuck.problem}"
            self._num_hangs[role] = self.num_hangs(role) + 1
            log.error("process hangs %s %s\n%s", stuck.role, stuck.problem, children[role].stack())
        before = [(stuck.role, stuck.phase) for stuck in self.stuck]
        self.stuck = [StuckRank(role=stuck.role, phase=stuck.phase, problem=stuck.problem) for stuck in found]
        return list(hung), before != [(stuck.role, stuck.phase) for stuck in self.stuck]
