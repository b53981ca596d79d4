"""RequestRouter: finds a replica for each request of one front end, and keeps the books that this takes. Pure.

Called by: DpClient, on its event loop; all instants are given. It joins the load book, the prefix index, the balancer
and sticky sessions, and counts why each replica was chosen. Admission is here as well: when as many requests wait as
may, in one replica or in all, the next one is told when to come back.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ..engine.errors import InvalidRequestError, QueueFullError
from ..engine.messages import EngineCoreRequest, EngineStats, StepOutputs
from ..engine.prefix_log import PrefixDelta, block_keys
from .errors import NoReplicaError
from .front_end_board import FrontEndBoard
from .load_balancer import Balancer
from .load_book import LoadBook, ReplicaLoad
from .prefix_index import PrefixIndex
from .routing import Decision, RoutingOptions, RoutingPolicy, RoutingReason, RoutingRequest

MAX_SESSIONS = 65_536
"""Sticky sessions that are remembered, the most recently used ones."""
MAX_RETRY_S = 60.0


@dataclass(slots=True)
class _Routed:
    """One unfinished request of ours."""

    dp_rank: int
    keys: list[bytes]
    num_output_tokens: int = 0


class RequestRouter:
    """See the module. Owner: DpClient.

    client_index, incarnation: of this front end
    board: what front ends tell each other; None: there is one
    """

    def __init__(
        self,
        options: RoutingOptions,
        *,
        client_index: int = 0,
        incarnation: int = 0,
        board: FrontEndBoard | None = None,
    ) -> None:
        self._options = options
        self._incarnation = incarnation
        self._board = board or FrontEndBoard.alone()
        self._book = LoadBook(client_index=client_index, incarnation=incarnation)
        self._index = PrefixIndex()
        self._block_sizes: dict[int, int] = {}
        self._balancer = Balancer(
            options.policy,
            max_num_batched_tokens=options.max_num_batched_tokens,
            client_index=client_index,
            num_clients=options.num_clients,
        )
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._routed: dict[str, _Routed] = {}
        self._last_group: tuple[str | None, int] = (None, 0)
        self.num_by_reason: Counter[RoutingReason] = Counter()
        """Decisions since the start, by reason."""

    @property
    def follows_prefixes(self) -> bool:
        """True when it must be told what the replicas' prefix caches hold."""
        return self._options.policy is RoutingPolicy.PREFIX_AWARE

    def join(self, dp_rank: int, *, block_size: int) -> None:
        """A replica serves from now on, with an empty cache."""
        self._block_sizes[dp_rank] = block_size
        self._book.join(dp_rank)
        self._index.forget(dp_rank)
        self._tell_others(dp_rank)

    def leave(self, dp_rank: int) -> None:
        """A replica is gone; its requests come again, through `route`."""
        self._block_sizes.pop(dp_rank, None)
        self._book.leave(dp_rank)
        self._index.forget(dp_rank)
        for request_id in [name for name, routed in self._routed.items() if routed.dp_rank == dp_rank]:
            del self._routed[request_id]
        self._tell_others(dp_rank)

    def route(
        self, request: EngineCoreRequest, ready: Sequence[int], now: float, *, is_replay: bool = False
    ) -> tuple[EngineCoreRequest, Decision]:
        """Find a replica of `ready`. Returns the request as it must be sent, and the decision.

        is_replay: it was admitted before, and is never refused for a full queue
        Raises NoReplicaError, QueueFullError; InvalidRequestError for a replica that the client asks for in vain.
        """
        keys = block_keys(request.block_hashes) if self.follows_prefixes else []
        decision = self._decide(request, ready, keys, now, is_replay=is_replay)
        num_prompt_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        number = self._book.add(
            request.request_id,
            decision.dp_rank,
            num_prompt_tokens=num_prompt_tokens,
            num_prefill_tokens=num_prompt_tokens - decision.num_cached_tokens,
        )
        self._index.expect(decision.dp_rank, keys)
        self._routed[request.request_id] = _Routed(decision.dp_rank, keys)
        self._last_group = (request.group_id, decision.dp_rank)
        has_session = self._options.sticky_sessions and request.session_id is not None
        if has_session and self._options.num_clients == 1:
            assert request.session_id is not None
            self._sessions[request.session_id] = decision.dp_rank
            self._sessions.move_to_end(request.session_id)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self.num_by_reason[decision.reason] += 1
        self._tell_others(decision.dp_rank)
        sent = msgspec.structs.replace(
            request,
            number=number,
            incarnation=self._incarnation,
            num_expected_cached_tokens=decision.num_cached_tokens,
        )
        return sent, decision

    def check_room(self, num_waiting_here: int) -> None:
        """Raise QueueFullError when no request more may wait for a replica to come back.

        num_waiting_here: those of this front end that do
        """
        limit = self._options.max_num_waiting
        is_full = num_waiting_here >= self._options.max_num_waiting_per_replica
        if is_full or (limit is not None and num_waiting_here >= limit):
            raise QueueFullError(1.0)

    def observe(self, outputs: StepOutputs, now: float) -> None:
        """Take note of outputs of our requests; unknown ones are ignored."""
        for request_id in outputs.request_ids:
            self._count_tokens(request_id, 1, now)
        for output in outputs.others:
            self._count_tokens(output.request_id, len(output.new_token_ids), now)
            if output.finish_reason is not None and (routed := self._routed.get(output.request_id)):
                self._end(output.request_id, now, routed.num_output_tokens)

    def drop(self, request_id: str, now: float) -> None:
        """A request was given up; an unknown one is ignored."""
        if request_id in self._routed:
            self._end(request_id, now, None)

    def take_report(self, stats: EngineStats) -> None:
        """Take a replica's report out of a snapshot."""
        self._book.report(stats)
        self._tell_others(stats.dp_rank)

    def loads(self, ready: Sequence[int], now: float) -> Sequence[ReplicaLoad]:
        """Return how busy these replicas are, of which there is one at least, as far as is known here."""
        return self._book.loads(ready, now, self._board.unreported_elsewhere(max(ready) + 1))

    def take_delta(self, dp_rank: int, delta: PrefixDelta) -> bool:
        """Take what has changed in a replica's prefix cache. False: it must be asked to tell everything again."""
        return self._index.apply(dp_rank, delta)

    def _decide(
        self,
        request: EngineCoreRequest,
        ready: Sequence[int],
        keys: Sequence[bytes],
        now: float,
        *,
        is_replay: bool,
    ) -> Decision:
        if not ready:
            raise NoReplicaError()
        cached = self._cached_tokens(request, keys)

        def fixed(dp_rank: int, reason: RoutingReason) -> Decision:
            return Decision(
                dp_rank=dp_rank, reason=reason, scores={}, num_cached_tokens=cached.get(dp_rank, 0)
            )

        loads = self.loads(ready, now)
        if not is_replay:
            loads = self._admit(loads)
            open_ranks = {load.dp_rank for load in loads}
            if (asked := request.routed_dp_rank) is not None:
                if asked not in ready:
                    raise InvalidRequestError(f"replica {asked} does not serve", field="X-Phalanx-Replica")
                if asked not in open_ranks:
                    raise self._full(loads)
                return fixed(asked, RoutingReason.ASKED_FOR)
            group_id, dp_rank = self._last_group
            if request.group_id is not None and request.group_id == group_id and dp_rank in ready:
                return fixed(dp_rank, RoutingReason.GROUP)
            if self._options.sticky_sessions and request.session_id is not None:
                known = self._home(request.session_id, ready)
                if known in open_ranks:
                    return fixed(known, RoutingReason.SESSION)
        decision = self._balancer.choose(
            RoutingRequest(num_prompt_tokens=len(request.prompt_token_ids), num_cached_tokens=cached),
            loads,
            self._book.step_cost.cost,
            self._book.mean_output_tokens,
        )
        return msgspec.structs.replace(decision, reason=RoutingReason.REPLAY) if is_replay else decision

    def _home(self, session_id: str, ready: Sequence[int]) -> int | None:
        """The replica of a session; None: it has none yet, and gets the one that is chosen for its first request."""
        if self._options.num_clients == 1:
            return self._sessions.get(session_id)
        # Its requests come through several front ends, which must agree without asking: the highest hash wins.
        return max(ready, key=lambda dp_rank: hashlib.sha256(f"{dp_rank} {session_id}".encode()).digest())

    def _cached_tokens(self, request: EngineCoreRequest, keys: Sequence[bytes]) -> Mapping[int, int]:
        # One token is always computed, or there would be nothing to sample from.
        longest = len(request.prompt_token_ids) - 1
        return {
            dp_rank: min(num_blocks * self._block_sizes[dp_rank], longest)
            for dp_rank, num_blocks in self._index.match(keys).items()
            if dp_rank in self._block_sizes
        }

    def _admit(self, loads: Sequence[ReplicaLoad]) -> Sequence[ReplicaLoad]:
        """Return the replicas whose queue is not full. Raises QueueFullError when none is, or all together are."""
        limit = self._options.max_num_waiting
        if limit is not None:
            if sum(load.num_waiting for load in loads) >= limit:
                raise self._full(loads)
        room = [load for load in loads if load.num_waiting < self._options.max_num_waiting_per_replica]
        if not room:
            raise self._full(loads)
        return room

    def _full(self, loads: Sequence[ReplicaLoad]) -> QueueFullError:
        """Say when the shortest queue will have been computed."""
        least = min(load.prefill_tokens for load in loads)
        return QueueFullError(min(MAX_RETRY_S, max(1.0, least * self._book.step_cost.cost.prefill_token_s)))

    def _tell_others(self, dp_rank: int) -> None:
        """Say on the board what the other front ends must add to the reports of a replica."""
        if not self._board.is_alone:
            self._board.set_unreported(dp_rank, self._book.unreported(dp_rank))

    def _count_tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        routed = self._routed.get(request_id)
        if routed is None or num_tokens == 0:
            return
        if routed.num_output_tokens == 0:
            self._book.first_token(request_id, now)
            self._settle(routed)
            self._tell_others(routed.dp_rank)
        routed.num_output_tokens += num_tokens

    def _settle(self, routed: _Routed) -> None:
        self._index.settle(routed.dp_rank, routed.keys)
        routed.keys = []

    def _end(self, request_id: str, now: float, num_output_tokens: int | None) -> None:
        routed = self._routed.pop(request_id)
        self._settle(routed)
        self._book.finish(request_id, now, num_output_tokens=num_output_tokens)
        self._tell_others(routed.dp_rank)
