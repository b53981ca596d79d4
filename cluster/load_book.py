"""LoadBook: how busy each replica is now, from the last snapshot and what this front end itself has done since. Pure.

Called by: DpClient, in each front end. A snapshot is a little old, and front ends cannot see each other's choices.
But each report says which of our requests it counts (`AdmittedMark`), so our own are counted exactly once:

    now = reported                      everybody's requests, as the engine core counted them at `reported_at`
        + unacknowledged                ours with a number beyond the mark: sent, and not counted yet
        - settled                       ours that were counted, and whose first token or end came after `reported_at`

        + unreported elsewhere          the same of the other front ends, as they say on the board (front_end_board.py)

Nothing is guessed. The result is exact but for the progress of a prompt that is computed in chunks, and for the moment
in which front ends take a snapshot one after the other.

A replica of which no fresh report is known counts as busy as the mean of the others, or
as busy as our own requests make it if that is more: unknown is not idle.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..engine.messages import EngineStats
from .front_end_board import Unreported
from .load_table import FORGET_AFTER_S
from .step_cost import StepCostFit

_TYPICAL_OUTPUT_TOKENS = 256.0
"""Until requests have ended; then their mean."""
_OUTPUT_MEMORY = 0.98


@dataclass(slots=True)
class ReplicaLoad:
    """One replica as a balancer sees it. Owner: LoadBook.

    num_own:         unfinished requests of this front end
    num_requests:    waiting and running
    num_waiting:     not admitted to the running batch
    prefill_tokens:  still to be prefilled, prefix hits left out
    running_tokens:  in the KV cache for running requests
    kv_usage:        part of the KV blocks that running requests hold, as reported. [0, 1]
    headroom_tokens: room in the KV cache that is not promised to the prompts above; negative: they must wait
    reported_requests, reported_waiting: as the snapshot has them, whatever this front end knows better
    is_known:        a fresh report says so; otherwise it is inferred
    """

    dp_rank: int
    num_own: int = 0
    num_requests: float = 0.0
    num_waiting: float = 0.0
    prefill_tokens: float = 0.0
    running_tokens: float = 0.0
    kv_usage: float = 0.0
    headroom_tokens: float = float("inf")
    reported_requests: int = 0
    reported_waiting: int = 0
    is_known: bool = False


@dataclass(slots=True)
class _Choice:
    """One of our requests. has_token: its prompt is computed."""

    number: int
    dp_rank: int
    num_prompt_tokens: int
    num_prefill_tokens: int
    has_token: bool = False


@dataclass(slots=True)
class _Replica:
    """What is known of one replica. The sums are over `unacknowledged` and `settled`."""

    load: ReplicaLoad
    stats: EngineStats | None = None
    mark: int = 0
    unacknowledged: dict[int, _Choice] = field(default_factory=dict)
    unacked_prefill: int = 0
    unacked_tokens: int = 0
    # (when, prefill tokens, requests, tokens), the oldest first.
    settled: deque[tuple[float, int, int, int]] = field(default_factory=deque)
    settled_prefill: int = 0
    settled_requests: int = 0
    settled_tokens: int = 0


class LoadBook:
    """The load of all replicas. Owner: one front end's event loop.

    client_index, incarnation: of this front end
    """

    def __init__(self, *, client_index: int = 0, incarnation: int = 0) -> None:
        self._client = (client_index, incarnation)
        self._replicas: dict[int, _Replica] = {}
        self._choices: dict[str, _Choice] = {}
        self._next_number = 1
        self._fit = StepCostFit()
        self._output_tokens = _TYPICAL_OUTPUT_TOKENS
        # What `loads` returned last, for which replicas, and until when it holds: all are known until then.
        self._listed: tuple[list[int], list[ReplicaLoad], float] = ([], [], float("-inf"))

    @property
    def step_cost(self) -> StepCostFit:
        """What a step costs, as learnt so far: `.cost`."""
        return self._fit

    @property
    def mean_output_tokens(self) -> float:
        """Tokens that a request makes, as a fading mean over those that ended."""
        return self._output_tokens

    def unreported(self, dp_rank: int) -> Unreported:
        """What must be added to a replica's report for our requests. Nothing for one that is gone."""
        replica = self._replicas.get(dp_rank)
        if replica is None:
            return Unreported()
        return Unreported(
            prefill_tokens=replica.unacked_prefill - replica.settled_prefill,
            num_requests=len(replica.unacknowledged) - replica.settled_requests,
            num_tokens=replica.unacked_tokens - replica.settled_tokens,
        )

    def join(self, dp_rank: int) -> None:
        """A replica serves from now on; what was known of an earlier life is forgotten."""
        self._replicas[dp_rank] = _Replica(ReplicaLoad(dp_rank))
        self._listed = ([], [], float("-inf"))
        self._fit.forget(dp_rank)

    def leave(self, dp_rank: int) -> None:
        """A replica is gone, with all its requests."""
        self._replicas.pop(dp_rank, None)
        self._listed = ([], [], float("-inf"))
        self._fit.forget(dp_rank)
        for request_id in [name for name, choice in self._choices.items() if choice.dp_rank == dp_rank]:
            del self._choices[request_id]

    def add(self, request_id: str, dp_rank: int, *, num_prompt_tokens: int, num_prefill_tokens: int) -> int:
        """Note a choice. Returns its number, which the request carries: `EngineCoreRequest.number`."""
        number, self._next_number = self._next_number, self._next_number + 1
        choice = _Choice(number, dp_rank, num_prompt_tokens, num_prefill_tokens)
        self._choices[request_id] = choice
        replica = self._replicas[dp_rank]
        replica.load.num_own += 1
        replica.unacknowledged[number] = choice
        replica.unacked_prefill += num_prefill_tokens
        replica.unacked_tokens += num_prompt_tokens
        self._refresh(replica)
        return number

    def first_token(self, request_id: str, now: float) -> None:
        """A request of ours has its first token: its prompt is computed. Later ones, and unknown ids, are ignored."""
        choice = self._choices.get(request_id)
        if choice is None or choice.has_token:
            return
        choice.has_token = True
        replica = self._replicas[choice.dp_rank]
        if choice.number in replica.unacknowledged:
            replica.unacked_prefill -= choice.num_prefill_tokens
        else:
            self._settle(replica, now, choice.num_prefill_tokens, 0, 0)
        self._refresh(replica)

    def finish(self, request_id: str, now: float, *, num_output_tokens: int | None = None) -> None:
        """A request of ours is over; unknown ids are ignored. num_output_tokens: None when it was cut short."""
        choice = self._choices.pop(request_id, None)
        if choice is None:
            return
        if num_output_tokens is not None:
            self._output_tokens = (
                _OUTPUT_MEMORY * self._output_tokens + (1 - _OUTPUT_MEMORY) * num_output_tokens
            )
        replica = self._replicas[choice.dp_rank]
        replica.load.num_own -= 1
        num_prefill_tokens = 0 if choice.has_token else choice.num_prefill_tokens
        if replica.unacknowledged.pop(choice.number, None) is not None:
            replica.unacked_prefill -= num_prefill_tokens
            replica.unacked_tokens -= choice.num_prompt_tokens
        else:
            num_tokens = choice.num_prompt_tokens + (num_output_tokens or 0)
            self._settle(replica, now, num_prefill_tokens, 1, num_tokens)
        self._refresh(replica)

    def report(self, stats: EngineStats) -> None:
        """Take a replica's report. Of a replica that has not joined, or an older one: ignored."""
        replica = self._replicas.get(stats.dp_rank)
        if replica is None:
            return
        known = replica.stats
        if known is not None and (stats.epoch, stats.sequence) <= (known.epoch, known.sequence):
            return
        replica.stats = stats
        self._fit.observe(stats)
        for mark in stats.admitted:
            if (mark.client_index, mark.incarnation) == self._client:
                replica.mark = mark.number
        while replica.unacknowledged:
            number, choice = next(iter(replica.unacknowledged.items()))
            if number > replica.mark:
                break
            del replica.unacknowledged[number]
            replica.unacked_prefill -= 0 if choice.has_token else choice.num_prefill_tokens
            replica.unacked_tokens -= choice.num_prompt_tokens
        settled = replica.settled
        while settled and settled[0][0] <= stats.reported_at:
            _, prefill, requests, tokens = settled.popleft()
            replica.settled_prefill -= prefill
            replica.settled_requests -= requests
            replica.settled_tokens -= tokens
        self._refresh(replica)

    def loads(
        self, ready: Sequence[int], now: float, elsewhere: Sequence[tuple[float, float, float]] = ()
    ) -> Sequence[ReplicaLoad]:
        """Return the load of each replica of `ready`, in this order. Valid until the next call of any method.

        elsewhere: by dp_rank, what must be added for the requests of other front ends; as in `Unreported`
        """
        loads = self._own_view(ready, now)
        if elsewhere:
            return [_with_others(load, elsewhere[load.dp_rank]) for load in loads]
        return loads

    def _own_view(self, ready: Sequence[int], now: float) -> Sequence[ReplicaLoad]:
        listed_ready, listed, holds_until = self._listed
        if now <= holds_until and ready == listed_ready:
            return listed
        loads = []
        oldest = float("inf")
        for dp_rank in ready:
            replica = self._replicas[dp_rank]
            if replica.stats is not None and now - replica.stats.reported_at > FORGET_AFTER_S:
                # What it says is too old to be true; our own requests are still known.
                replica.stats = None
                self._refresh(replica)
            oldest = min(oldest, float("-inf") if replica.stats is None else replica.stats.reported_at)
            loads.append(replica.load)
        if oldest == float("-inf"):
            return _fill_in(loads)
        self._listed = (list(ready), loads, oldest + FORGET_AFTER_S)
        return loads

    def _settle(self, replica: _Replica, now: float, prefill: int, requests: int, tokens: int) -> None:
        if replica.stats is None:
            return
        replica.settled.append((now, prefill, requests, tokens))
        replica.settled_prefill += prefill
        replica.settled_requests += requests
        replica.settled_tokens += tokens

    def _refresh(self, replica: _Replica) -> None:
        """Compute the load anew. Called on each change, so that a decision only reads."""
        load, stats = replica.load, replica.stats
        num_unacked = len(replica.unacknowledged)
        if stats is None:
            load.is_known = False
            load.num_requests = load.num_own
            load.num_waiting = num_unacked
            load.prefill_tokens = max(0, replica.unacked_prefill)
            load.running_tokens = replica.unacked_tokens
            load.kv_usage = 0.0
            load.headroom_tokens = float("inf")
            load.reported_requests = load.reported_waiting = 0
            return
        load.is_known = True
        num_requests = stats.num_waiting + stats.num_running + num_unacked - replica.settled_requests
        load.num_requests = max(load.num_own, num_requests)
        load.num_waiting = max(0, stats.num_waiting + num_unacked - replica.settled_requests)
        prefill = stats.num_prefill_tokens + replica.unacked_prefill - replica.settled_prefill
        load.prefill_tokens = max(0, prefill)
        running = stats.num_running_tokens + replica.unacked_tokens - replica.settled_tokens
        load.running_tokens = max(0, running)
        load.kv_usage = stats.kv_usage
        load.reported_requests = stats.num_waiting + stats.num_running
        load.reported_waiting = stats.num_waiting
        load.headroom_tokens = stats.num_free_tokens + replica.settled_tokens - load.prefill_tokens


