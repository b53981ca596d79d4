"""Which request kills replicas. Pure: told of sends, first tokens, ends and losses.

Called by: ReplayLog, in each front end.

A request whose own contents kill a replica must not kill them all. A request that was lost before it made any token in
this attempt is a suspect. One that is a suspect twice in a row, and the second time the only one, is blamed: it ends
with an error, its equals that were lost with it do too, and its fingerprint is remembered. When there are several, each
is tried alone: the first that makes a token again is cleared, and the one with which another replica dies is blamed.
No new request should be sent where one is on trial (`on_trial`); where that cannot be helped the trial is repeated, a
few times. Requests that make progress are never suspects, however often their replicas are killed. With several front
ends each sees its own requests only. So each says on the board (front_end_board.py) what it had on a replica that had
made no token, and whether it holds a trial: nobody is alone where another's request was, and one trial is held at a
time. Who was blamed by one is told to all (`take_blamed`, `learn`).
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ..engine.messages import EngineCoreRequest
from .front_end_board import FrontEndBoard

MAX_FINGERPRINTS = 1024
"""Blamed requests that are remembered, the newest ones."""
_SUSPECT_LIMIT = 2
_MAX_TRIALS = 3
"""Replicas that may be lost with a request on trial, and with others that had just come there."""


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request that has not finished, and what speaks for it and against it.

    dp_rank:        who computes it; None: it waits for a replica
    made_progress:  it has made a token in this attempt
    num_suspicions: losses in a row before it had
    num_trials:     losses while it was tried
    """

    request: EngineCoreRequest
    dp_rank: int | None
    made_progress: bool = False
    num_suspicions: int = 0
    num_trials: int = 0


_Tracked = TypeVar("_Tracked", bound=TrackedRequest)


