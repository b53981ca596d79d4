"""Other projects' routing policies, written from their published formulas, as policies of the benchmark. Pure.

Called by: simulation.py. Each gets what its original gets, and in its best form: exact counts of its own requests, the
same snapshots as ours, and where it looks at prefixes the exact contents of all caches, or, where the original
approximates them by what it routed itself, all of that. Scores are as published; the lowest wins unless said.
"""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ....cluster.prefix_index import PrefixIndex
from ....engine.messages import EngineStats
from ....engine.prefix_log import PrefixDelta
from .replica import Job
from .simulation import Cluster


class PeerRouter(ABC):
    """What all of them keep: the last snapshot, and their own unfinished requests. Subclasses are the formulas."""

    def __init__(self, cluster: Cluster, client_index: int, block_tokens: int) -> None:
        self.ranks = list(range(cluster.data_parallel_size))
        self.num_clients = cluster.num_front_ends
        self.block_tokens = block_tokens
        self.capacity_blocks = cluster.service.capacity_tokens // block_tokens
        self.rng = random.Random(client_index)
        self.turn = client_index
        self.waiting: Counter[int] = Counter()
        self.running: Counter[int] = Counter()
        self.kv_usage: dict[int, float] = dict.fromkeys(self.ranks, 0.0)
        self.own: Counter[int] = Counter()
        self.index = PrefixIndex()

    def choose(self, job: Job, now: float) -> int:
        """See Router."""
        dp_rank = self.pick(job, job.request.keys[: job.request.num_prompt_blocks])
        self.own[dp_rank] += 1
        self.chosen(job, dp_rank)
        return dp_rank

    @abstractmethod
    def pick(self, job: Job, keys: Sequence[bytes]) -> int:
        """Apply the formula."""

    def chosen(self, job: Job, dp_rank: int) -> None:
        """Bookkeeping after a choice; most have none."""
        return

    def first_token(self, job: Job, now: float) -> None:
        """See Router; most do not care."""
        return

    def finish(self, job: Job, now: float) -> None:
        """See Router."""
        self.own[job.dp_rank] -= 1

    def take_snapshot(self, stats: Sequence[EngineStats], now: float) -> None:
        """See Router."""
        for one in stats:
            self.waiting[one.dp_rank] = one.num_waiting
            self.running[one.dp_rank] = one.num_running
            self.kv_usage[one.dp_rank] = one.kv_usage

    def take_delta(self, dp_rank: int, delta: PrefixDelta) -> None:
        """See Router."""
        self.index.apply(dp_rank, delta)

    def lowest(self, score: Callable[[int], float]) -> int:
        """The rank of the lowest score; equals take turns."""
        start = self.turn % len(self.ranks)
        self.turn += 1
        return min((*self.ranks[start:], *self.ranks[:start]), key=score)


class VllmOld(PeerRouter):
    """vLLM until mid 2026: 4 * waiting + running; the local count of waiting grows by the number of front ends."""

    def pick(self, job: Job, keys: Sequence[bytes]) -> int:
        """See PeerRouter."""
        return min(self.ranks, key=lambda rank: 4 * self.waiting[rank] + self.running[rank])

    def chosen(self, job: Job, dp_rank: int) -> None:
        """See PeerRouter."""
        self.waiting[dp_rank] += self.num_clients


class Vllm(VllmOld):
    """vLLM now: max(clients * own, waiting + running) + 6 * waiting * max(0, kv - 0.5)."""

    def pick(self, job: Job, keys: Sequence[bytes]) -> int:
        """See PeerRouter."""

        def score(rank: int) -> float:
            waiting = self.waiting[rank]
            load = max(self.num_clients * self.own[rank], waiting + self.running[rank])
            return load + 6.0 * waiting * max(0.0, self.kv_usage[rank] - 0.5)

        return self.lowest(score)


class SglangShortestQueue(PeerRouter):
    """SGLang's total_requests: argmin of running + waiting, one more after each choice."""

    def pick(self, job: Job, keys: Sequence[bytes]) -> int:
        """See PeerRouter."""
        return min(self.ranks, key=lambda rank: self.waiting[rank] + self.running[rank])

    def chosen(self, job: Job, dp_rank: int) -> None:
        """See PeerRouter."""
        self.waiting[dp_rank] += 1


