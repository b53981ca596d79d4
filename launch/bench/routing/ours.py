"""Our own routing as a policy of the benchmark: the very load book, prefix index and balancer of a front end. Pure.

Called by: simulation.py. What DpClient does around them, without sockets.
"""

from collections.abc import Sequence

from ....cluster.front_end_board import FrontEndBoard
from ....cluster.load_balancer import Balancer
from ....cluster.load_book import LoadBook
from ....cluster.prefix_index import PrefixIndex
from ....cluster.routing import RoutingPolicy, RoutingRequest
from ....engine.messages import EngineStats
from ....engine.prefix_log import PrefixDelta
from .replica import Job
from .simulation import Cluster


class OurRouter:
    """One front end of ours. block_tokens: what one key stands for; board: of all front ends."""

    def __init__(
        self,
        policy: RoutingPolicy,
        cluster: Cluster,
        client_index: int,
        block_tokens: int,
        board: FrontEndBoard,
    ) -> None:
        self._board = board
        self._block_tokens = block_tokens
        self._ready = list(range(cluster.data_parallel_size))
        self.book = LoadBook(client_index=client_index)
        for dp_rank in self._ready:
            self.book.join(dp_rank)
        self.index = PrefixIndex()
        self._uses_prefixes = policy is RoutingPolicy.PREFIX_AWARE
        self.balancer = Balancer(
            policy,
            max_num_batched_tokens=cluster.service.max_num_batched_tokens,
            client_index=client_index,
            num_clients=cluster.num_front_ends,
        )
        self._expected: dict[str, tuple[bytes, ...]] = {}

    def choose(self, job: Job, now: float) -> int:
        """See Router."""
        request = job.request
        keys = request.keys[: request.num_prompt_blocks]
        cached = {}
        if self._uses_prefixes:
            longest = request.num_prompt_tokens - 1
            cached = {
                rank: min(blocks * self._block_tokens, longest)
                for rank, blocks in self.index.match(keys).items()
            }
        decision = self.balancer.choose(
            RoutingRequest(num_prompt_tokens=request.num_prompt_tokens, num_cached_tokens=cached),
            self.book.loads(self._ready, now, self._board.unreported_elsewhere(len(self._ready))),
            self.book.step_cost.cost,
            self.book.mean_output_tokens,
        )
        job.num_expected_cached_tokens = decision.num_cached_tokens
        job.number = self.book.add(
            request.request_id,
            decision.dp_rank,
            num_prompt_tokens=request.num_prompt_tokens,
            num_prefill_tokens=request.num_prompt_tokens - decision.num_cached_tokens,
        )
        if self._uses_prefixes:
            self.index.expect(decision.dp_rank, keys)
            self._expected[request.request_id] = keys
        self._tell_others(decision.dp_rank)
        return decision.dp_rank

    def first_token(self, job: Job, now: float) -> None:
        """See Router."""
        self.book.first_token(job.request.request_id, now)
        keys = self._expected.pop(job.request.request_id, None)
        if keys is not None:
            self.index.settle(job.dp_rank, keys)
        self._tell_others(job.dp_rank)

    def finish(self, job: Job, now: float) -> None:
        """See Router."""
        self.book.finish(job.request.request_id, now, num_output_tokens=job.request.num_output_tokens)
        self._tell_others(job.dp_rank)

    def take_snapshot(self, stats: Sequence[EngineStats], now: float) -> None:
        """See Router."""
        for one in stats:
            self.book.report(one)
            self._tell_others(one.dp_rank)

    def take_delta(self, dp_rank: int, delta: PrefixDelta) -> None:
        """See Router."""
        if self._uses_prefixes:
            self.index.apply(dp_rank, delta)

    def _tell_others(self, dp_rank: int) -> None:
        if not self._board.is_alone:
            self._board.set_unreported(dp_rank, self.book.unreported(dp_rank))
