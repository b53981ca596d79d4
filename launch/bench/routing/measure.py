"""One policy on one load of the routing benchmark: its loads by name, and the numbers of a run. Pure.

Called by: the benchmark's command and its tests.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ....cluster.front_end_board import NUM_COLUMNS, FrontEndBoard
from ....cluster.routing import RoutingPolicy
from ....shm.number_table import NumberTable
from ..errors import BenchError
from ..stats import summarize
from ..traces import parse_trace
from .load import MADE_UP, Load, from_trace, turns
from .ours import OurRouter
from .peers import PEERS
from .simulation import Cluster, MakeRouter, simulate

POLICIES = (*(policy.value for policy in RoutingPolicy), *PEERS)
TRACES = {
    "mooncake-conversation": "mooncake-conversation*.jsonl",
    "mooncake-synthetic": "mooncake-synthetic*.jsonl",
    "azure-conversation": "azure-llm-*-conv.csv",
    "azure-code": "azure-llm-*-code.csv",
}
"""Traces by name, and the files that they are read from in --traces."""
RATES = {
    "multi-turn": 40.0,
    "tenant-chats": 10.0,
    "shared-prefix": 8.0,
    "heavy-tail": 8.0,
    "burst": 8.0,
    "no-reuse": 14.0,
    "mooncake-conversation": 1.5,
    "mooncake-synthetic": 1.0,
    "azure-conversation": 15.0,
    "azure-code": 10.0,
}
"""Requests a second and replica, so that a replica of the assumed service has much to do, and can do it."""


class RoutingRun(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one load. Times in seconds, hit_rate and spread (busiest replica / mean, in tokens) as parts."""

    load: str
    policy: str
    seed: int
    data_parallel_size: int
    num_front_ends: int
    snapshot_delay_s: float
    num_requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    hit_rate: float
    spread: float
    num_preemptions: int
    choose_p50_us: float


def make_load(name: str, num_requests: int, rate: float, seed: int, folder: Path | None) -> Load | None:
    """Make a load by name. None: its trace is not there."""
    if name in MADE_UP:
        return MADE_UP[name](num_requests, rate, seed)
    files = sorted(folder.glob(TRACES[name])) if folder is not None else []
    if not files:
        return None
    return from_trace(name, parse_trace(files[0].read_text(encoding="utf-8"))[:num_requests], rate)


def measure(load: Load, policy: str, cluster: Cluster, *, seed: int = 0) -> RoutingRun:
    """Simulate one policy on one load, to the end of its last request.

    Raises BenchError when a request does not fit into a replica's KV cache.
    """
    longest = max(
        request.num_prompt_tokens + request.num_output_tokens
        for _, first in load.arrivals
        for request in turns(first)
    )
    if longest > cluster.service.capacity_tokens:
        raise BenchError(
            f"{load.name}: a request takes {longest} tokens, and the KV cache has {cluster.service.capacity_tokens}; "
            "see --kv-tokens"
        )
    outcome = simulate(load, cluster, router_maker(policy, cluster, load.block_tokens))
    ttft = summarize(job.first_token_at - job.arrived_at for job in outcome.jobs)
    tpot = summarize(
        (job.finished_at - job.first_token_at) / (job.request.num_output_tokens - 1)
        for job in outcome.jobs
        if job.request.num_output_tokens > 1
    )
    e2e = summarize(job.finished_at - job.arrived_at for job in outcome.jobs)
    return RoutingRun(
        load=load.name,
        policy=policy,
        seed=seed,
        data_parallel_size=cluster.data_parallel_size,
        num_front_ends=cluster.num_front_ends,
        snapshot_delay_s=cluster.snapshot_delay_s,
        num_requests=len(outcome.jobs),
        ttft_p50_s=round(ttft.p50, 6),
        ttft_p99_s=round(ttft.p99, 6),
        tpot_p50_s=round(tpot.p50, 6),
        tpot_p99_s=round(tpot.p99, 6),
        e2e_p50_s=round(e2e.p50, 4),
        e2e_p99_s=round(e2e.p99, 4),
        hit_rate=round(outcome.hit_tokens / max(1, outcome.queried_tokens), 4),
        spread=round(spread_of(outcome.replica_tokens), 3),
        num_preemptions=outcome.num_preemptions,
        choose_p50_us=round(summarize(outcome.choose_s).p50 * 1e6, 1),
    )


def router_maker(policy: str, cluster: Cluster, block_tokens: int) -> MakeRouter:
    """Give the maker of one policy's routers."""
    if policy in PEERS:
        return lambda client_index: PEERS[policy](cluster, client_index, block_tokens)
    table = NumberTable.private(cluster.num_front_ends, NUM_COLUMNS)
    return lambda client_index: OurRouter(
        RoutingPolicy(policy), cluster, client_index, block_tokens, FrontEndBoard(table, client_index)
    )


def spread_of(replica_tokens: Sequence[int]) -> float:
    """How much more than the mean the busiest replica has done; 1: all did as much."""
    return max(replica_tokens) * len(replica_tokens) / max(1, sum(replica_tokens))
