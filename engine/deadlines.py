"""Instants by which something must be seen to, the next one first.

Called by: the scheduler's RequestBook in the engine core, for requests that have a deadline; ReplayLog in a front end,
for requests that wait for a replica.
Cost: O(log n); what is over before its instant is dropped when it is more than half of all.
"""

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class DeadlineHeap(Generic[T]):
    """Items, each with an instant. One thread. is_over: says of an item that it is not to be seen to any more"""

    def __init__(self, is_over: Callable[[T], bool]) -> None:
        self._is_over = is_over
        self._heap: list[tuple[float, int, T]] = []
        self._entries = itertools.count()
        self._max_len = 64

    @property
    def next_at(self) -> float | None:
        """The next instant, of an item that is not over; None: there is none."""
        while self._heap and self._is_over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, due_at: float, item: T) -> None:
        """Watch over an item until `due_at`."""
        heapq.heappush(self._heap, (due_at, next(self._entries), item))
        if len(self._heap) > self._max_len:
            self._heap = [entry for entry in self._heap if not self._is_over(entry[2])]
            heapq.heapify(self._heap)
            self._max_len = 2 * len(self._heap) + 64

    def pop_due(self, now: float) -> list[T]:
        """Take the items whose instant has come, those that are over left out."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            item = heapq.heappop(self._heap)[2]
            if not self._is_over(item):
                due.append(item)
        return due
