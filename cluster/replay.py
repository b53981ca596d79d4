"""What a lost replica had, continued elsewhere. Pure: told of sends, outputs, losses and the time.

Called by: DpClient, in each front end. It stands between the engine cores and everything in the front end that
makes text of tokens, so a loss is invisible above it: the stop-string window, half characters and the client's
stream simply wait. A request continues from its prompt and all tokens received so far, with the same seed, by the
path by which a preempted request is resumed; see `EngineCoreRequest.attempt`.

A replica that is stopped aborts what it has. Unless the whole cluster stops, that is a loss like any other, of which
the supervisor is about to tell. A request that comes while no replica serves waits as a lost one does.

Who is to blame for a loss, and is not sent again: suspects.py.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import msgspec

from ..engine.deadlines import DeadlineHeap
from ..engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, StepOutputs
from .front_end_board import FrontEndBoard
from .suspects import Suspects, TrackedRequest, fingerprint

_POISONOUS = "two replicas in a row were lost as soon as they began it"
_NONE_IN_TIME = "no replica became ready in time"


@dataclass(slots=True, eq=False)
class _Entry(TrackedRequest):
    """One request that has not finished. `dp_rank` None: parked since `parked_at`."""

    attempt: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    parked_at: float = 0.0
    has_told_cached_tokens: bool = False
    is_aborted: bool = False
    """The replica that has it is stopping, and computes it no more."""

    @classmethod
    def of(cls, request: EngineCoreRequest, dp_rank: int | None) -> "_Entry":
        """Make the entry of a request that is new here."""
        return cls(request, dp_rank, attempt=request.attempt, output_token_ids=list(request.output_token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStats:
    """Counters since the start of this front end."""

    num_replayed: int
    num_expired: int
    num_blamed: int
    num_stale_outputs: int
    num_parked: int


class ReplayLog:
    """All unfinished requests of one front end. Owner: its event loop.

    wait_s: how long a request may be parked, waiting for a replica, before it ends with an error
    board:  what front ends tell each other; None: there is one
    """

    def __init__(self, *, wait_s: float, board: FrontEndBoard | None = None) -> None:
        self._wait_s = wait_s
        self._suspects = Suspects(board or FrontEndBoard.alone())
        self._entries: dict[str, _Entry] = {}
        self._parked: dict[str, _Entry] = {}
        # With the attempt of which it is the end: one that went on may be parked again.
        self._expiries: DeadlineHeap[tuple[_Entry, int]] = DeadlineHeap(self._is_over)
        self._is_stopping = False
        self._num_replayed = 0
        self._num_expired = 0
        self._num_stale = 0

    def joined(self, dp_rank: int, epoch: int) -> None:
        """A replica serves, for the first time in this life."""
        self._suspects.joined(dp_rank, epoch)

    def admit(self, request: EngineCoreRequest, dp_rank: int) -> None:
        """Note that a new request goes to a replica."""
        entry = self._entries[request.request_id] = _Entry.of(request, dp_rank)
        self._suspects.sent(entry)

    def wait(self, request: EngineCoreRequest, now: float) -> None:
        """Note a new request that waits for a replica, for none serves."""
        entry = self._entries[request.request_id] = _Entry.of(request, None)
        self._park(entry, now)

    def stop(self) -> list[EngineCoreOutput]:
        """The cluster stops: from now on what a replica aborts has ended. Returns the ends of all that wait."""
        self._is_stopping = True
        waiting = [entry for entry in self._entries.values() if entry.dp_rank is None or entry.is_aborted]
        return [self._end(entry, FinishReason.ABORT) for entry in waiting]

    def is_blamed(self, request: EngineCoreRequest) -> bool:
        """True when an equal request has killed replicas before."""
        return self._suspects.is_blamed(request)

    def take_blamed(self) -> list[bytes]:
        """Return the fingerprints of requests that were blamed here since the last call."""
        return self._suspects.take_blamed()

    def learn(self, fingerprints: Iterable[bytes]) -> list[EngineCoreOutput]:
        """Take what others have blamed. Returns the errors of equal requests that wait for a replica here."""
        known = set(fingerprints)
        self._suspects.learn(known)
        return self._end_equals(known)

    def accept(self, outputs: StepOutputs) -> StepOutputs:
        """Take what an engine core sent; return what is news. Outputs of an older attempt are dropped."""
        news = StepOutputs()
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            entry = self._entries.get(request_id)
            if entry is None or entry.attempt != 0 or entry.dp_rank is None:
                self._num_stale += 1
                continue
            entry.output_token_ids.append(token_id)
            if not entry.made_progress:
                self._suspects.progressed(entry)
            news.request_ids.append(request_id)
            news.token_ids.append(token_id)
        for output in outputs.others:
            entry = self._entries.get(output.request_id)
            if entry is None or output.attempt != entry.attempt or entry.dp_rank is None:
                self._num_stale += 1
                continue
            if output.finish_reason is FinishReason.ABORT and not self._is_stopping:
                entry.is_aborted = True
                continue
            if output.new_token_ids:
                entry.output_token_ids += output.new_token_ids
                self._suspects.progressed(entry)
            if entry.has_told_cached_tokens and output.num_cached_tokens:
                # Those of the first admission are what the client is told; a replay's hits are ours.
                output = msgspec.structs.replace(output, num_cached_tokens=0)
            entry.has_told_cached_tokens = True
            if output.attempt != entry.request.attempt:
                # Above this class there was only ever one attempt.
                output = msgspec.structs.replace(output, attempt=entry.request.attempt)
            if output.finish_reason is not None:
                self._suspects.finished(entry)
                del self._entries[output.request_id]
            news.others.append(output)
        return news

    def move_away(self, dp_rank: int, now: float) -> list[str]:
        """A replica that lives shall have no requests: park them, and return their ids. Nobody is suspected of it."""
        moved = [entry for entry in self._entries.values() if entry.dp_rank == dp_rank]
        for entry in moved:
            self._suspects.withdrawn(entry)
            self._park_again(entry, now)
        return [entry.request.request_id for entry in moved]

    def lose(self, dp_rank: int, now: float) -> list[EngineCoreOutput]:
        """A replica is gone: park its requests, and return the errors of those that end with it."""
        lost = [entry for entry in self._entries.values() if entry.dp_rank == dp_rank]
        for entry in lost:
            self._park_again(entry, now)
        guilty = self._suspects.judge(dp_rank, lost)
        if guilty is None:
            return []
        # The one that did it ends before those that only ask the same.
        return [self._end_poisonous(guilty), *self._end_equals({fingerprint(guilty.request)})]

    @property
    def on_trial(self) -> int | None:
        """The replica where a suspect is tried: others should go elsewhere. None: there is none."""
        return self._suspects.on_trial

    @property
    def awaits_trial_elsewhere(self) -> bool:
        """True when the last `replayable` held a suspect back because another front end tries one of its own."""
        return self._suspects.awaits_trial_elsewhere

    def replayable(self) -> list[EngineCoreRequest]:
        """Return the parked requests that may be sent now, as they must be sent; `replayed` says they were."""
        return [
            msgspec.structs.replace(
                entry.request, attempt=entry.attempt, output_token_ids=list(entry.output_token_ids)
            )
            for entry in self._suspects.choose(self._parked.values())
        ]

    def replayed(self, request_id: str, dp_rank: int) -> None:
        """Note that a parked request went to a replica."""
        entry = self._parked.pop(request_id)
        entry.dp_rank = dp_rank
        if entry.attempt > entry.request.attempt:
            self._num_replayed += 1
        self._suspects.sent(entry)

    def expire(self, now: float) -> list[EngineCoreOutput]:
        """Return the errors of the requests that have been parked for too long, or whose own time is up."""
        ended = []
        for entry, _ in self._expiries.pop_due(now):
            if now >= entry.parked_at + self._wait_s:
                self._num_expired += 1
                ended.append(self._end(entry, FinishReason.ERROR, _why_late(entry)))
            else:
                ended.append(self._end(entry, FinishReason.TIMEOUT))
        return ended

    def next_expiry_at(self) -> float | None:
        """When `expire` will next find something; None while nothing is parked."""
        return self._expiries.next_at

    def forget(self, request_id: str) -> int | None:
        """Drop a request whose client left. Returns the replica that computes it, None when there is none."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        self._remove(entry)
        return entry.dp_rank

    @property
    def num_parked(self) -> int:
        """Requests that wait for a replica."""
        return len(self._parked)

    def num_unfinished(self, dp_rank: int) -> int:
        """Requests of this front end that a replica computes."""
        return sum(entry.dp_rank == dp_rank for entry in self._entries.values())

    def stats(self) -> ReplayStats:
        """Return the counters."""
        return ReplayStats(
            num_replayed=self._num_replayed,
            num_expired=self._num_expired,
            num_blamed=self._suspects.num_blamed,
            num_stale_outputs=self._num_stale,
            num_parked=len(self._parked),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when parked and unfinished requests disagree."""
        assert self._parked == {name: entry for name, entry in self._entries.items() if entry.dp_rank is None}
        self._suspects.check_invariants(self._entries.values())

    def _park_again(self, entry: _Entry, now: float) -> None:
        """Have a request that was at a replica wait for one."""
        entry.dp_rank = None
        entry.attempt += 1
        entry.is_aborted = False
        self._park(entry, now)

    def _park(self, entry: _Entry, now: float) -> None:
        entry.parked_at = now
        self._parked[entry.request.request_id] = entry
        expires_at, deadline_at = now + self._wait_s, entry.request.deadline_at
        self._expiries.add(
            expires_at if deadline_at is None else min(expires_at, deadline_at), (entry, entry.attempt)
        )

    def _is_over(self, parked: tuple[_Entry, int]) -> bool:
        """Say whether a request that was parked in this attempt is so no more."""
        entry, attempt = parked
        return self._parked.get(entry.request.request_id) is not entry or entry.attempt != attempt

    def _end_equals(self, fingerprints: Container[bytes]) -> list[EngineCoreOutput]:
        """End the parked requests that are blamed, or equal to one that is."""
        equals = [entry for entry in self._parked.values() if fingerprint(entry.request) in fingerprints]
        return [self._end_poisonous(entry) for entry in equals]

    def _end_poisonous(self, entry: TrackedRequest) -> EngineCoreOutput:
        return self._end(entry, FinishReason.ERROR, _POISONOUS, is_poisonous=True)

    def _end(
        self, entry: TrackedRequest, finish_reason: FinishReason, why: str = "", *, is_poisonous: bool = False
    ) -> EngineCoreOutput:
        self._remove(entry)
        return EngineCoreOutput(
            request_id=entry.request.request_id,
            attempt=entry.request.attempt,
            finish_reason=finish_reason,
            error=why or None,
            is_poisonous=is_poisonous,
        )

    def _remove(self, entry: TrackedRequest) -> None:
        self._suspects.withdrawn(entry)
        self._parked.pop(entry.request.request_id, None)
        del self._entries[entry.request.request_id]


def _why_late(entry: _Entry) -> str:
    was_sent = entry.attempt > entry.request.attempt
    return "its replica was lost, and no other became ready in time" if was_sent else _NONE_IN_TIME