class Suspects:
    """Who may be to blame for lost replicas, and who is. Owner: ReplayLog. board: what front ends tell each other"""

    def __init__(self, board: FrontEndBoard) -> None:
        self._board = board
        self._epochs: dict[int, int] = {}
        # By replica: requests that have made no token there, those that were dropped meanwhile included.
        self._num_unclear: Counter[int] = Counter()
        # Replicas where a request without a token was dropped: it may be what the next loss is due to.
        self._unclear_ranks: set[int] = set()
        self._trial: TrackedRequest | None = None
        self._awaits_trial_elsewhere = False
        self._blamed: OrderedDict[bytes, None] = OrderedDict()
        self._newly_blamed: list[bytes] = []
        self.num_blamed = 0

    @property
    def on_trial(self) -> int | None:
        """The replica where a suspect is tried: others should go elsewhere. None: there is none."""
        return self._trial.dp_rank if self._trial is not None else None

    @property
    def awaits_trial_elsewhere(self) -> bool:
        """True when the last `choose` held a suspect back because another front end tries one of its own."""
        return self._awaits_trial_elsewhere

    def joined(self, dp_rank: int, epoch: int) -> None:
        """A replica serves, for the first time in this life."""
        self._epochs[dp_rank] = epoch
        self._set_unclear(dp_rank, 0)

    def choose(self, waiting: Iterable[_Tracked]) -> list[_Tracked]:
        """Return those that may be sent now. The first suspect among them is on trial, unless one already is."""
        self._awaits_trial_elsewhere = False
        return [request for request in waiting if self._may_be_sent(request)]

    def sent(self, request: TrackedRequest) -> None:
        """A request goes to a replica, its `dp_rank`."""
        assert request.dp_rank is not None
        if not request.made_progress:
            self._set_unclear(request.dp_rank, self._num_unclear[request.dp_rank] + 1)
        if self._trial is request:
            self._board.set_trial(request.dp_rank)

    def progressed(self, request: TrackedRequest) -> None:
        """A request has made a token where it is."""
        if request.made_progress:
            return
        request.made_progress = True
        request.num_suspicions = request.num_trials = 0
        if request.dp_rank is not None:
            self._set_unclear(request.dp_rank, self._num_unclear[request.dp_rank] - 1)
        self._end_trial(request)

    def finished(self, request: TrackedRequest) -> None:
        """The replica of a request has given its last output."""
        if not request.made_progress and request.dp_rank is not None:
            self._set_unclear(request.dp_rank, self._num_unclear[request.dp_rank] - 1)
        self._end_trial(request)

    def withdrawn(self, request: TrackedRequest) -> None:
        """A request shall not be computed where it is, or nowhere any more. Nobody is suspected of that."""
        if not request.made_progress and request.dp_rank is not None:
            self._unclear_ranks.add(request.dp_rank)
        self._end_trial(request)

    def judge(self, dp_rank: int, lost: Collection[TrackedRequest]) -> TrackedRequest | None:
        """A replica is gone, and all that it had is `lost`. Returns the one to blame, now remembered; None: nobody."""
        suspects = []
        for request in lost:
            if request.made_progress:
                request.num_suspicions = 0
            else:
                request.num_suspicions += 1
                suspects.append(request)
            request.made_progress = False
        is_unclear = dp_rank in self._unclear_ranks or self._board.is_unclear_elsewhere(
            dp_rank, self._epochs.get(dp_rank, 0)
        )
        is_alone = len(suspects) == 1 and not is_unclear
        self._unclear_ranks.discard(dp_rank)
        accused = None
        if self._trial is not None and self._trial in lost:
            accused = self._trial
            self._set_trial(None)
        elif len(suspects) == 1:
            accused = suspects[0]
        if accused is not None and self._is_guilty(accused, is_alone=is_alone):
            self._blame(accused)
            return accused
        if any(request.num_suspicions >= _SUSPECT_LIMIT for request in suspects):
            # One of them did it, perhaps one that was never suspected before.
            for request in suspects:
                request.num_suspicions = max(request.num_suspicions, _SUSPECT_LIMIT)
        return None

    def is_blamed(self, request: EngineCoreRequest) -> bool:
        """True when an equal request has killed replicas before."""
        return bool(self._blamed) and fingerprint(request) in self._blamed

    def take_blamed(self) -> list[bytes]:
        """Return the fingerprints of requests that were blamed here since the last call."""
        blamed, self._newly_blamed = self._newly_blamed, []
        return blamed

    def learn(self, fingerprints: Iterable[bytes]) -> None:
        """Remember what is blamed, here or by others."""
        self._blamed.update(dict.fromkeys(fingerprints))
        while len(self._blamed) > MAX_FINGERPRINTS:
            self._blamed.popitem(last=False)

    def check_invariants(self, unfinished: Collection[TrackedRequest]) -> None:
        """Raise AssertionError when one is tried that is not among the unfinished ones."""
        assert self._trial is None or self._trial in unfinished

    def _may_be_sent(self, request: TrackedRequest) -> bool:
        if request.num_suspicions < _SUSPECT_LIMIT or self._trial is request:
            return True
        if self._trial is not None:
            return False
        if not self._open_trial(request):
            self._awaits_trial_elsewhere = True
            return False
        return True

    def _open_trial(self, request: TrackedRequest) -> bool:
        """Begin the trial of a suspect, unless another front end holds one."""
        if self._board.is_trial_elsewhere():
            return False
        self._set_trial(request)
        if self._board.is_trial_elsewhere(is_ours_on=True):
            # Both have begun in the same moment.
            self._set_trial(None)
            return False
        return True

    def _end_trial(self, request: TrackedRequest) -> None:
        if self._trial is request:
            self._set_trial(None)

    def _set_trial(self, request: TrackedRequest | None) -> None:
        """Try this suspect, on a replica that is yet to be chosen; None: the trial is over."""
        self._trial = request
        self._board.set_trial(None if request is None else -1)

    def _set_unclear(self, dp_rank: int, num_requests: int) -> None:
        self._num_unclear[dp_rank] = num_requests
        self._board.set_unclear(dp_rank, self._epochs.get(dp_rank, 0), num_requests)

    def _is_guilty(self, request: TrackedRequest, *, is_alone: bool) -> bool:
        """Judge a suspect whose replica was lost. is_alone: it was the only suspect there."""
        if request.num_suspicions < _SUSPECT_LIMIT:
            return False
        request.num_trials += 1
        return is_alone or request.num_trials >= _MAX_TRIALS

    def _blame(self, request: TrackedRequest) -> None:
        self.num_blamed += 1
        blamed = fingerprint(request.request)
        self._newly_blamed.append(blamed)
        self.learn([blamed])


def fingerprint(request: EngineCoreRequest) -> bytes:
    """Equal for requests that ask the same: prompt and parameters; the seed is drawn anew each time."""
    parts = (request.prompt_token_ids, request.sampling_params)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()
