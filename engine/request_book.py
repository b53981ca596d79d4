"""RequestBook: which request stands where, and every way from one state to another. Pure.

Called by: Scheduler. Lives in the engine-core process only.

    add -> BLOCKED -> WAITING -> RUNNING -> FINISHED     unblock, admit, finish
                         ^          |
                         +-PREEMPTED+                    preempt_last: blocks taken, tokens kept; admitted again
                                                         before younger ones

Invariants: a request is waiting or running, never both; running ones are sorted by their order; only they hold
blocks, here and on the workers.
"""

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from .deadlines import DeadlineHeap
from .kv_cache_manager import KVCacheManager
from .request import Request, RequestStatus
from .request_queue import RequestQueue

_ORDER = attrgetter("order")


class RequestBook:
    """All unfinished requests of one replica. Owner: the scheduler.

    waiting, running: to be read, and changed by the methods here only
    num_blocked:      waiting requests that cannot be admitted before something outside has happened
    """

    def __init__(self, kv_cache_manager: KVCacheManager, *, max_overtakes: int) -> None:
        self.waiting = RequestQueue(max_overtakes=max_overtakes)
        self.running: list[Request] = []
        self.num_blocked = 0
        self._kv = kv_cache_manager
        self._requests: dict[str, Request] = {}
        # The first admitted request of each group, as long as it runs.
        self._leaders: dict[str, Request] = {}
        self._deadlines = DeadlineHeap[Request](lambda request: request.status is RequestStatus.FINISHED)
        # What the workers hold and must drop: told with the next step.
        self._removed_request_ids: list[str] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, request_id: str) -> Request | None:
        """Look up an unfinished request."""
        return self._requests.get(request_id)

    @property
    def next_deadline_at(self) -> float | None:
        """The next deadline."""
        return self._deadlines.next_at

    def pop_expired(self, now: float) -> list[Request]:
        """Name the unfinished requests whose deadline has passed, each once. The caller finishes them."""
        return self._deadlines.pop_due(now)

    def add(self, request: Request) -> None:
        """Let a new request wait; one with a grammar is blocked until it has it."""
        if request.core_request.sampling_params.structured_outputs is not None:
            request.status = RequestStatus.BLOCKED
            self.num_blocked += 1
        self._requests[request.request_id] = request
        self.waiting.append(request)
        if request.core_request.deadline_at is not None:
            self._deadlines.add(request.core_request.deadline_at, request)

    def unblock(self, request: Request) -> None:
        """Let a blocked request be admitted like any other."""
        assert request.status is RequestStatus.BLOCKED
        request.status = RequestStatus.WAITING
        self.num_blocked -= 1

    def admit(self, request: Request) -> None:
        """Let the request run that `waiting.peek` returned. The caller gives it blocks."""
        self.waiting.admit(request)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_ORDER)
        if request.group_id is not None:
            self._leaders.setdefault(request.group_id, request)

    def preempt_last(self) -> Request:
        """Take the blocks of the last running request; its tokens stay, those on their way too."""
        request = self.running.pop()
        self._release(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.waiting.put_back(request)
        return request

    def finish(self, request: Request) -> None:
        """Forget a request, wherever it stands."""
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request.request_id)
            self.num_blocked -= request.status is RequestStatus.BLOCKED
        request.status = RequestStatus.FINISHED

    def take_removed_request_ids(self) -> list[str]:
        """Name the requests that the workers must drop before the next step, each once."""
        removed, self._removed_request_ids = self._removed_request_ids, []
        return removed

    def can_be_admitted(self, request: Request) -> bool:
        """Say whether nothing but room keeps a waiting request from running."""
        if request.status is RequestStatus.BLOCKED or request.num_placeholders:
            # A token on its way would be missing among those that the workers are told.
            return False
        leader = self._leaders.get(request.group_id) if request.group_id is not None else None
        # Siblings share the leader's blocks, which are there once its prompt is computed.
        return leader is None or not self._kv.shares_prefixes or leader.num_prefill_tokens == 0

    def check_invariants(self) -> None:
        """Raise AssertionError when the books are wrong. For tests and debugging."""
        running_ids = [request.request_id for request in self.running]
        waiting_ids = [request.request_id for request in self.waiting]
        assert sorted(running_ids + waiting_ids) == sorted(self._requests)
        assert self.running == sorted(self.running, key=_ORDER)
        assert all(leader.status is RequestStatus.RUNNING for leader in self._leaders.values())
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
            assert 0 < request.num_computed_tokens <= request.num_tokens + request.num_placeholders
            assert request.num_computed_tokens <= request.num_slots
            assert self._kv.num_slots(request.request_id) == request.num_slots
        blocked = [request for request in self.waiting if request.status is RequestStatus.BLOCKED]
        assert len(blocked) == self.num_blocked
        for request in self.waiting:
            assert request.status in (RequestStatus.BLOCKED, RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.num_computed_tokens == 0

    def _release(self, request: Request) -> None:
        """Give back what a running request holds, here and on the workers."""
        self._kv.free(request)
        self._removed_request_ids.append(request.request_id)
        if request.group_id is not None and self._leaders.get(request.group_id) is request:
            del self._leaders[request.group_id]