def _with_others(load: ReplicaLoad, others: tuple[float, float, float]) -> ReplicaLoad:
    """A replica's load with the requests of other front ends."""
    # Once for each replica and decision: no keywords, no calls of max().
    prefill, requests, tokens = others
    num_own = load.num_own
    num_requests = load.num_requests + requests
    num_waiting = load.num_waiting + requests
    prefill_tokens = load.prefill_tokens + prefill
    running_tokens = load.running_tokens + tokens
    return ReplicaLoad(
        load.dp_rank,
        num_own,
        num_requests if num_requests > num_own else num_own,
        num_waiting if num_waiting > 0.0 else 0.0,
        prefill_tokens if prefill_tokens > 0.0 else 0.0,
        running_tokens if running_tokens > 0.0 else 0.0,
        load.kv_usage,
        load.headroom_tokens - prefill,
        load.reported_requests,
        load.reported_waiting,
        load.is_known,
    )


def _fill_in(loads: list[ReplicaLoad]) -> list[ReplicaLoad]:
    """Take unknown replicas for as busy as the mean of the known ones, or as our own requests make them."""
    known = [load for load in loads if load.is_known]
    if not known:
        return loads

    def mean(name: str) -> float:
        return sum(float(getattr(load, name)) for load in known) / len(known)

    means: Mapping[str, float] = {
        name: mean(name) for name in ("num_requests", "num_waiting", "prefill_tokens", "running_tokens")
    }
    headroom_tokens = mean("headroom_tokens")
    filled = []
    for load in loads:
        if not load.is_known:
            load = ReplicaLoad(
                load.dp_rank,
                num_own=load.num_own,
                num_requests=max(load.num_requests, means["num_requests"]),
                num_waiting=max(load.num_waiting, means["num_waiting"]),
                prefill_tokens=max(load.prefill_tokens, means["prefill_tokens"]),
                running_tokens=max(load.running_tokens, means["running_tokens"]),
                kv_usage=load.kv_usage,
                headroom_tokens=min(load.headroom_tokens, headroom_tokens),
            )
        filled.append(load)
    return filled
