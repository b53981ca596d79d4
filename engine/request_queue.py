"""The waiting queue: which request is admitted next, and who is passed over.

Called by: Scheduler. Lives in the engine-core process only.

The smallest `order` is next: (priority, number of arrival). With one priority for all that is first come, first
served, and a preempted request, whose number is older than that of any that waits, is at the front by itself.

Starvation bound: requests of a better priority overtake the oldest one at most `max_overtakes` times; then it is
next. So a request with k older ones before it waits for at most (k + 1) * (max_overtakes + 1) admissions.

Requests that cannot be admitted now (their grammar is not ready, their last token is on its way) stand in the
queue like all others; `peek` looks past them.

Cost: O(log n), and removal from anywhere O(1): its entry in the heap is dropped when it comes up.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator

from .request import Request


class RequestQueue:
    """Requests that wait for admission. Owner: the scheduler.

    max_overtakes: how often the oldest may be passed by; see the module
    """

    def __init__(self, *, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        # Breaks the tie between two entries of one request, which came back before its old entry was dropped.
        self._entries = itertools.count()
        # The oldest first; those that came back are at the front.
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def append(self, request: Request) -> None:
        """Let a new request wait."""
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (request.order, next(self._entries), request))

    def put_back(self, request: Request) -> None:
        """Let a preempted request wait again: it was admitted before all that wait."""
        self.append(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self, can_be_admitted: Callable[[Request], bool]) -> Request | None:
        """Return the request that is next, and leave it there. None when nobody can be admitted."""
        oldest = self._oldest()
        if oldest is not None and oldest.num_overtaken >= self._max_overtakes and can_be_admitted(oldest):
            return oldest
        passed = []
        found = None
        while found is None and self._heap:
            request = self._heap[0][2]
            if self._requests.get(request.request_id) is not request:
                heapq.heappop(self._heap)
            elif can_be_admitted(request):
                found = request
            else:
                passed.append(heapq.heappop(self._heap))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def admit(self, request: Request) -> None:
        """Take the request that `peek` returned."""
        oldest = self._oldest()
        assert oldest is not None
        if oldest.order > request.order:
            oldest.num_overtaken += 1
        del self._requests[request.request_id]

    def remove(self, request_id: str) -> Request | None:
        """Take a request out, wherever it stands. None when it does not wait."""
        request = self._requests.pop(request_id, None)
        if len(self._heap) > 2 * len(self._requests) + 16:
            self._heap = [(one.order, next(self._entries), one) for one in self._requests.values()]
            heapq.heapify(self._heap)
        return request

    def _oldest(self) -> Request | None:
        return next(iter(self._requests.values()), None)
