"""ReplyLedger: which answers are awaited, and which have come. Pure.

Called by: MultiprocExecutor, for every frame from a worker's ring of replies; one thread.
Invariant: an answer is taken only by the call it belongs to: same epoch, same call id, an awaited rank. All others
are dropped and counted: answers to calls that were given up, or of another life of the replica.
"""

from collections import Counter
from dataclasses import dataclass, field

from ..shm.codec import FrameHeader
from .calls import Reply, WorkerFailure


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """One call under way. Owner: the ledger, until it is complete or forgotten.

    awaited:      tp_ranks whose answer has not come
    deadline_at:  instant of time.monotonic() at which its workers count as hung
    budget_s:     they have at least so long from the latest answer to any call on: a call that stands in line
                  behind others does not pay for them. 0.0: deadline_at is firm
    is_cancelled: nobody wants the answers any more
    """

    call_id: int
    awaited: set[int]
    deadline_at: float
    budget_s: float = 0.0
    answers: dict[int, Reply | WorkerFailure] = field(default_factory=dict)
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        """True when there is nothing more to wait for."""
        return not self.awaited or self.is_cancelled


class ReplyLedger:
    """The calls under way of one executor.

    num_dropped: answers that nobody awaited
    """

    def __init__(self, epoch: int) -> None:
        self.num_dropped = 0
        self._epoch = epoch
        self._calls: dict[int, PendingCall] = {}
        self._num_owed: Counter[int] = Counter()

    @property
    def num_pending(self) -> int:
        """Calls under way whose answers are awaited."""
        return len(self._calls)

    def owes(self, rank: int) -> bool:
        """True while a rank has an answer to give, be it to a call that was given up."""
        return self._num_owed[rank] > 0

    def expect(
        self, call_id: int, ranks: set[int], deadline_at: float, *, budget_s: float = 0.0
    ) -> PendingCall:
        """Await the answers of `ranks` to a new call; of none: it is done at once."""
        assert call_id not in self._calls
        call = PendingCall(call_id=call_id, awaited=ranks, deadline_at=deadline_at, budget_s=budget_s)
        if ranks:
            self._calls[call_id] = call
        for rank in ranks:
            self._num_owed[rank] += 1
        return call

    def cancel(self, call: PendingCall) -> None:
        """Give the call up: answers that still come are dropped. One that is done stays as it is."""
        if not call.is_done:
            call.is_cancelled = True
            del self._calls[call.call_id]

    def accept(self, header: FrameHeader, message: Reply | WorkerFailure) -> None:
        """Give an answer to the call it belongs to."""
        self._num_owed[header.rank] -= 1
        call = self._calls.get(header.call_id)
        if call is None or header.epoch != self._epoch or header.rank not in call.awaited:
            self.num_dropped += 1
            return
        call.answers[header.rank] = message
        call.awaited.discard(header.rank)
        if not call.awaited:
            del self._calls[header.call_id]
