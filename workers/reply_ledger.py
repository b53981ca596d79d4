"""ReplyLedger: which answers are awaited, and which have come. Pure.

Called by: MultiprocExecutor, for every frame from a worker's ring of replies; one thread.
Invariant: an answer is taken only by the call it belongs to: same epoch, same call id, an awaited rank. All others
are dropped and counted: answers to calls that were given up, or of another life of the replica.
"""

from dataclasses import dataclass, field

from ..shm.codec import FrameHeader
from .calls import Reply, WorkerFailure


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """One call under way. Owner: the ledger, until it is complete or forgotten.

    awaited:     tp_ranks whose answer has not come
    deadline_at: instant of time.monotonic() at which its workers count as hung
    failure:     a hook failed on a rank
    """

    call_id: int
    awaited: set[int]
    deadline_at: float
    replies: dict[int, Reply] = field(default_factory=dict)
    failure: WorkerFailure | None = None

    @property
    def is_done(self) -> bool:
        """True when there is nothing more to wait for."""
        return not self.awaited or self.failure is not None


class ReplyLedger:
    """The calls under way of one executor.

    fatal:       failures that end the replica, as they came
    num_dropped: answers that nobody awaited
    """

    def __init__(self, epoch: int) -> None:
        self.fatal: list[WorkerFailure] = []
        self.num_dropped = 0
        self._epoch = epoch
        self._calls: dict[int, PendingCall] = {}

    @property
    def num_pending(self) -> int:
        """Calls under way."""
        return len(self._calls)

    def expect(self, call_id: int, ranks: set[int], deadline_at: float) -> PendingCall:
        """Await the answers of `ranks` to a new call."""
        assert call_id not in self._calls
        call = PendingCall(call_id=call_id, awaited=ranks, deadline_at=deadline_at)
        self._calls[call_id] = call
        return call

    def forget(self, call: PendingCall) -> None:
        """Give the call up: answers that still come are dropped."""
        self._calls.pop(call.call_id, None)

    def accept(self, header: FrameHeader, message: Reply | WorkerFailure) -> None:
        """Give an answer to the call it belongs to."""
        if header.epoch != self._epoch:
            self.num_dropped += 1
            return
        if isinstance(message, WorkerFailure) and message.is_fatal:
            # Whoever waits for what: the replica ends, so this concerns every call.
            self.fatal.append(message)
            return
        call = self._calls.get(header.call_id)
        if call is None or header.rank not in call.awaited:
            self.num_dropped += 1
            return
        if isinstance(message, WorkerFailure):
            call.failure = message
        else:
            call.replies[header.rank] = message
            call.awaited.discard(header.rank)
        if call.is_done:
            del self._calls[header.call_id]
