"""StallDetector: when a wait is worth a report. Pure: instants in, decisions out.

Called by: who waits for other processes (the executor for its ranks, a start for its children); one thread.
Whoever is idle waits for nothing, and does not ask.
"""


class StallDetector:
    """Due once when nothing has moved for `budget_s`, then each time after twice as long as the time before.

    next_report_at: instant of the next report, on the clock of the instants that were given; a waiter sleeps no
                    longer than that
    """

    def __init__(self, budget_s: float, now: float) -> None:
        self._budget_s = budget_s
        self.restart(now)

    def restart(self, now: float) -> None:
        """A wait begins, or something moved."""
        self._interval_s = self._budget_s
        self.next_report_at = now + self._interval_s

    def is_due(self, now: float) -> bool:
        """True when a report shall be made now; the next one is then due after twice the interval."""
        if now < self.next_report_at:
            return False
        self._interval_s *= 2
        self.next_report_at = now + self._interval_s
        return True
