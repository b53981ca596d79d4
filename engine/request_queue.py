"""The waiting queue: first come, first served, with removal from the middle.

Called by: Scheduler. Lives in the engine-core process only.
Cost: every operation is O(1); an ordered dictionary is a linked list with an index.
"""

from collections import OrderedDict
from collections.abc import Iterator

from .request import Request


class RequestQueue:
    """Requests that wait for admission, in order. Owner: the scheduler."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def append(self, request: Request) -> None:
        """Put a new request at the end."""
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request

    def prepend(self, request: Request) -> None:
        """Put a preempted request at the front: it was admitted before all that wait."""
        self.append(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request | None:
        """Return the request that is next, and leave it there."""
        return next(iter(self._requests.values()), None)

    def pop(self) -> Request:
        """Take the request that is next. The queue must not be empty."""
        return self._requests.popitem(last=False)[1]

    def remove(self, request_id: str) -> Request | None:
        """Take a request out, wherever it stands. None when it does not wait."""
        return self._requests.pop(request_id, None)
