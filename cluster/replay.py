"""What a lost replica had, continued elsewhere. Pure: told of sends, outputs, losses and the time.

Called by: DpClient, in each front end. It stands between the engine cores and everything in the front end that
makes text of tokens, so a loss is invisible above it: the stop-string window, half characters and the client's
stream simply wait. A request continues from its prompt and all tokens received so far, with the same seed, by the
path by which a preempted request is resumed; see `EngineCoreRequest.attempt`.

A replica that is stopped aborts what it has. Unless the whole cluster stops, that is a loss like any other, of which
the supervisor is about to tell. A request that comes while no replica serves waits as a lost one does.

Who is to blame. A request whose own contents kill a replica must not kill them all. A request that was lost before
it made any token in this attempt is a suspect. One that is a suspect twice in a row, and the second time the only one,
is blamed: it ends with an error, its equals that were lost with it do too, and its fingerprint is remembered. When
there are several, each is tried alone: the first that makes a token again is cleared, and the one with which another
replica dies is blamed. No new request should be sent where one is on trial (`on_trial`); where that cannot be helped
the trial is repeated, a few times. Requests that make progress are never suspects, however often their replicas are
killed. With several front ends each sees its own requests only. So each says on the board (front_end_board.py) what it
had on a replica that had made no token, and whether it holds a trial: nobody is alone where another's request was, and
one trial is held at a time. Who was blamed by one is told to all (`take_blamed`, `learn`).
"""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from ..engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, StepOutputs
from .front_end_board import FrontEndBoard

MAX_FINGERPRINTS = 1024
"""Blamed requests that are remembered, the newest ones."""
_SUSPECT_LIMIT = 2
_POISONOUS = "two replicas in a row were lost as soon as they began it"
_NONE_IN_TIME = "no replica became ready in time"
_MAX_TRIALS = 3
"""Replicas that may be lost with a request on trial, and with others that had just come there."""


