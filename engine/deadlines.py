"""Deadlines of requests, the next one first.

Called by: Scheduler. Lives in the engine-core process only.
Cost: O(log n); requests that ended before their deadline are dropped when they are more than half of all.
"""

import heapq
import itertools

from .request import Request, RequestStatus


class DeadlineHeap:
    """Requests that have a deadline. Owner: the scheduler."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._entries = itertools.count()
        self._max_len = 64

    @property
    def next_at(self) -> float | None:
        """The next deadline; it may be that of a request that has ended."""
        return self._heap[0][0] if self._heap else None

    def add(self, deadline_at: float, request: Request) -> None:
        """Watch over a request."""
        heapq.heappush(self._heap, (deadline_at, next(self._entries), request))
        if len(self._heap) > self._max_len:
            self._heap = [entry for entry in self._heap if entry[2].status is not RequestStatus.FINISHED]
            heapq.heapify(self._heap)
            self._max_len = 2 * len(self._heap) + 64

    def pop_expired(self, now: float) -> list[Request]:
        """Take the unfinished requests whose deadline has passed."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if request.status is not RequestStatus.FINISHED:
                expired.append(request)
        return expired
