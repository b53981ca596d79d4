"""What every replica last said of its load, and when front ends should hear of it. Pure.

Called by: the coordinator process. It holds nothing that the next reports would not bring again, so the
coordinator may be killed and started anew at any time.
"""

from ..engine.messages import EngineStats
from .messages import LoadSnapshot

MIN_INTERVAL_S = 0.1
"""Between two snapshots while things change: a front end counts its own choices exactly meanwhile."""
REST_INTERVAL_S = 2.0
"""Between two snapshots while nothing changes, so that a front end that came later learns of all replicas."""
FORGET_AFTER_S = 10.0
"""A replica that has not reported for so long is left out: unknown, not idle. It reports at rest, too."""


class LoadTable:
    """The newest report of each replica."""

    def __init__(self) -> None:
        self._stats: dict[int, EngineStats] = {}
        self._sequence = 0
        self._published_at = float("-inf")
        self._has_changed = False
        self.num_outdated = 0

    def report(self, stats: EngineStats) -> None:
        """Take a report; one that is older than what is known is counted and dropped."""
        known = self._stats.get(stats.dp_rank)
        if known is not None and (stats.epoch, stats.sequence) <= (known.epoch, known.sequence):
            self.num_outdated += 1
            return
        self._stats[stats.dp_rank] = stats
        self._has_changed = True

    def due_at(self) -> float:
        """When the next snapshot is due, as things stand."""
        return self._published_at + (MIN_INTERVAL_S if self._has_changed else REST_INTERVAL_S)

    def publish(self, now: float) -> LoadSnapshot | None:
        """Return the snapshot to send now, None while none is due."""
        if now < self.due_at():
            return None
        self._stats = {
            rank: stats for rank, stats in self._stats.items() if now - stats.reported_at <= FORGET_AFTER_S
        }
        self._sequence += 1
        self._published_at = now
        self._has_changed = False
        return LoadSnapshot(sequence=self._sequence, published_at=now, stats=list(self._stats.values()))