@dataclass(slots=True)
class _Entry:
    """One request that has not finished. dp_rank: who computes it; None: parked since `parked_at`."""

    request: EngineCoreRequest
    dp_rank: int | None
    attempt: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    made_progress: bool = False
    num_suspicions: int = 0
    num_trials: int = 0
    parked_at: float = 0.0
    has_told_cached_tokens: bool = False
    is_aborted: bool = False
    """The replica that has it is stopping, and computes it no more."""


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
        self._board = board or FrontEndBoard.alone()
        self._epochs: dict[int, int] = {}
        # By replica: requests that have made no token there, those that were dropped meanwhile included.
        self._num_unclear: Counter[int] = Counter()
        self._entries: dict[str, _Entry] = {}
        self._parked: dict[str, None] = {}
        self._trial_id: str | None = None
        self._awaits_trial_elsewhere = False
        self._is_stopping = False
        # Replicas where a request without a token was dropped: it may be what the next loss is due to.
        self._unclear_ranks: set[int] = set()
        self._blamed: OrderedDict[bytes, None] = OrderedDict()
        self._newly_blamed: list[bytes] = []
        self._num_replayed = 0
        self._num_expired = 0
        self._num_blamed = 0
        self._num_stale = 0

    def joined(self, dp_rank: int, epoch: int) -> None:
        """A replica serves, for the first time in this life."""
        self._epochs[dp_rank] = epoch
        self._set_unclear(dp_rank, 0)

    def admit(self, request: EngineCoreRequest, dp_rank: int) -> None:
        """Note that a new request goes to a replica."""
        self._entries[request.request_id] = _Entry(
            request, dp_rank, request.attempt, list(request.output_token_ids)
        )
        self._set_unclear(dp_rank, self._num_unclear[dp_rank] + 1)

    def wait(self, request: EngineCoreRequest, now: float) -> None:
        """Note a new request that waits for a replica, for none serves."""
        name = request.request_id
        self._entries[name] = _Entry(
            request, None, request.attempt, list(request.output_token_ids), parked_at=now
        )
        self._parked[name] = None

    def stop(self) -> list[EngineCoreOutput]:
        """The cluster stops: from now on what a replica aborts has ended. Returns the ends of all that wait."""
        self._is_stopping = True
        waiting = [name for name, entry in self._entries.items() if entry.dp_rank is None or entry.is_aborted]
        return [self._end(name, FinishReason.ABORT) for name in waiting]

    def is_blamed(self, request: EngineCoreRequest) -> bool:
        """True when an equal request has killed replicas before."""
        return bool(self._blamed) and _fingerprint(request) in self._blamed

    def take_blamed(self) -> list[bytes]:
        """Return the fingerprints of requests that were blamed here since the last call."""
        blamed, self._newly_blamed = self._newly_blamed, []
        return blamed

    def learn(self, fingerprints: Iterable[bytes]) -> list[EngineCoreOutput]:
        """Take what others have blamed. Returns the errors of equal requests that wait for a replica here."""
        known = set(fingerprints)
        self._blamed.update(dict.fromkeys(known))
        while len(self._blamed) > MAX_FINGERPRINTS:
            self._blamed.popitem(last=False)
        equals = [name for name in self._parked if _fingerprint(self._entries[name].request) in known]
        return [self._end(name, FinishReason.ERROR, _POISONOUS, is_poisonous=True) for name in equals]

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
                self._clear(request_id, entry)
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
                self._clear(output.request_id, entry)
            if entry.has_told_cached_tokens and output.num_cached_tokens:
                # Those of the first admission are what the client is told; a replay's hits are ours.
                output = msgspec.structs.replace(output, num_cached_tokens=0)
            entry.has_told_cached_tokens = True
            if output.attempt != entry.request.attempt:
                # Above this class there was only ever one attempt.
                output = msgspec.structs.replace(output, attempt=entry.request.attempt)
            if output.finish_reason is not None:
                if not entry.made_progress:
                    self._set_unclear(entry.dp_rank, self._num_unclear[entry.dp_rank] - 1)
                self._remove(output.request_id)
            news.others.append(output)
        return news

    def move_away(self, dp_rank: int, now: float) -> list[str]:
        """A replica that lives shall have no requests: park them, and return their ids. Nobody is suspected of it."""
        moved = [name for name, entry in self._entries.items() if entry.dp_rank == dp_rank]
        for name in moved:
            self._park(name, now)
            if not self._entries[name].made_progress:
                self._unclear_ranks.add(dp_rank)
            if self._trial_id == name:
                self._set_trial(None)
        return moved

    def lose(self, dp_rank: int, now: float) -> list[EngineCoreOutput]:
        """A replica is gone: park its requests, and return the errors of those that end with it."""
        lost = {name: entry for name, entry in self._entries.items() if entry.dp_rank == dp_rank}
        suspects = []
        for name, entry in lost.items():
            self._park(name, now)
            if entry.made_progress:
                entry.num_suspicions = 0
            else:
                entry.num_suspicions += 1
                suspects.append(name)
            entry.made_progress = False
        is_unclear = dp_rank in self._unclear_ranks or self._board.is_unclear_elsewhere(
            dp_rank, self._epochs.get(dp_rank, 0)
        )
        is_alone = len(suspects) == 1 and not is_unclear
        self._unclear_ranks.discard(dp_rank)
        convict_id = None
        if self._trial_id in lost:
            convict_id = self._trial_id
            self._set_trial(None)
        elif len(suspects) == 1:
            convict_id = suspects[0]
        if convict_id is not None and self._is_guilty(convict_id, is_alone=is_alone):
            return self._blame(convict_id)
        if any(self._entries[name].num_suspicions >= _SUSPECT_LIMIT for name in suspects):
            # One of them did it, perhaps one that was never suspected before.
            for name in suspects:
                entry = self._entries[name]
                entry.num_suspicions = max(entry.num_suspicions, _SUSPECT_LIMIT)
        return []

    @property
    def on_trial(self) -> int | None:
        """The replica where a suspect is tried: others should go elsewhere. None: there is none."""
        return self._entries[self._trial_id].dp_rank if self._trial_id is not None else None

    @property
    def awaits_trial_elsewhere(self) -> bool:
        """True when the last `replayable` held a suspect back because another front end tries one of its own."""
        return self._awaits_trial_elsewhere

    def replayable(self) -> list[EngineCoreRequest]:
        """Return the parked requests that may be sent now, as they must be sent; `replayed` says they were."""
        ready = []
        self._awaits_trial_elsewhere = False
        for name in self._parked:
            entry = self._entries[name]
            if entry.num_suspicions >= _SUSPECT_LIMIT:
                if self._trial_id not in (None, name):
                    continue
                if self._trial_id is None and not self._open_trial(name):
                    self._awaits_trial_elsewhere = True
                    continue
            ready.append(
                msgspec.structs.replace(
                    entry.request, attempt=entry.attempt, output_token_ids=list(entry.output_token_ids)
                )
            )
        return ready

    def replayed(self, request_id: str, dp_rank: int) -> None:
        """Note that a parked request went to a replica."""
        del self._parked[request_id]
        entry = self._entries[request_id]
        entry.dp_rank = dp_rank
        if entry.attempt > entry.request.attempt:
            self._num_replayed += 1
        if not entry.made_progress:
            self._set_unclear(dp_rank, self._num_unclear[dp_rank] + 1)
        if self._trial_id == request_id:
            self._board.set_trial(dp_rank)

    def expire(self, now: float) -> list[EngineCoreOutput]:
        """Return the errors of the requests that have been parked for too long, or whose own time is up."""
        late = [name for name in self._parked if now >= self._entries[name].parked_at + self._wait_s]
        self._num_expired += len(late)
        ended = [self._end(name, FinishReason.ERROR, self._why_late(name)) for name in late]
        overdue = [name for name in self._parked if now >= _deadline_at(self._entries[name])]
        return ended + [self._end(name, FinishReason.TIMEOUT) for name in overdue]

    def next_expiry_at(self) -> float | None:
        """When `expire` will next find something; None while nothing is parked."""
        parked = (self._entries[name] for name in self._parked)
        return min((min(one.parked_at + self._wait_s, _deadline_at(one)) for one in parked), default=None)

    def forget(self, request_id: str) -> int | None:
        """Drop a request whose client left. Returns the replica that computes it, None when there is none."""
        entry = self._remove(request_id)
        if entry is None or entry.dp_rank is None:
            return None
        if not entry.made_progress:
            self._unclear_ranks.add(entry.dp_rank)
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
            num_blamed=self._num_blamed,
            num_stale_outputs=self._num_stale,
            num_parked=len(self._parked),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when parked and unfinished requests disagree."""
        assert set(self._parked) == {name for name, entry in self._entries.items() if entry.dp_rank is None}
        assert self._trial_id is None or self._trial_id in self._entries

    def _remove(self, request_id: str) -> _Entry | None:
        self._parked.pop(request_id, None)
        if self._trial_id == request_id:
            self._set_trial(None)
        return self._entries.pop(request_id, None)

    def _park(self, request_id: str, now: float) -> None:
        entry = self._entries[request_id]
        entry.dp_rank = None
        entry.attempt += 1
        entry.is_aborted = False
        entry.parked_at = now
        self._parked[request_id] = None

    def _clear(self, request_id: str, entry: _Entry) -> None:
        if entry.made_progress:
            return
        entry.made_progress = True
        entry.num_suspicions = entry.num_trials = 0
        if entry.dp_rank is not None:
            self._set_unclear(entry.dp_rank, self._num_unclear[entry.dp_rank] - 1)
        if self._trial_id == request_id:
            self._set_trial(None)

    def _set_unclear(self, dp_rank: int, num_requests: int) -> None:
        self._num_unclear[dp_rank] = num_requests
        self._board.set_unclear(dp_rank, self._epochs.get(dp_rank, 0), num_requests)

    def _set_trial(self, request_id: str | None) -> None:
        """Try this suspect, on a replica that is yet to be chosen; None: the trial is over."""
        self._trial_id = request_id
        self._board.set_trial(None if request_id is None else -1)

    def _open_trial(self, request_id: str) -> bool:
        """Begin the trial of a suspect, unless another front end holds one."""
        if self._board.is_trial_elsewhere():
            return False
        self._set_trial(request_id)
        if self._board.is_trial_elsewhere(is_ours_on=True):
            # Both have begun in the same moment.
            self._set_trial(None)
            return False
        return True

    def _is_guilty(self, request_id: str, *, is_alone: bool) -> bool:
        """Judge a suspect whose replica was lost. is_alone: it was the only suspect there."""
        entry = self._entries[request_id]
        if entry.num_suspicions < _SUSPECT_LIMIT:
            return False
        entry.num_trials += 1
        return is_alone or entry.num_trials >= _MAX_TRIALS

    def _blame(self, request_id: str) -> list[EngineCoreOutput]:
        """Remember a request, and end it with all that are lost and equal to it."""
        self._num_blamed += 1
        fingerprint = _fingerprint(self._entries[request_id].request)
        self._newly_blamed.append(fingerprint)
        outputs = [self._end(request_id, FinishReason.ERROR, _POISONOUS, is_poisonous=True)]
        return outputs + self.learn([fingerprint])

    def _why_late(self, request_id: str) -> str:
        entry = self._entries[request_id]
        was_sent = entry.attempt > entry.request.attempt
        return "its replica was lost, and no other became ready in time" if was_sent else _NONE_IN_TIME

    def _end(
        self, request_id: str, finish_reason: FinishReason, why: str = "", *, is_poisonous: bool = False
    ) -> EngineCoreOutput:
        entry = self._entries[request_id]
        self._remove(request_id)
        return EngineCoreOutput(
            request_id=request_id,
            attempt=entry.request.attempt,
            finish_reason=finish_reason,
            error=why or None,
            is_poisonous=is_poisonous,
        )


def _deadline_at(entry: _Entry) -> float:
    """When its client wants an end of it, by the clock of all."""
    deadline_at = entry.request.deadline_at
    return math.inf if deadline_at is None else deadline_at


def _fingerprint(request: EngineCoreRequest) -> bytes:
    """Equal for requests that ask the same: prompt and parameters; the seed is drawn anew each time."""
    parts = (request.prompt_token_ids, request.sampling_params)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()