class SglangCacheAware(PeerRouter):
    """SGLang's gateway: shortest queue when unbalanced, else the best match above a threshold, else the least loaded.

    Its tree knows what it routed itself, not what the engines hold. Thresholds: 0.5, absolute 32, relative 1.1.
    """

    def __init__(self, cluster: Cluster, client_index: int, block_tokens: int) -> None:
        super().__init__(cluster, client_index, block_tokens)
        self._routed = PrefixIndex()

    def pick(self, job: Job, keys: Sequence[bytes]) -> int:
        """See PeerRouter."""
        loads = [self.own[rank] for rank in self.ranks]
        if max(loads) - min(loads) > 32 and max(loads) > 1.1 * min(loads):
            return self.lowest(lambda rank: self.own[rank])
        found = self._routed.match(keys)
        if found:
            best = max(found, key=found.__getitem__)
            if found[best] * self.block_tokens > 0.5 * job.request.num_prompt_tokens:
                return best
        return self.lowest(lambda rank: self.own[rank])

    def chosen(self, job: Job, dp_rank: int) -> None:
        """See PeerRouter."""
        self._routed.expect(dp_rank, job.request.keys[: job.request.num_prompt_blocks])


class Dynamo(PeerRouter):
    """Dynamo's cost: max(active prefill blocks + prompt blocks - overlap, 0) + active decode blocks + new blocks."""

    def __init__(self, cluster: Cluster, client_index: int, block_tokens: int) -> None:
        super().__init__(cluster, client_index, block_tokens)
        self._prefill: Counter[int] = Counter()
        self._decode: Counter[int] = Counter()
        self._cost: dict[str, tuple[int, int]] = {}
        self._found: Mapping[int, int] = {}

    def pick(self, job: Job, keys: Sequence[bytes]) -> int:
        """See PeerRouter."""
        found = self._found = self.index.match(keys)
        blocks = -(-job.request.num_prompt_tokens // self.block_tokens)

        def cost(rank: int) -> float:
            adjusted = max(self._prefill[rank] + blocks - found.get(rank, 0), 0)
            return adjusted + self._decode[rank] + blocks

        return self.lowest(cost)

    def chosen(self, job: Job, dp_rank: int) -> None:
        """See PeerRouter."""
        blocks = -(-job.request.num_prompt_tokens // self.block_tokens)
        missing = blocks - self._found.get(dp_rank, 0)
        self._prefill[dp_rank] += missing
        self._decode[dp_rank] += blocks
        self._cost[job.request.request_id] = (missing, blocks)

    def first_token(self, job: Job, now: float) -> None:
        """See PeerRouter."""
        self._prefill[job.dp_rank] -= self._cost[job.request.request_id][0]

    def finish(self, job: Job, now: float) -> None:
        """See PeerRouter."""
        super().finish(job, now)
        self._decode[job.dp_rank] -= self._cost.pop(job.request.request_id)[1]


class LlmD(PeerRouter):
    """llm-d's weighted sum of prefix, queue and KV scores, the highest wins. The weights are ours: 3, 2 and 2.

    Its operators choose the weights; these do well here. The prefix scorer reads the exact contents of the caches.
    """

    def pick(self, job: Job, keys: Sequence[bytes]) -> int:
        """See PeerRouter."""
        found = self.index.match(keys)
        queues = {rank: self.waiting[rank] for rank in self.ranks}
        most, least = max(queues.values()), min(queues.values())

        def score(rank: int) -> float:
            prefix = found.get(rank, 0) / len(keys) if keys else 0.0
            queue = (most - queues[rank]) / (most - least) if most > least else 1.0
            return -(3 * prefix + 2 * queue + 2 * (1 - self.kv_usage[rank]))

        return self.lowest(score)


class Aibrix(PeerRouter):
    """AIBrix's prefix-cache: fewest requests when the spread is above 8, else by match, first with a usual load."""

    def pick(self, job: Job, keys: Sequence[bytes]) -> int:
        """See PeerRouter."""
        loads = [max(self.own[rank], self.running[rank]) for rank in self.ranks]
        if max(loads) - min(loads) > 8:
            return self.lowest(lambda rank: loads[rank])
        found = self.index.match(keys)
        mean = sum(loads) / len(loads)
        deviation = (sum((load - mean) ** 2 for load in loads) / len(loads)) ** 0.5
        order = sorted(found, key=lambda rank: (-found[rank], loads[rank]))
        for rank in order:
            if loads[rank] <= mean + 2 * deviation:
                return rank
        return self.lowest(lambda rank: loads[rank])


class RayPowerOfTwo(PeerRouter):
    """Ray Serve: of two at random the one with fewer ongoing requests."""

    def pick(self, job: Job, keys: Sequence[bytes]) -> int:
        """See PeerRouter."""
        pair = self.rng.sample(self.ranks, min(2, len(self.ranks)))
        return min(pair, key=lambda rank: max(self.own[rank], self.waiting[rank] + self.running[rank]))


PEERS: Mapping[str, type[PeerRouter]] = {
    "vllm": Vllm,
    "vllm-old": VllmOld,
    "sglang-shortest": SglangShortestQueue,
    "sglang-cache": SglangCacheAware,
    "dynamo": Dynamo,
    "llm-d": LlmD,
    "aibrix": Aibrix,
    "ray-p2c": RayPowerOfTwo,
}
"""By the name that tables show."""
